"""Keep everything, and read the pages that the query needs."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.policies.cache_policy import BudgetTables, CachePolicy
from tfkv.layers.policies.dense import Dense

#: Of a page that is always read, and of one that is not there: beyond any bound.
_ALWAYS, _ABSENT = 1e30, -1e30


@dataclasses.dataclass(frozen=True)
class Quest(Dense):
    """Stores every token; a token that is read alone looks at a few pages only.

    Choose it for long contexts where the bytes are there and the time is not: it saves reading,
    and no memory. Beside its keys each page has the least and the greatest number of each
    channel, a sixteenth of a float32 key a token. They bound what a query can score on the page,
    ``Σ_h max(q_h · least_h, q_h · greatest_h)``, and each KV head reads the pages of which one of
    its query heads may score highest, besides the first and the newest ones.

    A chunk of several tokens reads everything, as a prompt does in the paper. So a result depends
    on how a text is cut, and a token that was read alone has other keys than in a prompt.

    Args:
        pages: Pages that each KV head reads of those before the newest.
        first: First pages that are always among them: most attention goes to the first tokens,
            and their bounds do not say so. 0 as in the paper.
        page_size: Tokens of a page; in an artifact those of its pages.
        recent: Newest pages, the query's own included, which are always read.
        dense_layers: First layers of a model that read everything. A layer by itself knows no
            number, and selects.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Tang et al., https://arxiv.org/abs/2406.10774, and its code,
        https://github.com/mit-han-lab/Quest. There each query head selects; here those that
        share keys do it together, so that a page is read once.
    """

    name = "quest"
    chunk_invariant = False
    selects = True

    pages: int = 64
    page_size: int = 16
    first: int = 1
    recent: int = 2
    dense_layers: int = 2

    def __post_init__(self) -> None:
        least = {"pages": 1, "page_size": 2, "first": 0, "recent": 1, "dense_layers": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < bound:
                raise ConfigError(f"`{name}` must be at least {bound}. Received: {name}={value!r}.")
        if self.first > self.pages:
            raise ConfigError(
                f"`first` pages are among `pages`. Received: first={self.first}, "
                f"pages={self.pages}."
            )

    @property
    def together(self) -> int:
        return self.page_size

    def at_layer(
        self, layer: int, layers: int, heads: int, tables: BudgetTables | None
    ) -> CachePolicy:
        del layers, heads, tables
        return Dense() if layer < self.dense_layers else dataclasses.replace(self, dense_layers=0)

    def choose(
        self, queries: tf.Tensor, bounds: tf.Tensor, positions: tf.Tensor, numbers: tf.Tensor
    ) -> tf.Tensor:
        """Which pages each KV head reads.

        Args:
            queries: float32 ``[B, K, G, H]`` of `attention.group_queries`, of one token each.
            bounds: ``[B, K, P, 2H]`` of `page_bounds.bounds_of`, of the pages as they are stored.
            positions: int32 ``[B]``, of the queries; −1 = none.
            numbers: int32 ``[B, P]``, which page of the session each is, from 0; −1 = none.

        Returns:
            int32 ``[B, K, n]``, n = pages + recent, or P where that is less: places among the P,
            those that are always read before those that are selected; −1 behind the last.
        """
        page = tf.math.floordiv(positions, self.page_size)
        always = (numbers < self.first) | (numbers > (page - self.recent)[:, tf.newaxis])
        worth = tf.where(always[:, tf.newaxis], _ALWAYS, self.worth(queries, bounds, numbers))
        worth = tf.where((numbers >= 0)[:, tf.newaxis], worth, _ABSENT)
        best = tf.math.top_k(worth, min(self.pages + self.recent, bounds.shape[2]))
        return tf.where(best.values > _ABSENT, best.indices, -1)

    def worth(self, queries: tf.Tensor, bounds: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        """What each page is worth to the query, float32 ``[B, K, P]``; see `choose`."""
        del numbers
        # The greater product has the greatest key where the query is positive, else the least.
        split = tf.concat([tf.maximum(queries, 0.0), tf.minimum(queries, 0.0)], axis=-1)
        scores = tf.matmul(split, tf.cast(bounds, queries.dtype), transpose_b=True)
        return tf.reduce_max(scores, axis=2)

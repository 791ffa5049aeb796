"""Where a session's tokens lie on its pages, and which of them a query sees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfkv.config import DecoderConfig, EngineConfig, described
from tfkv.errors import ConfigError
from tfkv.layers import masks, page_bounds
from tfkv.layers.cache_fit import check_fit
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs import CacheCodec
from tfkv.layers.entry_layout import EntryLayout
from tfkv.layers.policies import EvictingPolicy, Quest

#: Positions of a session that may outgrow the trained context: as far as float32 counts, in
#: which rotary angles are computed.
ENDLESS = 1 << 24


@dataclasses.dataclass(frozen=True)
class CacheGeometry:
    """The policy of some layers, mostly of all, laid out on pages.

    A session's entries are its pages' tokens in order: column ``entry // page_size`` of its
    row in the block table. A policy that keeps everything gets a ring, too, with the first
    page as sinks: it comes into use only when a session is allowed to slide.

    Args:
        cache: Policy, and the codec of its layers, or of most of them.
        page_size: Tokens a page (axis C).
        layout: Entries of a session.
        positions: Most positions a session may reach.
        layers: Whose it is, ascending.
        codecs: Of each of them.
        selects: Of each of them, whether a token that is read alone looks at some pages only.
    """

    cache: CacheSpec
    page_size: int
    layout: EntryLayout
    positions: int
    layers: tuple[int, ...]
    codecs: tuple[CacheCodec, ...]
    selects: tuple[bool, ...]

    @classmethod
    def of(
        cls,
        model: DecoderConfig,
        engine: EngineConfig,
        prefill_piece: int,
        cache: CacheSpec,
        codecs: Mapping[int, CacheCodec],
    ) -> CacheGeometry:
        """Geometry of layers of an artifact.

        Args:
            model: Architecture.
            engine: Page size, capacity and chunks.
            prefill_piece: Tokens of a row that are prefilled at once.
            cache: Of the layers.
            codecs: By their numbers, ascending.

        Raises:
            ConfigError: The capacity is too small to work with, or the cache does not suit the
                model.
        """
        _check_own_keys(model)
        _check_positions(model, cache)
        asked = described(engine.cache, engine.layer_caches)
        page = engine.page_size
        # A page of slack at least: a window that straddles pages must not meet itself.
        slack = max(engine.decode_chunk, prefill_piece, page)
        chunk = max(engine.decode_chunk, prefill_piece)
        for codec in dict.fromkeys(codecs.values()):
            least = chunk + codec.tokens - 1
            if 0 < codec.recent < least:
                raise ConfigError(
                    f"`recent` of a codec must be 0 or at least {least}, what an artifact computes "
                    f"at once. Received: cache={asked!r}, which keeps {codec.recent}."
                )
            if page % codec.tokens:
                raise ConfigError(
                    f"`page_size` must be a multiple of the {codec.tokens} tokens that the codec "
                    f"codes together. Received: page_size={page}, cache={asked!r}."
                )
        selects = _selecting(model, engine, cache, list(codecs))
        capacity = min(engine.capacity, model.context_length)
        layout = cache.policy.layout(capacity, slack, page)
        if isinstance(cache.policy, EvictingPolicy):
            if cache.policy.interval < chunk:
                raise ConfigError(
                    f"`interval` must be at least {chunk} where a policy evicts, what an artifact "
                    f"computes at once. Received: cache={engine.cache!r}."
                )
            # Beside what is stored a chunk, and a page that both may share.
            more = chunk + page
            layout = cache.policy.layout(capacity + more, cache.policy.interval + more, page)
        if not cache.policy.bounded:
            if layout.entries < 2 * page:
                raise ConfigError(
                    f"`capacity` must hold at least two pages of {page} tokens. "
                    f"Received: capacity={engine.capacity}."
                )
            layout = EntryLayout(layout.entries, sinks=page)
        positions = model.context_length
        if cache.policy.furthest is not None:
            positions = ENDLESS
            if cache.policy.furthest < chunk - 1:
                raise ConfigError(
                    f"`window` and `sinks` must be at least {chunk} together, what an artifact "
                    f"computes at once. Received: cache={engine.cache!r}."
                )
        return cls(cache, page, layout, positions, tuple(codecs), tuple(codecs.values()), selects)

    def bytes_per_token(self, model: DecoderConfig) -> dict[str, int]:
        """Bytes that keys and values of one stored token take in its layers, by side; exact."""
        heads, width = model.num_key_value_heads, model.head_dim
        sides = {
            side: heads * sum(codec.sides()[side].bytes_per_token(width) for codec in self.codecs)
            for side in ("keys", "values")
        }
        bounds = page_bounds.bytes_per_token(width, self.page_size)
        sides["keys"] += heads * sum(self.selects) * bounds
        return sides

    def with_codec(self, codec: CacheCodec) -> CacheGeometry:
        """The same layout for a codec of `cache` that has got its tables."""
        codecs = (codec if one == self.cache.codec else one for one in self.codecs)
        cache = dataclasses.replace(self.cache, codec=codec)
        return dataclasses.replace(self, cache=cache, codecs=tuple(codecs))

    @property
    def columns(self) -> int:
        """Pages of a session."""
        return self.layout.entries // self.page_size

    @property
    def sinks(self) -> int:
        """First positions that lie on pages of their own, which every query sees."""
        if self.cache.policy.evicts:
            return 0
        return self.cache.policy.sinks if self.cache.policy.bounded else self.page_size

    def limit(self, overflow: tf.Tensor) -> tf.Tensor:
        """Most tokens a session may hold, by its overflow choice; int32."""
        if self.cache.policy.bounded:
            return tf.zeros_like(overflow) + self.positions
        whole = min(self.layout.entries, self.positions)
        return tf.where(overflow == 2, self.positions, whole)

    def first_visible(self, positions: tf.Tensor) -> tf.Tensor:
        """Oldest position that each query sees apart from the sinks.

        A session that slides drops whole pages, so that what a query sees depends on its
        position alone and not on how the prompt was cut.
        """
        if self.cache.policy.bounded:
            return self.cache.policy.first_visible(positions)
        past = positions + 1 - self.layout.entries
        dropped = -tf.math.floordiv(-past, self.page_size)
        return tf.where(past > 0, self.page_size * (dropped + 1), 0)

    def reversible(self, reached: tf.Tensor, floor: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        """Whether a query at `position` still finds all it sees, in a session that once held
        `reached` tokens and evicted those below `floor` by score."""
        if self.cache.policy.evicts:
            return position >= floor
        intact = reached <= self.layout.entries
        lost = self._written(reached) - self.layout.ring
        return intact | (self.first_visible(position) >= lost)

    def earliest_reversible(self, reached: tf.Tensor, floor: tf.Tensor) -> tf.Tensor:
        """The first position for which `reversible` holds; int32."""
        if self.cache.policy.evicts:
            return floor
        lost = self._written(reached) - self.layout.ring
        if self.cache.policy.bounded:
            earliest = lost - self.first_visible(tf.zeros_like(reached))
            return tf.where(reached <= self.layout.entries, 0, earliest)
        pages = -tf.math.floordiv(-(lost - self.page_size), self.page_size)
        earliest = self.layout.entries + (pages - 1) * self.page_size
        return tf.where(reached <= self.layout.entries, 0, earliest)

    def _written(self, reached: tf.Tensor) -> tf.Tensor:
        """End of what writing up to `reached` has overwritten a ring with: whole groups."""
        ends = [
            -tf.math.floordiv(-reached, together) * together
            for together in sorted({codec.tokens for codec in self.codecs})
        ]
        return functools.reduce(tf.maximum, ends)

    @property
    def rollback(self) -> int:
        """Tokens that can always be taken back; −1 = all, as long as a session does not slide."""
        rollback = self.cache.policy.rollback(self.layout)
        return max(rollback - (max(codec.tokens for codec in self.codecs) - 1), -1)

    def mask(self, queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """Visibility of ``keys [A, S]`` for ``queries [A, T]`` by position, ``[A, T, S]``."""
        return masks.visible(queries, keys, self.first_visible(queries), self.sinks)

    def page_span(self, start: tf.Tensor, floor: tf.Tensor | int = 0) -> tf.Tensor:
        """For rows that go on at ``start [B]`` and have nothing below ``floor [B]`` on pages:
        sink pages, first page, end page; ``[B, 3]``."""
        end = -tf.math.floordiv(-start, self.page_size)
        first = tf.maximum(self.first_visible(start), floor) // self.page_size
        first = tf.minimum(first, end)
        sinks = tf.minimum(-(-self.sinks // self.page_size), first)
        return tf.stack([sinks, first, end], axis=-1)

    def page_numbers(self, positions: tf.Tensor) -> tf.Tensor:
        """Which page each column holds in a session that goes on at ``positions [B]``, int32
        ``[B, columns]``; −1 = none yet."""
        layout = EntryLayout(self.columns, self.layout.sinks // self.page_size)
        return layout.positions_of(tf.math.floordiv(positions, self.page_size) + 1)

    def places(self, table: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Where tokens at ``positions [B, T]`` lie on the pages of ``table [B, columns]``: pages
        and places within them, int32 ``[B · T]``; page 0 for −1."""
        page = tf.maximum(positions, 0) // self.page_size
        physical = tf.gather(table, self.column_of(page), batch_dims=1)
        physical = tf.where(positions >= 0, physical, 0)
        offsets = tf.maximum(positions, 0) % self.page_size
        return tf.reshape(physical, [-1]), tf.reshape(offsets, [-1])

    def column_of(self, pages: tf.Tensor) -> tf.Tensor:
        """Block-table column of each logical page."""
        layout = EntryLayout(self.columns, self.layout.sinks // self.page_size)
        return layout.entry_of(pages)


def _selecting(
    model: DecoderConfig, engine: EngineConfig, cache: CacheSpec, layers: Sequence[int]
) -> tuple[bool, ...]:
    """Whether each layer selects pages.

    Raises:
        ConfigError: The policy's pages are not those of the artifact, or have no even share of
            their bounds for each token, or fewer pages are always read than a call may write.
    """
    policy, size = cache.policy, engine.page_size
    if not isinstance(policy, Quest):
        return (False,) * len(layers)
    if policy.page_size != size:
        raise ConfigError(
            f"`page_size` of {policy.name!r} must be that of the artifact's pages: a page is what "
            f"is found and read at once. Received: cache={engine.cache!r} and pages of {size} "
            f"tokens. Give {policy.name}(page_size={size}), or --page-size {policy.page_size}."
        )
    if 4 * model.head_dim % size:
        raise ConfigError(
            f"`page_size` must divide 4 × {model.head_dim}, the bytes that bound a page of "
            f"{policy.name!r} in each head. Received: page_size={size}."
        )
    if (policy.recent - 1) * size < engine.decode_chunk - 1:
        raise ConfigError(
            f"`recent` pages of {policy.name!r}, its query's own apart, must hold the "
            f"{engine.decode_chunk} tokens that one call decodes, which are on no page yet. "
            f"Received: cache={engine.cache!r} and pages of {size} tokens."
        )
    heads = model.num_key_value_heads
    of_layers = (policy.at_layer(n, model.num_layers, heads, None) for n in layers)
    return tuple(one.selects for one in of_layers)


def _check_own_keys(model: DecoderConfig) -> None:
    """Refuses a model whose layers share keys and values.

    Raises:
        ConfigError: They do.
    """
    shared = model.attention.share_kv_with
    if any(source >= 0 for source in shared):
        raise ConfigError(
            "Each layer of a paged artifact has keys and values of its own, and layers of this "
            f"model share them. Received: share_kv_with={shared}. Export the Keras model with "
            "`tfkv.export.export_keras`, whose artifacts hold a session in one piece."
        )


def _check_positions(model: DecoderConfig, cache: CacheSpec) -> None:
    """Refuses a policy that relies on positions which the model does not have.

    Raises:
        ConfigError: It does.
    """
    check_fit(cache, model.positions.kind)
    if cache.policy.extrapolates and len(set(model.rope_of_layers)) > 1:
        raise ConfigError(
            f"{cache.policy.name!r} foresees how queries turn, and the layers of this model turn "
            "them differently, which an artifact judges in one loop. Received: "
            f"cache={str(cache)!r}. Choose 'snapkv', 'tova' or 'key_diff'; a Keras model takes it."
        )

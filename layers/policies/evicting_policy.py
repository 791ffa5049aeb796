"""Keep what scores highest: what all policies that evict by score share."""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple, Self

import tensorflow as tf

from tfkv.architecture import Rope
from tfkv.errors import ConfigError
from tfkv.layers.entry_layout import EntryLayout
from tfkv.layers.policies.cache_policy import BudgetTables, CachePolicy, round_up
from tfkv.layers.scoring import PLAIN, Scoring
from tfkv.layers.shapes import shape_of

#: Score of what is never evicted, and of what is not there: beyond any other.
PROTECTED, ABSENT = 1e30, -1e30


class Seen(NamedTuple):
    """What a policy may judge entries by. S entries, of which some are empty.

    Attributes:
        keys: float32 ``[B, K, S, H]``, as they are read, RoPE applied.
        values: float32 ``[B, K, S, H]``.
        positions: int32 ``[B, K, S]``; −1 = empty.
        filled: int32 ``[B]``, tokens the session holds.
        queries: float32 ``[B, K, G, W, H]``, the newest queries, RoPE applied, and scaled.
        asked_at: int32 ``[B, W]``, their positions; −1 = none.
        mass: float32 ``[B, K, S]``, what `EvictingPolicy.accumulate` made of the attention
            that each entry got.
        output_kernel: float32 ``[K, G, H, D]`` of the projection behind the heads.
        rope: How queries and keys were turned; None = not at all.
        scoring: Of the layer.
    """

    keys: tf.Tensor
    values: tf.Tensor
    positions: tf.Tensor
    filled: tf.Tensor
    queries: tf.Tensor
    asked_at: tf.Tensor
    mass: tf.Tensor
    output_kernel: tf.Tensor
    rope: Rope | None
    scoring: Scoring = PLAIN

    @property
    def valid(self) -> tf.Tensor:
        """bool ``[B, K, S]``, entries that hold a token."""
        return self.positions >= 0

    def attention(self) -> tf.Tensor:
        """Softmax attention of the newest queries over all entries, ``[B, K, G, W, S]``; zeros
        for a query that is not there."""
        scores = tf.einsum("bkgwh,bksh->bkgws", self.queries, self.keys)
        if self.scoring.adjusts:
            scores = self._scored(scores)
        keys = self.positions[:, :, tf.newaxis, tf.newaxis]
        asked = self.asked_at[:, tf.newaxis, tf.newaxis, :, tf.newaxis]
        visible = (keys >= 0) & (keys <= asked)
        at = self.positions[:, :, tf.newaxis]
        visible = self.scoring.narrow(visible, self.asked_at[:, tf.newaxis, tf.newaxis], at)
        weights = tf.nn.softmax(tf.where(visible, scores, ABSENT), axis=-1)
        return tf.where(visible, weights, 0.0)

    def _scored(self, scores: tf.Tensor) -> tf.Tensor:
        """``scores [B, K, G, W, S]`` with soft cap and ALiBi."""
        rows, heads, group, width, size = shape_of(scores)
        scoring = self.scoring.between(self.asked_at[:, tf.newaxis], self.positions)
        flat = scoring(tf.reshape(scores, [rows, heads, group * width, size]))
        return tf.reshape(flat, [rows, heads, group, width, size])

    def output_norms(self) -> tf.Tensor:
        """L1 norm of each value behind the output projection, mean over the group;
        ``[B, K, S]``."""
        projected = tf.einsum("bksh,kghd->bkgsd", self.values, self.output_kernel)
        return tf.reduce_mean(tf.reduce_sum(tf.abs(projected), axis=-1), axis=2)


@dataclasses.dataclass(frozen=True)
class EvictingPolicy(CachePolicy):
    """Keeps the `budget` entries of each KV head that score highest, and what came since.

    New tokens are stored until there is no room; then each KV head goes back to its budget by
    score, its sinks and its newest tokens untouched. Keys stay rotated at their true positions.
    What is gone is gone for all later queries, so a page depends on more than the tokens before
    it, and the result on how a text was cut.

    Args:
        budget: Entries of each KV head after an eviction; the mean, where heads differ.
        sinks: First tokens that are never evicted.
        interval: Tokens between two evictions while one reads on.
        whole_prompt: Whether a prompt is stored whole, as far as the capacity goes, before it
            is judged, as most papers do; else it is judged as it comes, in constant memory.
        caps: Table of a calibration that shares the budget out between layers and heads; "" =
            all get the same. Few heads look far back, so this gains more than any score.
        budgets: Entries of each KV head of this layer, where a calibration has shared them out.

    Class attributes:
        per_head: Whether KV heads may keep different tokens.

    Raises:
        ConfigError: A value is out of range.
    """

    evicts = True
    shareable = False
    chunk_invariant = False
    per_head = True

    budget: int = 1024
    sinks: int = 4
    interval: int = 64
    whole_prompt: bool = False
    caps: str = ""
    budgets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("sinks", 0), ("recent", 0), ("interval", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"`{name}` must be at least {least}. Received: {name}={value!r}.")
        for budget in (self.budget, *self.budgets):
            if self.guarded > budget:
                raise ConfigError(
                    f"`budget` must hold what is never evicted, {self.sinks} sinks and the newest "
                    f"{self.recent} tokens. Received: budget={budget}."
                )
        if not self.per_head and (self.caps or self.budgets):
            raise ConfigError(
                f"{self.name!r} keeps the same tokens in all heads of a layer, so they cannot have "
                f"budgets of their own. Received: caps={self.caps!r}, budgets={self.budgets}. "
                "Choose another policy, or leave them out."
            )

    # --- what a method says of itself ----------------------------------------------------

    @property
    def recent(self) -> int:
        """Newest tokens that are never evicted."""
        return 0

    @property
    def observed(self) -> int:
        """Newest queries that the store keeps for `score` (axis W)."""
        return 0

    @property
    def accumulates(self) -> bool:
        """Whether the store keeps `Seen.mass`."""
        return False

    @property
    def repeats(self) -> bool:
        """Whether an artifact has a text repeated before it is judged for the first time, so that
        `Seen.mass` is what the repetition looked at."""
        return False

    def accumulate(self, mass: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """New mass ``[B, K, S]``: the old one, and attention ``[B, K, Q, S]`` of a chunk."""
        return mass + tf.reduce_sum(weights, axis=2)

    @abc.abstractmethod
    def score(self, seen: Seen) -> tf.Tensor:
        """What each entry is worth, float32 ``[B, K, S]``; empty ones count for nothing."""

    # --- the rest ------------------------------------------------------------------------

    @property
    def bounded(self) -> bool:
        return True

    @property
    def guarded(self) -> int:
        """Entries that are never evicted."""
        return self.sinks + self.recent

    def at_layer(self, layer: int, layers: int, heads: int, tables: BudgetTables | None) -> Self:
        del layers, heads
        if not self.caps or tables is None:
            return self
        found = tables.budgets(self.caps, self.budget, self.guarded)[layer]
        return dataclasses.replace(self, budgets=tuple(found), caps="")

    def of_head(self, head: int) -> Self:
        """The policy of one KV head of a layer whose heads have budgets of their own."""
        return dataclasses.replace(self, budget=self.budgets[head], budgets=(), caps="")

    def layout(self, capacity: int, slack: int, page_size: int = 1) -> EntryLayout:
        entries = self.budget + max(self.interval, slack)
        if self.whole_prompt:
            entries = max(entries, capacity)
        return EntryLayout(round_up(entries, page_size))

    def first_visible(self, positions: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(positions)

    def rollback(self, layout: EntryLayout) -> int:
        del layout
        return 0

    def worth(self, seen: Seen) -> tf.Tensor:
        """Scores ``[B, K, S]`` in which what is never evicted comes first, and what is not there
        last."""
        newest = seen.filled[:, tf.newaxis, tf.newaxis] - self.recent
        guarded = (seen.positions < self.sinks) | (seen.positions >= newest)
        scores = tf.where(guarded, PROTECTED, self.score(seen))
        return tf.where(seen.valid, scores, ABSENT)

    def keep(self, seen: Seen) -> tf.Tensor:
        """Entries that survive, ascending, int32 ``[B, K, budget]``; −1 where fewer are there."""
        scores = self.worth(seen)
        best = tf.math.top_k(scores, self.budget, sorted=False).indices
        there = tf.gather(seen.valid, best, batch_dims=2)
        last = seen.positions.shape[-1]
        ordered = tf.sort(tf.where(there, best, last), axis=-1)
        return tf.where(ordered == last, -1, ordered)


def pool(scores: tf.Tensor, width: int, kind: str) -> tf.Tensor:
    """Mean or maximum over `width` neighbours of ``scores [..., S]``; zeros beyond the edges
    count for a mean, and nothing for a maximum."""
    *lead, size = scores.shape
    if size is None or width == 1:
        return scores
    flat = tf.reshape(scores, [-1, size])
    left = width // 2
    edge = 0.0 if kind == "mean" else ABSENT
    padded = tf.pad(flat, [[0, 0], [left, width - 1 - left]], constant_values=edge)
    shifted = [padded[:, first : first + size] for first in range(width)]
    merged = tf.add_n(shifted) / width if kind == "mean" else tf.reduce_max(tf.stack(shifted), 0)
    return tf.reshape(merged, tf.shape(scores))

"""Keys and values of a batch of sessions of which a policy keeps what scores highest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfkv.architecture import Rope
from tfkv.errors import ConfigError
from tfkv.layers import attention, masks
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cache_view import CacheView
from tfkv.layers.dense_store import DenseStore, Plan, scatter
from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen
from tfkv.layers.positions import first_position
from tfkv.layers.scoring import PLAIN, Scoring
from tfkv.layers.store import State

#: Tensors of a state that a write leaves alone.
_BESIDE = ("evicted", "queries", "asked_at", "mass")


class Asked(NamedTuple):
    """The queries of a chunk.

    Attributes:
        queries: float32 ``[B, K, Q, H]`` of `attention.group_queries`.
        positions: int32 ``[B, T]``; −1 = padding, or not written.
        scoring: Of the layer.
    """

    queries: tf.Tensor
    positions: tf.Tensor
    scoring: Scoring = PLAIN

    def of_heads(self, heads: slice) -> Asked:
        """What some KV heads are asked."""
        scoring = self.scoring.of_heads(heads)
        return self._replace(queries=self.queries[:, heads], scoring=scoring)


class Weighing(NamedTuple):
    """What scores need of the layer.

    Attributes:
        output_kernel: float32 ``[K, G, H, D]`` of the projection behind the heads.
        rope: How queries and keys were turned; None = not at all.
        scoring: Of the layer.
    """

    output_kernel: tf.Tensor
    rope: Rope | None
    scoring: Scoring = PLAIN

    def of_heads(self, heads: slice) -> Weighing:
        """What scores of some KV heads need."""
        scoring = self.scoring.of_heads(heads)
        return self._replace(output_kernel=self.output_kernel[heads], scoring=scoring)


class EvictingStore(DenseStore):
    """A `DenseStore` whose rows go back to the policy's budget when they are full.

    Tokens lie in the order of their positions. Since the last eviction entry and position
    differ by the same number, so that only what survived it needs a position of its own, which
    is another one in each KV head. To the state of `DenseStore` it adds:

    - ``entry_positions``: int32 ``[B, K, S]``; −1 = empty;
    - ``evicted``: int32 ``[B]``, tokens the session held when entries were last evicted, 0 =
      never; tokens before that cannot be taken back;
    - ``queries``: float32 ``[B, K, G, W, H]`` and ``asked_at``: int32 ``[B, W]``, the newest
      queries and their positions, one higher, where the policy looks at them;
    - ``mass``: float32 ``[B, K, S]``, where it adds up what attention each entry got.

    Args:
        cache: Policy and codec.
        num_key_value_heads: KV heads (axis K).
        head_dim: Width of a head (axis H).
        capacity: Most tokens stored of a prompt that is kept whole until it was read.
        slack: Tokens that can be added between two evictions at least.
        group: Query heads of a KV head (axis G).

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(
        self,
        cache: CacheSpec | str | Mapping[str, Any],
        num_key_value_heads: int,
        head_dim: int,
        capacity: int,
        slack: int = 0,
        group: int = 1,
    ) -> None:
        super().__init__(cache, num_key_value_heads, head_dim, capacity, slack)
        if not isinstance(self.cache.policy, EvictingPolicy):
            raise ConfigError(f"`cache` must evict by score. Received: cache={str(self.cache)!r}.")
        self.policy: EvictingPolicy = self.cache.policy
        self.group = group

    @property
    def longest_chunk(self) -> int:
        """Most tokens that can be read at once: room for them can always be made."""
        return self.layout.entries - self.policy.budget

    def spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        entries = (batch_size, self.num_key_value_heads, self.layout.entries)
        more = {
            "entry_positions": tf.TensorSpec(entries, tf.int32),
            "evicted": tf.TensorSpec((batch_size,), tf.int32),
        }
        if self.policy.observed:
            width = self.policy.observed
            shape = (*entries[:2], self.group, width, self.head_dim)
            more["queries"] = tf.TensorSpec(shape, tf.float32)
            more["asked_at"] = tf.TensorSpec((batch_size, width), tf.int32)
        if self.policy.accumulates:
            more["mass"] = tf.TensorSpec(entries, tf.float32)
        return super().spec(batch_size) | more

    def view(self, state: State, before: tf.Tensor | None = None) -> CacheView:
        positions = self._valid(state, state["filled"] if before is None else before)
        return CacheView(self._side(state, "keys"), self._side(state, "values"), positions)

    def make_room(self, state: State, positions: tf.Tensor, weighing: Weighing) -> State:
        """The state with room for a chunk at ``positions [B, T]``, T ≤ `longest_chunk`."""
        count = tf.reduce_sum(tf.cast(positions >= 0, tf.int32), axis=1)
        # A chunk may take tokens back: then it needs their room, and nothing judges them.
        start = first_position(positions)
        held = tf.minimum(state["filled"], start)
        used = held - self._shift(state)
        full = used + count > self.layout.entries
        if positions.shape[1] == 1:
            # A prompt that was kept whole has been read.
            full |= used >= self.policy.budget + self.policy.interval
        full &= (count > 0) & self.intact(state, start)
        asked = state | {"filled": tf.where(full, held, state["filled"])}
        return tf.cond(
            tf.reduce_any(full), lambda: self.evict(asked, weighing, full), lambda: dict(state)
        )

    def evict(self, state: State, weighing: Weighing, rows: tf.Tensor | None = None) -> State:
        """The state with no more entries than the budget.

        Args:
            state: As of `init` or `write`.
            weighing: Of the layer.
            rows: bool ``[B]``, rows to do it in; all where left out. A row within its budget
                stays as it is.
        """
        budget = self.policy.budget
        used = state["filled"] - self._shift(state)
        does = used > budget
        if rows is not None:
            does &= rows
        kept = self.policy.keep(self._seen(state, weighing))
        chosen = tf.maximum(kept, 0)

        def moved(stored: tf.Tensor) -> tf.Tensor:
            first = tf.gather(stored, chosen, axis=2, batch_dims=2)
            after = tf.concat([first, stored[:, :, budget:]], axis=2)
            return tf.where(_as_rows(does, stored), after, stored)

        by_entry = {"entry_positions", "mass"} | {
            f"{side}/{name}"
            for side, codec in self.cache.codec.sides().items()
            for name in codec.spec(self.head_dim)
        }
        new = {name: moved(x) if name in by_entry else x for name, x in state.items()}
        lost = tf.pad(kept < 0, [[0, 0], [0, 0], [0, self.layout.entries - budget]])
        lost &= does[:, tf.newaxis, tf.newaxis]
        new["entry_positions"] = tf.where(lost, -1, new["entry_positions"])
        new["evicted"] = tf.where(does, state["filled"], state["evicted"])
        return new

    def worth(self, state: State, weighing: Weighing) -> tf.Tensor:
        """What the policy thinks of each entry, float32 ``[B, K, S]``; see
        `EvictingPolicy.worth`."""
        return self.policy.worth(self._seen(state, weighing))

    def observe(self, state: State, asked: Asked) -> State:
        """The state after a chunk was written, with what the policy wants to know of it."""
        new = dict(state)
        if self.policy.accumulates:
            new["mass"] = self._add_mass(state, asked)
        if self.policy.observed:
            new |= self._keep_newest(state, asked.queries, asked.positions)
        return new

    def _keep_newest(
        self, state: State, queries: tf.Tensor, positions: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """A ring of the newest queries by position."""
        width = self.policy.observed
        last = tf.reduce_max(positions, axis=1)[:, tf.newaxis]
        wanted = last - tf.math.floormod(last - tf.range(width), width)
        match = (wanted[:, :, tf.newaxis] == positions[:, tf.newaxis]) & (wanted >= 0)[..., None]
        here, index = tf.reduce_any(match, axis=2), tf.argmax(match, axis=2, output_type=tf.int32)
        batch, heads, rows, head_dim = queries.shape
        split = tf.reshape(queries, [batch, heads, self.group, rows // self.group, head_dim])
        taken = tf.gather(tf.transpose(split, [0, 3, 1, 2, 4]), index, batch_dims=1)
        taken = tf.transpose(taken, [0, 2, 3, 1, 4])
        fresh = here[:, tf.newaxis, tf.newaxis, :, tf.newaxis]
        # Positions are kept one higher, so that a state of zeros knows no query.
        taken_back = (last >= 0) & (state["asked_at"] > last + 1)
        old_at = tf.where(taken_back, 0, state["asked_at"])
        return {
            "queries": tf.where(fresh, taken, state["queries"]),
            "asked_at": tf.where(here, wanted + 1, old_at),
        }

    def _add_mass(self, state: State, asked: Asked) -> tf.Tensor:
        queries, positions, scoring = asked
        held = self._valid(state, state["filled"])
        scores = self.cache.codec.scores(
            self.cache.codec.prepare(queries), self._side(state, "keys")
        )
        asking = positions[:, tf.newaxis]
        mask = scoring.narrow(masks.visible(asking, held), asking, held)
        weights = attention.attention_weights(scoring.between(asking, held)(scores), mask)
        group = tf.tile(positions >= 0, [1, self.group])[:, tf.newaxis, :, tf.newaxis]
        first = first_position(positions)[:, tf.newaxis, tf.newaxis]
        old = tf.where((held >= 0) & (held < first), state["mass"], 0.0)
        return self.policy.accumulate(old, tf.where(group, weights, 0.0))

    def _seen(self, state: State, weighing: Weighing) -> Seen:
        codec, held = self.cache.codec, self._valid(state, state["filled"])
        nothing = tf.zeros_like(held, tf.float32)
        none = tf.zeros([held.shape[0], self.num_key_value_heads, self.group, 0, self.head_dim])
        asked_at = state.get("asked_at", tf.zeros([held.shape[0], 0], tf.int32))
        # Queries of tokens that are being taken back have no vote.
        asked_at = tf.where(asked_at > state["filled"][:, tf.newaxis], 0, asked_at)
        return Seen(
            keys=codec.keys.decode(self._side(state, "keys")),
            values=codec.values.decode(self._side(state, "values")),
            positions=held,
            filled=state["filled"],
            queries=state.get("queries", none),
            asked_at=asked_at - 1,
            mass=state.get("mass", nothing),
            output_kernel=weighing.output_kernel,
            rope=weighing.rope,
            scoring=weighing.scoring,
        )

    def _valid(self, state: State, before: tf.Tensor) -> tf.Tensor:
        """Position of each entry, int32 ``[B, K, S]``; −1 = none before ``before [B]``."""
        end = tf.minimum(before, state["filled"]) - self._shift(state)
        here = tf.range(self.layout.entries) < end[:, tf.newaxis]
        return tf.where(here[:, tf.newaxis], state["entry_positions"], -1)

    def _shift(self, state: State) -> tf.Tensor:
        """By how much positions since the last eviction are ahead of entries, int32 ``[B]``."""
        return tf.where(state["evicted"] > 0, state["evicted"] - self.policy.budget, 0)

    def hide(self, state: State, positions: tf.Tensor) -> State:
        """The state without the tokens at ``positions [B, T]``, −1 = none: no query sees them
        again, and they are the first to be evicted."""
        entries = positions - self._shift(state)[:, tf.newaxis]
        entries = tf.where((positions >= 0) & (entries >= 0), entries, -1)
        hidden = tf.reduce_any(entries[..., tf.newaxis] == tf.range(self.layout.entries), axis=1)
        at = tf.where(hidden[:, tf.newaxis], -1, state["entry_positions"])
        return state | {"entry_positions": at}

    def _beside(self, state: State, written: State, plan: Plan) -> State:
        del written
        slots, sources, writes = self._slots(plan.entries, self.layout.entries)
        at = tf.tile(plan.kept[:, tf.newaxis, :, tf.newaxis], [1, self.num_key_value_heads, 1, 1])
        stored = state["entry_positions"][..., tf.newaxis]
        unchanged = {name: x for name, x in state.items() if name in _BESIDE}
        return unchanged | {"entry_positions": scatter(stored, slots, sources, writes, at)[..., 0]}

    def _plan(self, state: State, positions: tf.Tensor, sound: tf.Tensor) -> Plan:
        plan = super()._plan(state, positions, sound)
        entries = plan.kept - self._shift(state)[:, tf.newaxis]
        return plan._replace(entries=tf.where(plan.kept >= 0, entries, -1))

    def intact(self, state: State, start: tf.Tensor) -> tf.Tensor:
        return start >= state["evicted"]


def _as_rows(flags: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """``flags [B]`` for tensors ``[B, ...]``."""
    return tf.reshape(flags, [-1, *[1] * (like.shape.rank - 1)])

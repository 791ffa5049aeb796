"""Keys and values of a batch of sessions in contiguous tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfkv.errors import CacheError, ConfigError
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cache_view import CacheView
from tfkv.layers.codecs.channel_groups import ChannelGroups
from tfkv.layers.codecs.codec import Coded
from tfkv.layers.codecs.grouping import touched_groups
from tfkv.layers.entry_layout import EntryLayout
from tfkv.layers.positions import first_position, ranks
from tfkv.layers.store import CacheStore, State

_EXACT = ("exact/keys", "exact/values")


class Plan(NamedTuple):
    """What one write does, each ``[B]`` or ``[B, T]``.

    Attributes:
        kept: int32, positions of the tokens that are written; −1 = not written.
        entries: int32, where; −1 = nowhere.
        filled: int32, tokens the session holds then.
        reached: int32, one past the highest position ever written.
        dropped: int32, tokens refused so far.
    """

    kept: tf.Tensor
    entries: tf.Tensor
    filled: tf.Tensor
    reached: tf.Tensor
    dropped: tf.Tensor


class DenseStore(CacheStore):
    """Holds what a policy retains, one row of tensors for each session of the batch.

    Choose it inside a Keras model and in notebooks; an exported engine uses pages.

    Attend first, then write: a chunk reads `view` and itself, so that nothing it needs is
    overwritten, and a ring need not be longer than its window.

    The state is a flat dict:

    - ``keys/<part>``, ``values/<part>``: the codec's parts, ``[B, K, S, ...]``;
    - ``exact/keys``, ``exact/values``: float32 ``[B, K, E, H]``, what the codec keeps as it is
      beside its codes, where it does: its sinks, and a ring of its newest tokens;
    - ``filled``: int32 ``[B]``, tokens the session holds, which is its next position;
    - ``reached``: int32 ``[B]``, one past the highest position ever written; it differs
      from ``filled`` after tokens were taken back;
    - ``dropped``: int32 ``[B]``, tokens refused so far.

    A row's tokens are consecutive and begin at ``filled``, or before it: then the tokens
    from there on are taken back and written anew. A window can take back `rollback` tokens
    only. Whatever breaks these rules, or lies past the capacity of a policy without bound,
    is written nowhere: it raises in eager mode, and is counted in ``dropped`` inside a
    graph, where nothing may raise. So is a row whose attention is not a number.

    Args:
        cache: Policy and codec, as `CacheSpec` or its string.
        num_key_value_heads: KV heads (axis K).
        head_dim: Width of a head (axis H).
        capacity: Most tokens of a session, where the policy does not bound them.
        slack: Tokens that a window keeps beyond what it shows, so that as many can be
            taken back.

    Raises:
        ConfigError: A value is out of range, or the codec cannot write such heads.

    Example:
        >>> store = DenseStore("sliding_window(window=4)+int8", 1, 8, capacity=16)
        >>> state = store.init(batch_size=2)
        >>> state["keys/codes"].shape
        TensorShape([2, 1, 4, 8])
    """

    def __init__(
        self,
        cache: CacheSpec | str | Mapping[str, Any],
        num_key_value_heads: int,
        head_dim: int,
        capacity: int,
        slack: int = 0,
    ) -> None:
        least = {"num_key_value_heads": 1, "head_dim": 1, "capacity": 1, "slack": 0}
        for name, bound in least.items():
            value = locals()[name]
            if not isinstance(value, int) or value < bound:
                raise ConfigError(
                    f"`{name}` must be an integer of at least {bound}. Received: {name}={value!r}."
                )
        self.cache = CacheSpec.parse(cache)
        self.cache.codec.check(head_dim)
        self.cache.codec.check_bound()
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        policy, codec = self.cache.policy, self.cache.codec
        together = codec.tokens
        # What is overwritten goes by groups, and nobody may still see any of one.
        more = together - 1
        unit = math.lcm(together, policy.together)
        self.layout = policy.layout(capacity, slack + more, unit)
        self._most = policy.layout(capacity, slack).entries
        #: Where the tokens lie that the codec keeps exactly.
        self.exact_layout = EntryLayout(codec.exact_entries, codec.sinks)
        #: Tokens that can be taken back; −1 = all.
        self.rollback = max(policy.rollback(self.layout) - more, -1)

    @property
    def capacity(self) -> int:
        """Tokens a session may hold; −1 = any number, of which the policy keeps a part."""
        return -1 if self.cache.policy.bounded else self._most

    @property
    def longest_chunk(self) -> int | None:
        """Most tokens that can be read at once; None = any number."""
        return self.cache.codec.longest_chunk

    def spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state."""
        rows = (batch_size, self.num_key_value_heads, self.layout.entries)
        stored = {
            f"{side}/{name}": tf.TensorSpec(
                (*rows[:2], rows[2] // part.tokens, *part.shape), part.dtype
            )
            for side, codec in self.cache.codec.sides().items()
            for name, part in codec.spec(self.head_dim).items()
        }
        if self.exact_layout.entries:
            shape = (*rows[:2], self.exact_layout.entries, self.head_dim)
            stored |= {name: tf.TensorSpec(shape, tf.float32) for name in _EXACT}
        counts = ("filled", "reached", "dropped")
        return stored | {name: tf.TensorSpec((batch_size,), tf.int32) for name in counts}

    def parts(self, state: State) -> list[tuple[DenseStore, slice, State]]:
        return [(self, slice(None), state)]

    def view(self, state: State, before: tf.Tensor | None = None) -> CacheView:
        """What attention reads.

        Args:
            state: As of `init` or `write`.
            before: int32 ``[B]``; hides this position and all after it, for a chunk that
                takes them back.
        """
        positions = self._held(state, self.layout, before, self.cache.codec.tokens)
        return CacheView(self._side(state, "keys"), self._side(state, "values"), positions)

    def seen_by(
        self, state: State, queries: tf.Tensor, positions: tf.Tensor, alone: bool
    ) -> CacheView:
        """What a chunk reads of its session: all of `view`, where the policy does not select.

        Args:
            state: As of `init` or `write`.
            queries: float32 ``[B, K, Q, H]`` of `attention.group_queries`.
            positions: int32 ``[B, T]``; −1 = padding.
            alone: Whether the chunk is a token that was given alone.
        """
        del queries, alone
        return self.view(state, first_position(positions))

    def exact_view(self, state: State, before: tf.Tensor | None = None) -> CacheView:
        """What attention reads of the tokens that the codec keeps exactly; as `view`."""
        positions = self._held(state, self.exact_layout, before)
        keys, values = ({"codes": state[name]} for name in _EXACT)
        return CacheView(keys, values, positions)

    def kept_exactly(self, state: State, positions: tf.Tensor) -> tf.Tensor:
        """Whether `exact_view` has the tokens at ``positions [B, ..., S]``; bool."""
        reached = tf.reshape(state["reached"], [-1, *[1] * (positions.shape.rank - 1)])
        return self.exact_layout.keeps(positions, reached)

    @staticmethod
    def _held(
        state: State, layout: EntryLayout, before: tf.Tensor | None, together: int = 1
    ) -> tf.Tensor:
        """Position that each entry holds, int32 ``[B, S]``; −1 = none that can be read."""
        positions = layout.positions_of(state["filled"])
        written = -(-state["reached"] // together) * together
        held = layout.keeps(positions, written[:, tf.newaxis])
        if before is not None:
            held &= positions < before[:, tf.newaxis]
        return tf.where(held, positions, -1)

    def write(
        self,
        state: State,
        positions: tf.Tensor,
        keys: Coded,
        values: Coded,
        after: tf.Tensor | None = None,
        exact: tuple[tf.Tensor, tf.Tensor] | None = None,
        also: tf.Tensor | bool = True,
    ) -> State:
        """Stores a chunk.

        Args:
            state: As of `init` or `write`.
            positions: int32 ``[B, T]``, absolute; −1 = padding, which writes nothing.
            keys: Encoded by the cache's codec, parts ``[B, K, T, ...]``; none where it codes
                tokens together, for it does not know here which ones.
            values: Likewise.
            after: ``[B, ...]``, what was computed from `view`; a row that holds a NaN is
                refused. Without it XLA does not know that the reads come before the
                write, and copies the cache twice a step.
            exact: Keys and values as they were encoded, float32 ``[B, K, T, H]``; needed where
                the codec keeps some as they are.
            also: bool ``[B]``, rows that other stores of the same session can write, too: all
                of them take a chunk, or none.

        Returns:
            A state of the same spec. Of a chunk longer than a window, only what the window
            still shows is written.

        Raises:
            CacheError: In eager mode, a token is past the capacity, leaves a gap, or takes
                back more than the window still has, or a row of `after` holds a NaN.
        """
        sound = tf.ones_like(state["filled"], tf.bool) if after is None else _sound(after)
        plan = self._plan(state, positions, sound & also)
        if tf.executing_eagerly():
            self._refuse_dropped(state, positions, plan, sound)
        slots, sources, writes = self._slots(plan.entries, self.layout.entries)
        new = {"filled": plan.filled, "reached": plan.reached, "dropped": plan.dropped}
        for side, coded in (("keys", keys), ("values", values)):
            for name, part in coded.items():
                key = f"{side}/{name}"
                new[key] = scatter(state[key], slots, sources, writes, part)
        for (side, codec), x in zip(self.cache.codec.sides().items(), exact or (), strict=False):
            if isinstance(codec, ChannelGroups):
                new |= self._write_groups(state, plan, side, codec, x)
        new |= self._beside(state, new, plan)
        if exact is not None and self.exact_layout.entries:
            entries = _newest(plan.kept, plan.filled, self.exact_layout)
            slots, sources, writes = self._slots(entries, self.exact_layout.entries)
            for key, part in zip(_EXACT, exact, strict=True):
                new[key] = scatter(state[key], slots, sources, writes, part)
        return new

    def _write_groups(
        self, state: State, plan: Plan, side: str, codec: ChannelGroups, x: tf.Tensor
    ) -> State:
        """Codes of all groups that a chunk's keys or values ``x [B, K, T, H]`` join."""
        touched = touched_groups(plan.kept, codec.tokens)
        first = touched.positions[:, :: codec.tokens]
        # Of a chunk longer than the ring the newest groups stay, as tokens do elsewhere.
        written = -(-plan.filled // codec.tokens) * codec.tokens
        of_group = _newest(first, written, self.layout)
        stays = tf.repeat(of_group >= 0, codec.tokens, axis=1) & (touched.positions >= 0)
        entries = tf.where(stays, self.layout.entry_of(touched.positions), -1)
        groups = tf.where(of_group >= 0, of_group // codec.tokens, -1)
        stored = {
            "codes": take_entries(state[f"{side}/codes"], entries),
            "affine": take_entries(state[f"{side}/affine"], groups),
        }
        exact = take_entries(state[f"exact/{side}"], self.exact_layout.entry_of(touched.positions))
        there = self.kept_exactly(state, touched.positions)
        old = tf.where(_of_tokens(there), exact, codec.decode(stored))
        new = tf.gather(x, touched.sources, axis=2, batch_dims=1)
        both = tf.where(_of_tokens(touched.fresh), new, old)
        coded = codec.encode_groups(both, (touched.positions >= 0)[:, tf.newaxis])
        places = {
            "codes": self._slots(entries, self.layout.entries),
            "affine": self._slots(groups, self.layout.entries // codec.tokens),
        }
        return {
            f"{side}/{name}": scatter(state[f"{side}/{name}"], *places[name], coded[name])
            for name in places
        }

    def _beside(self, state: State, written: State, plan: Plan) -> State:
        """What a kind of store keeps beside keys, values and counts, after they were `written`."""
        del state, written, plan
        return {}

    def _side(self, state: State, side: str) -> Coded:
        parts = self.cache.codec.sides()[side].spec(self.head_dim)
        return {name: state[f"{side}/{name}"] for name in parts}

    def _plan(self, state: State, positions: tf.Tensor, sound: tf.Tensor) -> Plan:
        """Entry of each token, −1 = nowhere, and the counts after the write."""
        filled, reached = state["filled"], state["reached"]
        given = positions >= 0
        tokens = tf.reduce_sum(tf.cast(given, tf.int32), axis=1)
        start = first_position(positions)
        in_row = tf.reduce_all(~given | (positions - start[:, tf.newaxis] == ranks(given)), axis=1)
        follows = sound & in_row & (start <= filled) & self.intact(state, start)
        kept = given & follows[:, tf.newaxis]
        if self.capacity >= 0:
            kept &= positions < self.capacity
        added = tf.reduce_sum(tf.cast(kept, tf.int32), axis=1)
        end = tf.where(added > 0, start + added, filled)
        taken = tf.where(kept, positions, -1)
        return Plan(
            kept=taken,
            entries=_newest(taken, end, self.layout),
            filled=end,
            reached=tf.maximum(reached, end),
            dropped=state["dropped"] + tokens - added,
        )

    def intact(self, state: State, start: tf.Tensor) -> tf.Tensor | bool:
        """Rows whose tokens before ``start [B]`` are all there that a query sees; bool ``[B]``."""
        if self.rollback < 0:
            return True
        reached = state["reached"]
        return (start >= reached - self.rollback) | (reached <= self.layout.entries)

    def _slots(self, entries: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Where each token goes among all `count` entries of all rows, always within bounds.

        Scatter outside XLA fails on an index out of bounds and inside XLA does not, so a
        token that goes nowhere repeats another write of its row; `scatter` writes back
        what was there where the row writes nothing at all.

        Returns:
            int32 ``[B, K, T]`` slots; int32 ``[B, T]`` number of the token to write there;
            bool ``[B]`` whether the row writes anything.
        """
        batch, width = tf.shape(entries)[0], tf.shape(entries)[1]
        writing = entries >= 0
        one = tf.argmax(tf.cast(writing, tf.int32), axis=1, output_type=tf.int32)
        sources = tf.where(writing, tf.range(width)[tf.newaxis], one[:, tf.newaxis])
        entries = tf.maximum(tf.gather(entries, sources, batch_dims=1), 0)
        heads = self.num_key_value_heads
        rows = tf.reshape(tf.range(batch * heads), [batch, heads, 1]) * count
        return rows + entries[:, tf.newaxis, :], sources, tf.reduce_any(writing, axis=1)

    def _refuse_dropped(
        self, state: State, positions: tf.Tensor, plan: Plan, sound: tf.Tensor
    ) -> None:
        refused = (plan.dropped - state["dropped"]).numpy()
        if not refused.any():
            return
        row = int(refused.argmax())
        if not sound[row]:
            raise CacheError(
                f"Attention of row {row} is not a number, so its keys and values were not stored. "
                "Look for NaN in the input and in the weights."
            )
        filled = int(state["filled"][row])
        limit = "any number of tokens" if self.capacity < 0 else f"at most {self.capacity} tokens"
        back = "all of them" if self.rollback < 0 else f"{self.rollback} of them"
        raise CacheError(
            f"`positions` must continue each session: row {row} holds {filled} tokens, so its "
            f"next are {filled}, {filled + 1}, …; it may hold {limit}, and take back {back}. "
            f"Received: positions[{row}]={positions[row].numpy().tolist()}. Shorten the session, "
            "raise `capacity`, or choose a cache that forgets, such as 'sliding_window'."
        )


def take_entries(stored: tf.Tensor, entries: tf.Tensor) -> tf.Tensor:
    """Entries ``[B, M]`` of ``stored [B, K, S, ...]``; −1 = any."""
    heads = tf.tile(tf.maximum(entries, 0)[:, tf.newaxis], [1, stored.shape[1], 1])
    return tf.gather(stored, heads, axis=2, batch_dims=2)


def _of_tokens(flags: tf.Tensor) -> tf.Tensor:
    """``flags [B, M]`` for tensors ``[B, K, M, H]``."""
    return flags[:, tf.newaxis, :, tf.newaxis]


def _newest(positions: tf.Tensor, end: tf.Tensor, layout: EntryLayout) -> tf.Tensor:
    """Entries of ``positions [B, T]`` that still hold once all up to ``end [B]`` are written.

    Of a chunk longer than the ring these are the newest: an entry is never written twice,
    for which scatter promises no order.
    """
    stays = (positions >= 0) & layout.keeps(positions, end[:, tf.newaxis])
    return tf.where(stays, layout.entry_of(positions), -1)


def _sound(x: tf.Tensor) -> tf.Tensor:
    """bool ``[B]``, whether a row of ``x [B, ...]`` is free of NaN."""
    return ~tf.math.is_nan(tf.reduce_sum(x, axis=list(range(1, x.shape.rank))))


def scatter(
    stored: tf.Tensor, slots: tf.Tensor, sources: tf.Tensor, writes: tf.Tensor, part: tf.Tensor
) -> tf.Tensor:
    """``stored [B, K, S, ...]`` with tokens `sources` of ``part [B, K, T, ...]`` at `slots`.

    As rows of one matrix XLA updates the tensor in place.
    """
    tail = stored.shape[3:]
    rows = tf.reshape(stored, [-1, *tail])
    chosen = part if part.shape[2] == 1 else tf.gather(part, sources, axis=2, batch_dims=1)
    old = tf.gather(rows, tf.reshape(slots, [-1]))
    new = tf.reshape(chosen, tf.shape(old))
    keep = tf.repeat(writes, tf.size(slots) // tf.size(writes))
    updates = tf.where(tf.reshape(keep, [-1, *[1] * len(tail)]), new, old)
    written = tf.tensor_scatter_nd_update(rows, tf.reshape(slots, [-1, 1]), updates)
    return tf.ensure_shape(tf.reshape(written, tf.shape(stored)), stored.shape)

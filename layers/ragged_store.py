"""Stores of the KV heads of a layer that have budgets of their own, side by side."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs.codec import Coded
from tfkv.layers.dense_store import State
from tfkv.layers.evicting_store import Asked, EvictingStore, Weighing
from tfkv.layers.policies.evicting_policy import ABSENT, EvictingPolicy


class RaggedStore:
    """One `EvictingStore` for each KV head, since a tensor cannot be longer in one head.

    The state is that of the heads' stores, with ``head<k>/`` before each name; ``filled``,
    ``reached`` and ``dropped`` are the same in all heads.

    Args:
        cache: Policy, whose `budgets` name one number for each KV head, and codec.
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
        cache: CacheSpec,
        num_key_value_heads: int,
        head_dim: int,
        capacity: int,
        slack: int = 0,
        group: int = 1,
    ) -> None:
        self.cache = cache
        policy = cache.policy
        if not isinstance(policy, EvictingPolicy) or len(policy.budgets) != num_key_value_heads:
            raise ConfigError(
                f"`budgets` must name one number for each of {num_key_value_heads} KV heads. "
                f"Received: cache={str(cache)!r}."
            )
        self.heads = [
            EvictingStore(
                dataclasses.replace(cache, policy=policy.of_head(head)),
                1,
                head_dim,
                capacity,
                slack,
                group,
            )
            for head in range(num_key_value_heads)
        ]
        self.capacity, self.rollback = -1, 0
        #: Most tokens that can be read at once.
        self.longest_chunk = min(store.longest_chunk for store in self.heads)

    def spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state."""
        return _joined([store.spec(batch_size) for store in self.heads])

    def init(self, batch_size: int) -> State:
        """The state of empty sessions."""
        return _joined([store.init(batch_size) for store in self.heads])

    def bytes_per_session(self) -> int:
        """Bytes of one row of the state; exact."""
        return sum(spec.shape.num_elements() * spec.dtype.size for spec in self.spec(1).values())

    def parts(self, state: State) -> list[tuple[EvictingStore, slice, State]]:
        """Each store, the KV heads that are its own, and its state."""
        return [
            (store, slice(head, head + 1), _of_head(state, head))
            for head, store in enumerate(self.heads)
        ]

    def make_room(self, state: State, positions: tf.Tensor, weighing: Weighing) -> State:
        """See `EvictingStore.make_room`."""
        return _joined(
            [
                store.make_room(part, positions, _weighing_of(weighing, heads))
                for store, heads, part in self.parts(state)
            ]
        )

    def evict(self, state: State, weighing: Weighing) -> State:
        """See `EvictingStore.evict`."""
        return _joined(
            [
                store.evict(part, _weighing_of(weighing, heads))
                for store, heads, part in self.parts(state)
            ]
        )

    def worth(self, state: State, weighing: Weighing) -> tf.Tensor:
        """See `EvictingStore.worth`; as many entries as the longest head has, where the others
        have fewer, these are absent."""
        found = [
            store.worth(part, _weighing_of(weighing, heads))
            for store, heads, part in self.parts(state)
        ]
        longest = max(scores.shape[-1] for scores in found)
        padded = [
            tf.pad(s, [[0, 0], [0, 0], [0, longest - s.shape[-1]]], constant_values=ABSENT)
            for s in found
        ]
        return tf.concat(padded, axis=1)

    def write(
        self,
        state: State,
        positions: tf.Tensor,
        keys: Coded,
        values: Coded,
        after: tf.Tensor | None = None,
        exact: tuple[tf.Tensor, tf.Tensor] | None = None,
    ) -> State:
        """See `DenseStore.write`."""
        return _joined(
            [
                store.write(
                    part,
                    positions,
                    {name: code[:, heads] for name, code in keys.items()},
                    {name: code[:, heads] for name, code in values.items()},
                    after,
                    None if exact is None else (exact[0][:, heads], exact[1][:, heads]),
                )
                for store, heads, part in self.parts(state)
            ]
        )

    def observe(self, state: State, asked: Asked) -> State:
        """See `EvictingStore.observe`."""
        return _joined(
            [
                store.observe(part, asked._replace(queries=asked.queries[:, heads]))
                for store, heads, part in self.parts(state)
            ]
        )

    def hide(self, state: State, positions: tf.Tensor) -> State:
        """See `EvictingStore.hide`."""
        return _joined([store.hide(part, positions) for store, _, part in self.parts(state)])

    def reorder(self, state: State, rows: tf.Tensor) -> State:
        """See `DenseStore.reorder`."""
        return {name: tf.gather(tensor, rows) for name, tensor in state.items()}


#: What all heads have in common, once in a state.
_COMMON = ("filled", "reached", "dropped")


def _joined(states: list) -> dict:
    """States, or specs, of the heads as one."""
    apart = {
        f"head{head}/{name}": value
        for head, state in enumerate(states)
        for name, value in state.items()
        if name not in _COMMON
    }
    return apart | {name: states[0][name] for name in _COMMON}


def _of_head(state: State, head: int) -> State:
    prefix = f"head{head}/"
    own = {n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)}
    return own | {name: state[name] for name in _COMMON}


def _weighing_of(weighing: Weighing, heads: slice) -> Weighing:
    return weighing._replace(output_kernel=weighing.output_kernel[heads])

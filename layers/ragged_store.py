"""Stores of the KV heads of a layer that have budgets of their own, side by side."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs.codec import Coded, code_of_heads
from tfkv.layers.evicting_store import Asked, EvictingStore, Weighing
from tfkv.layers.policies.evicting_policy import ABSENT, EvictingPolicy
from tfkv.layers.positions import first_position
from tfkv.layers.store import CacheStore, State


class RaggedStore(CacheStore):
    """One `EvictingStore` for each KV head, since a tensor cannot be longer in one head.

    The state is that of the heads' stores, with ``head<k>/`` before each name; ``filled``,
    ``reached`` and ``dropped`` are the same in all heads.

    The arguments are those of `EvictingStore`; `budgets` of the policy name one number for each
    KV head.

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
                dataclasses.replace(
                    cache,
                    policy=policy.of_head(head),
                    codec=cache.codec.of_heads(slice(head, head + 1)),
                ),
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
        return _joined([store.spec(batch_size) for store in self.heads])

    def parts(self, state: State) -> list[tuple[EvictingStore, slice, State]]:
        return [
            (store, slice(head, head + 1), _of_head(state, head))
            for head, store in enumerate(self.heads)
        ]

    def make_room(self, state: State, positions: tf.Tensor, weighing: Weighing) -> State:
        """See `EvictingStore.make_room`."""
        asked = tf.where(self._intact(state, positions)[:, tf.newaxis], positions, -1)
        return self._each(
            state,
            lambda store, own, heads: store.make_room(own, asked, weighing.of_heads(heads)),
        )

    def evict(self, state: State, weighing: Weighing) -> State:
        """See `EvictingStore.evict`."""
        return self._each(
            state, lambda store, own, heads: store.evict(own, weighing.of_heads(heads))
        )

    def worth(self, state: State, weighing: Weighing) -> tf.Tensor:
        """See `EvictingStore.worth`; as many entries as the longest head has, where the others
        have fewer, these are absent."""
        found = [
            store.worth(own, weighing.of_heads(heads)) for store, heads, own in self.parts(state)
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
        also: tf.Tensor | bool = True,
    ) -> State:
        """See `DenseStore.write`. A row that takes back what one head has evicted past is refused
        by all of them, so that they hold the same session."""
        also = self._intact(state, positions) & also

        def write(store: EvictingStore, own: State, heads: slice) -> State:
            of_heads = None if exact is None else (exact[0][:, heads], exact[1][:, heads])
            own_keys, own_values = code_of_heads(keys, heads), code_of_heads(values, heads)
            return store.write(own, positions, own_keys, own_values, after, of_heads, also)

        return self._each(state, write)

    def observe(self, state: State, asked: Asked) -> State:
        """See `EvictingStore.observe`."""
        return self._each(
            state, lambda store, own, heads: store.observe(own, asked.of_heads(heads))
        )

    def hide(self, state: State, positions: tf.Tensor) -> State:
        """See `EvictingStore.hide`."""
        return self._each(state, lambda store, own, _: store.hide(own, positions))

    def _intact(self, state: State, positions: tf.Tensor) -> tf.Tensor:
        """Rows of which no head has evicted past the beginning of a chunk; bool ``[B]``."""
        start = first_position(positions)
        intact = (store.intact(own, start) for store, _, own in self.parts(state))
        return functools.reduce(tf.logical_and, intact)

    def _each(self, state: State, do: Callable[[EvictingStore, State, slice], State]) -> State:
        """The state after `do` of each head's store, of its state and with its heads."""
        return _joined([do(store, own, heads) for store, heads, own in self.parts(state)])


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

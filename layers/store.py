"""What every store of keys and values has in common."""

from __future__ import annotations

import abc
from typing import Any

import tensorflow as tf

#: Tensors of a store by name: flat, batch first, of static shape.
State = dict[str, tf.Tensor]


class CacheStore(abc.ABC):
    """Holds the sessions of a batch in tensors of fixed shapes, which `spec` names."""

    @abc.abstractmethod
    def spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state."""

    @abc.abstractmethod
    def parts(self, state: State) -> list[tuple[Any, slice, State]]:
        """Each store with tensors of its own, the KV heads that are its own, and its state: a
        layer whose heads differ has several."""

    def init(self, batch_size: int) -> State:
        """The state of empty sessions."""
        return {
            name: tf.zeros(spec.shape, spec.dtype) for name, spec in self.spec(batch_size).items()
        }

    def bytes_per_session(self) -> int:
        """Bytes of one row of the state; exact."""
        return sum(spec.shape.num_elements() * spec.dtype.size for spec in self.spec(1).values())

    def kept_positions(self, state: State) -> tf.Tensor:
        """Positions of the tokens that each KV head holds, int32 ``[B, K, S]``; −1 = empty."""
        found = []
        for store, _, own in self.parts(state):
            positions = store.view(own).positions
            if positions.shape.rank == 2:
                positions = tf.tile(positions[:, tf.newaxis], [1, store.num_key_value_heads, 1])
            found.append(positions)
        longest = max(positions.shape[-1] for positions in found)
        padded = [
            tf.pad(one, [[0, 0], [0, 0], [0, longest - one.shape[-1]]], constant_values=-1)
            for one in found
        ]
        return tf.concat(padded, axis=1)

    def reorder(self, state: State, rows: tf.Tensor) -> State:
        """The state whose row b was row ``rows[b]``: for beams and forks."""
        return {name: tf.gather(tensor, rows) for name, tensor in state.items()}

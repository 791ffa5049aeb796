"""Caches of sessions in one piece each, for models that are not on pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfkv.export.transient import TransientVariable

if TYPE_CHECKING:
    from tfkv.generation import Decoder


class SessionSlots:
    """A model's states as variables, with a row for each slot.

    It stands where an engine of pages has pools and a page table: a slot counts as one page that
    holds a whole session.

    Args:
        decoder: Whose states.
        slots: Sessions held at once; row `slots` is the spare, which nobody reads.
        most_tokens: Most tokens of a session.
    """

    def __init__(self, decoder: Decoder, slots: int, most_tokens: int) -> None:
        self._structure = decoder.init_state(1)
        rows = tf.nest.flatten(self._structure)
        self.slots = slots
        self.variables = [
            TransientVariable(f"session_{n}", (slots + 1, *row.shape[1:]), row.dtype)
            for n, row in enumerate(rows)
        ]
        self.pages = (slots + 1,)
        self.page_size = most_tokens
        self.page_bytes = sum(math.prod(row.shape) * row.dtype.size for row in rows)
        self.page_bytes_of_groups = (self.page_bytes,)
        self.nbytes = self.page_bytes * (slots + 1)

    def read(self, slot: tf.Tensor, fresh: tf.Tensor) -> Any:
        """States of a batch: rows ``slot [B]`` of all tensors, nothing where ``fresh [B]``."""
        rows = []
        for variable in self.variables:
            row = tf.gather(variable.read(), slot)
            none = tf.reshape(fresh, [-1, *[1] * (row.shape.rank - 1)])
            rows.append(tf.where(none, tf.zeros_like(row), row))
        return tf.nest.pack_sequence_as(self._structure, rows)

    def write(self, slot: tf.Tensor, state: Any) -> None:
        """Stores states of a batch; rows of no session go to the spare."""
        for variable, rows in zip(self.variables, tf.nest.flatten(state), strict=True):
            value = tf.tensor_scatter_nd_update(variable.read(), slot[:, tf.newaxis], rows)
            variable.assign(value)

    def fork(self, source: tf.Tensor, target: tf.Tensor, filled: tf.Tensor) -> None:
        """Copies slots; what is behind ``filled [B]`` is overwritten by the next call."""
        del filled
        self.write(target, self.read(source, tf.zeros_like(source, tf.bool)))

    def release(self, slots: tf.Tensor) -> None:
        """Nothing to give back: a session that begins finds its slot empty."""
        del slots

    def truncate(self, slots: tf.Tensor, position: tf.Tensor) -> None:
        """Nothing to give back: what is behind ``position [n]`` is overwritten by the next call."""
        del slots, position

    def usage(self, used: tf.Tensor, page_bytes: Sequence[int]) -> dict[str, tf.Tensor]:
        """See `PageTables.usage`."""
        taken = tf.reduce_sum(tf.cast(used, tf.int64))
        none = tf.zeros_like(taken)
        free = self.slots - taken
        counts = {"pages_used": taken, "pages_shared": none, "pages_cached": none}
        return {**counts, "pages_free": free, "bytes_used": taken * page_bytes[0]}

    def check_integrity(self) -> tf.Tensor:
        """No page can be wrong where there is none; int64."""
        return tf.constant(0, tf.int64)

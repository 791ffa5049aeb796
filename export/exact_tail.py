"""The newest tokens of each session, and its first ones, as they are: beside the codes on pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.export.page_pool import rows_of_tokens, scatter_rows
from tfkv.export.transient import TransientVariable
from tfkv.layers.codecs import CacheCodec
from tfkv.layers.entry_layout import EntryLayout

#: Keys and values, each ``[(slots + 1) · L, K, E, H]``.
Exact = dict[str, tf.Tensor]


class Tails(NamedTuple):
    """Whose exact tokens the rows of a batch read.

    Attributes:
        slot: int32 ``[B]``; the spare one has none.
        since: int32 ``[B]``, tokens at positions below it came with pages, without exact
            numbers: a shared prompt, a branch, a restored session.
        reached: int32 ``[B]``, one past the highest position ever written.
        floor: int32 ``[B]``, positions below it were evicted by score.
    """

    slot: tf.Tensor
    since: tf.Tensor
    reached: tf.Tensor
    floor: tf.Tensor


class ExactTail:
    """Holds what codecs keep exactly: a ring of `recent` tokens and the `sinks`, a slot each.

    It only ever adds precision: whatever it does not hold is read from the codes, which are
    complete. So forks, prefixes and snapshots need not carry it along.

    It is as long as the codec wants that keeps most, and of all layers; each of them reads what
    its own codec says.

    Args:
        config: Architecture.
        codecs: How many tokens are kept; none for most codecs.
        slots: Sessions held at once.
    """

    def __init__(self, config: DecoderConfig, codecs: Sequence[CacheCodec], slots: int) -> None:
        self.config = config
        self.recent, self.sinks = _most_kept(codecs)
        self.layout = EntryLayout(self.recent + self.sinks, self.sinks)
        self.slots = slots
        self.variables: dict[str, TransientVariable] = {}
        if not self.recent:
            return
        heads = (config.num_key_value_heads, self.layout.entries, config.head_dim)
        shape = ((slots + 1) * config.num_layers, *heads)
        self.variables = {
            side: TransientVariable(f"exact_{side}", shape, tf.float32)
            for side in ("keys", "values")
        }
        self._since = TransientVariable("exact_since", (slots + 1,), tf.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of it, all slots."""
        return sum(variable.nbytes for variable in self.variables.values())

    def read(self) -> Exact:
        """All of it as tensors."""
        return {side: variable.read() for side, variable in self.variables.items()}

    def assign(self, exact: Exact) -> None:
        """Publishes what a computation wrote."""
        for side, value in exact.items():
            self.variables[side].assign(value)

    def tails(
        self,
        slot: tf.Tensor,
        fresh: tf.Tensor,
        shared: tf.Tensor,
        reached: tf.Tensor,
        floor: tf.Tensor,
    ) -> Tails:
        """What rows can read.

        Args:
            slot: int32 ``[B]``.
            fresh: bool ``[B]``, sessions that begin now.
            shared: int32 ``[B]``, tokens below it have just come with shared pages; 0 = none.
            reached: int32 ``[B]``.
            floor: int32 ``[B]``.
        """
        since = tf.gather(self._since.read(), slot) if self.recent else tf.zeros_like(slot)
        return Tails(slot, tf.maximum(tf.where(fresh, 0, since), shared), reached, floor)

    def begin(self, slots: tf.Tensor, since: tf.Tensor) -> None:
        """Says that sessions have exact numbers from positions ``since [n]`` on only."""
        if self.recent:
            since = tf.tensor_scatter_nd_update(self._since.read(), slots[:, tf.newaxis], since)
            self._since.assign(since)

    @staticmethod
    def holds(codec: CacheCodec, tails: Tails, start: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Whether the exact numbers of tokens are there that a codec keeps; bool, as `positions`.

        Args:
            codec: How many it keeps.
            tails: Rows ``[B]``.
            start: int32 ``[B]``, first position of the chunk that reads.
            positions: int32 ``[B, n]``, all below `start`.
        """
        oldest = tf.maximum(tails.reached, start) - codec.recent
        low = tf.maximum(tails.since, oldest)[:, tf.newaxis]
        first = (positions < codec.sinks) & (tails.since == 0)[:, tf.newaxis]
        return (positions >= low) | first

    def gather(self, exact: Exact, tails: Tails, layer: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys and values of rows ``[B, K, E, H]`` in one layer."""
        rows = tails.slot * self.config.num_layers + layer
        return tf.gather(exact["keys"], rows), tf.gather(exact["values"], rows)

    def gather_tokens(self, exact: Exact, slot: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Keys at ``positions [B, n]`` in all layers, float32 ``[L · B · n · K, H]``; anything
        where `holds` does not hold."""
        entry = self.layout.entry_of(tf.maximum(positions, 0))
        owner = tf.broadcast_to(slot[:, tf.newaxis], tf.shape(positions))
        owner, entry = tf.reshape(owner, [-1]), tf.reshape(entry, [-1])
        rows, offsets = rows_of_tokens(self.config, owner, entry)
        flat = tf.reshape(exact["keys"], [-1, self.config.head_dim])
        return tf.gather(flat, rows * self.layout.entries + offsets)

    def write(
        self,
        exact: Exact,
        slot: tf.Tensor,
        positions: tf.Tensor,
        keys: tf.Tensor,
        values: tf.Tensor,
    ) -> Exact:
        """Stores tokens of all layers.

        Args:
            exact: All of it.
            slot: int32 ``[B]``.
            positions: int32 ``[B, T]``; −1 is written nowhere.
            keys: float ``[L, B · T, K, H]``.
            values: Likewise.
        """
        newest = tf.reduce_max(positions, axis=1, keepdims=True)
        stays = (positions >= 0) & self.layout.keeps(positions, newest + 1)
        entry = tf.where(stays, self.layout.entry_of(positions), 0)
        slot = tf.where(stays, slot[:, tf.newaxis], self.slots)
        rows, offsets = rows_of_tokens(self.config, tf.reshape(slot, [-1]), tf.reshape(entry, [-1]))
        return {
            "keys": scatter_rows(exact["keys"], rows, offsets, keys),
            "values": scatter_rows(exact["values"], rows, offsets, values),
        }


def exact_bytes(config: DecoderConfig, codecs: Sequence[CacheCodec]) -> int:
    """Bytes of one slot of an `ExactTail`."""
    heads = config.num_layers * config.num_key_value_heads
    return heads * sum(_most_kept(codecs)) * 2 * config.head_dim * tf.float32.size


def _most_kept(codecs: Sequence[CacheCodec]) -> tuple[int, int]:
    """Most recent tokens, and most sinks, that any codec keeps exactly."""
    return max(codec.recent for codec in codecs), max(codec.sinks for codec in codecs)

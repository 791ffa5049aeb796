"""Where a position is stored: the arithmetic that every policy's store shares."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class EntryLayout:
    """Maps absolute positions to the entries of a fixed-size cache and back.

    The first `sinks` positions keep entries of their own; later ones go round a ring
    behind them. A cache that never wraps is the special case of a ring as long as the
    session, so dense and windowed caches share this one rule.

    Args:
        entries: Tokens stored at most (axis S of a dense store).
        sinks: Entries that the ring never overwrites.
    """

    entries: int
    sinks: int = 0

    @property
    def ring(self) -> int:
        """Entries behind the sinks."""
        return self.entries - self.sinks

    def keeps(self, positions: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        """Whether the tokens at `positions` are not overwritten once all below `end` are
        written; bool, broadcast."""
        return (positions >= end - self.ring) | (positions < self.sinks)

    def entry_of(self, positions: tf.Tensor) -> tf.Tensor:
        """Entry of each position, int32, same shape; −1 stays −1."""
        wrapped = self.sinks + tf.math.floormod(positions - self.sinks, self.ring)
        return tf.where(positions < self.sinks, positions, wrapped)

    def positions_of(self, filled: tf.Tensor, entries: tf.Tensor | None = None) -> tf.Tensor:
        """Position that each entry holds once positions 0..filled−1 were written.

        Args:
            filled: int32, any shape; broadcast against `entries`.
            entries: int32 entry numbers; all of them, as ``[..., S]``, where left out.

        Returns:
            int32 positions, −1 where an entry is empty.
        """
        if entries is None:
            entries = tf.range(self.entries)
            filled = filled[..., tf.newaxis]
        last = filled - 1
        in_ring = last - tf.math.floormod(last - entries, self.ring)
        is_sink = entries < self.sinks
        position = tf.where(is_sink, entries, in_ring)
        lowest = tf.where(is_sink, 0, self.sinks)
        held = (position >= lowest) & (position < filled)
        return tf.where(held, position, -1)

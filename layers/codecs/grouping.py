"""Which tokens a codec codes together when some are added."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfkv.layers.positions import first_position


class Touched(NamedTuple):
    """All tokens of the groups that new ones join, ``[B, M]``; M is a multiple of a group.

    Attributes:
        positions: int32; −1 = still to come.
        fresh: bool, whether it is one of the new ones.
        sources: int32, which of them; 0 where it is none.
    """

    positions: tf.Tensor
    fresh: tf.Tensor
    sources: tf.Tensor


def touched_groups(positions: tf.Tensor, tokens: int) -> Touched:
    """The groups that new tokens join.

    Args:
        positions: int32 ``[B, T]``, consecutive in each row; −1 = none.
        tokens: Of a group: positions from one multiple of it to the next.
    """
    start, end = first_position(positions), tf.reduce_max(positions, axis=1) + 1
    count = (positions.shape[1] + tokens - 2) // tokens + 1
    first = start // tokens * tokens
    wanted = first[:, tf.newaxis] + tf.range(count * tokens)
    match = (wanted[:, :, tf.newaxis] == positions[:, tf.newaxis]) & (wanted >= 0)[..., tf.newaxis]
    return Touched(
        positions=tf.where((wanted >= 0) & (wanted < end[:, tf.newaxis]), wanted, -1),
        fresh=tf.reduce_any(match, axis=2),
        sources=tf.argmax(match, axis=2, output_type=tf.int32),
    )

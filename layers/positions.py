"""Absolute positions of a chunk's tokens."""

from __future__ import annotations

import tensorflow as tf


def consecutive_positions(given: tf.Tensor, first: tf.Tensor | int = 0) -> tf.Tensor:
    """Numbers the tokens of each row, wherever its padding is.

    Args:
        given: bool ``[B, T]``, False marks padding.
        first: Position of each row's first token, int32 ``[B]`` or one for all.

    Returns:
        int32 ``[B, T]``, −1 where padded.
    """
    first = tf.reshape(tf.cast(first, tf.int32), [-1, 1])
    return tf.where(given, first + ranks(given), -1)


def first_position(positions: tf.Tensor) -> tf.Tensor:
    """Lowest position of each row of ``positions [B, T]``, int32 ``[B]``.

    A row of padding has none and answers with the highest int32.
    """
    return tf.reduce_min(tf.where(positions >= 0, positions, tf.int32.max), axis=-1)


def ranks(given: tf.Tensor) -> tf.Tensor:
    """How many tokens of its row stand before each token, int32 ``[B, T]``."""
    return tf.cumsum(tf.cast(given, tf.int32), axis=-1, exclusive=True)

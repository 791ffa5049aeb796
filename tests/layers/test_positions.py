from __future__ import annotations

import tensorflow as tf

from tfkv.layers.positions import consecutive_positions, first_position


def test_padding_on_any_side_leaves_positions_alone():
    """unsloth #3699, transformers #22707: left padding moves no position."""
    given = tf.constant([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]]) == 1
    positions = consecutive_positions(given, tf.constant([0, 5, 7, 9]))
    assert positions.numpy().tolist() == [[-1, -1, 0, 1], [5, 6, -1, -1], [7, -1, -1, 8], [-1] * 4]
    assert first_position(positions).numpy().tolist() == [0, 5, 7, tf.int32.max]

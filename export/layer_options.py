"""What layers of one model differ in, inside a loop over them: tables, looked up by number."""

from __future__ import annotations

import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.layers.rotary import once_more, rotary_angles
from tfkv.layers.scoring import Scoring, grouped_slopes

#: Cosine and sine; None where nothing turns.
Angles = tuple[tf.Tensor, tf.Tensor] | None


def scoring_of(config: DecoderConfig, number: tf.Tensor) -> Scoring:
    """Scoring of layer `number`, or of one layer a row, int32 ``[B]``."""
    scale = config.positions.alibi_scale if config.positions.kind == "alibi" else 0.0
    slopes = grouped_slopes(scale, config.num_key_value_heads, config.query_group_size)
    return Scoring(config.attention.soft_cap, slopes, _window(config, number))


def _window(config: DecoderConfig, number: tf.Tensor) -> tf.Tensor | int:
    windows = config.attention.windows
    if len(set(windows)) <= 1:
        return windows[0] if windows else 0
    # Where all are seen: wider than any session is long.
    table = tf.constant([window or tf.int32.max for window in windows], tf.int32)
    window = tf.gather(table, number)
    return window if window.shape.rank == 0 else window[:, tf.newaxis, tf.newaxis]


class LayerAngles:
    """What the queries and keys of each layer are turned by.

    Worked out once for all layers: where they differ, for each rotation there is, and looked up
    in the loop. A layer without positions is turned by the angle 0.

    Args:
        config: Architecture.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._differ = len(set(config.rope_of_layers)) > 1

    def angles(self, positions: tf.Tensor, once: bool = False) -> Angles:
        """At ``positions [A, T]``: cosines and sines ``[A, T, C/2]``, or ``[R, A, T, C/2]``
        where layers differ.

        Args:
            positions: int32.
            once: Whether what is turned was so before, and has its magnitude already.
        """
        ropes = self.config.ropes
        if max(self.config.rope_of_layers) < 0:
            return None
        each = [
            rotary_angles(positions, self.config.head_dim, once_more(rope) if once else rope)
            for rope in ropes
        ]
        if not self._differ:
            return each[max(self.config.rope_of_layers)]
        cosines, sines = zip(*each, strict=True)
        at_zero = tf.ones_like(cosines[0]), tf.zeros_like(sines[0])
        return tf.stack([*cosines, at_zero[0]]), tf.stack([*sines, at_zero[1]])

    def of_layer(self, angles: Angles, number: tf.Tensor) -> Angles:
        """Those of layer `number`, or of one layer a row, int32 ``[A]``."""
        if angles is None or not self._differ:
            return angles
        none = len(self.config.ropes)
        table = [none if rope < 0 else rope for rope in self.config.rope_of_layers]
        rope = tf.gather(tf.constant(table, tf.int32), number)
        if rope.shape.rank == 0:
            return angles[0][rope], angles[1][rope]
        by_row = (tf.transpose(x, [1, 0, 2, 3]) for x in angles)
        cosine, sine = (tf.gather(x, rope, batch_dims=1) for x in by_row)
        return cosine, sine

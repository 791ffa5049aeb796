"""Keep what would hurt most, were it needed once."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import Seen, pool
from tfkv.layers.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class DefensiveKV(SnapKV):
    """The worst case of a window: the highest attention that any query of the group gave, and
    no less than the mean, times what a value adds to the output.

    Choose it where the question comes later: a token that one query needed may be needed again.
    Heads share one budget a layer, by a table of the calibration.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Feng et al., DefensiveKV, https://arxiv.org/abs/2510.13334, and its code,
        https://github.com/FFY0/DefensiveKV.
    """

    name = "defensive_kv"
    caps: str = "defensive_kv"

    def score(self, seen: Seen) -> tf.Tensor:
        weights = pool(seen.attention(), self.kernel_size, self.pooling)
        # What pooling smeared over empty entries does not count.
        weights = tf.where(seen.valid[:, :, tf.newaxis, tf.newaxis], weights, 0.0)
        weights /= tf.maximum(tf.reduce_sum(weights, axis=-1, keepdims=True), 1e-30)
        worst = tf.reduce_max(weights, axis=[2, 3])
        count = tf.reduce_sum(tf.cast(seen.valid, tf.float32), axis=-1, keepdims=True)
        mean = tf.reduce_sum(worst, axis=-1, keepdims=True) / tf.maximum(count, 1.0)
        return tf.maximum(worst, mean) * seen.output_norms()


@dataclasses.dataclass(frozen=True)
class LayerDefensiveKV(DefensiveKV):
    """DefensiveKV whose layers share one budget, too.

    Choose it over `DefensiveKV`: few heads of few layers look far.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        As of `DefensiveKV`.
    """

    name = "layer_defensive_kv"
    caps: str = "layer_defensive_kv"

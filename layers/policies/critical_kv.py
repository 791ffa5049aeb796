"""Keep what moves the output most."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import PROTECTED, Seen
from tfkv.layers.policies.snapkv import SnapKV

#: Added to every vote, so that a large value counts where nobody looked.
_EPSILON = 1e-4


@dataclasses.dataclass(frozen=True)
class CriticalKV(SnapKV):
    """SnapKV in two stages: half of the budget by votes, the rest by votes times what a value
    adds to the output.

    Choose it over SnapKV for a little more quality; it costs one product more when entries are
    evicted, and nothing in between.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Feng et al., CriticalKV, https://arxiv.org/abs/2502.03805; ``‖W_o v‖₁`` as in
        https://github.com/NVIDIA/kvpress.
    """

    name = "critical_kv"

    def score(self, seen: Seen) -> tf.Tensor:
        votes = tf.where(seen.valid, self.votes(seen), -1.0)
        newest = seen.filled[:, tf.newaxis, tf.newaxis] - self.recent
        old = tf.where(seen.positions < newest, votes, -1.0)
        count = max((self.budget - self.window) // 2, 1)
        least = tf.math.top_k(old, count).values[..., -1:]
        return tf.where(old >= least, PROTECTED / 2, 0.0) + (votes + _EPSILON) * seen.output_norms()

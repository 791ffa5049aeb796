"""Keep what the last token looks at."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen


@dataclasses.dataclass(frozen=True)
class TOVA(EvictingPolicy):
    """Token omission via attention: the last query's attention, mean over all heads of a layer.

    Choose it where little memory and time may go into the choice: one query is kept, and all
    heads of a layer keep the same tokens.

    Args:
        recent: Newest tokens that are never evicted; the paper protects none.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Oren et al., https://arxiv.org/abs/2401.06104.
    """

    name = "tova"
    per_head = False
    recent: int = 32

    @property
    def observed(self) -> int:
        return 1

    def score(self, seen: Seen) -> tf.Tensor:
        mean = tf.reduce_mean(seen.attention(), axis=[1, 2, 3], keepdims=True)
        return tf.broadcast_to(mean[:, :, 0, 0], tf.shape(seen.positions))

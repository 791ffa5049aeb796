"""Keep the shortest keys."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen


@dataclasses.dataclass(frozen=True)
class Knorm(EvictingPolicy):
    """Entries with short keys stay: in many models they get the most attention.

    Choose it as the cheapest choice of all, and measure first: where long keys draw attention
    it does harm.

    Args:
        recent: Newest tokens that are never evicted.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Devoto et al., https://arxiv.org/abs/2406.11430.
    """

    name = "knorm"
    recent: int = 32

    def score(self, seen: Seen) -> tf.Tensor:
        return -tf.norm(tf.cast(seen.keys, tf.float32), axis=-1)

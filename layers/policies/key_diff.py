"""Keep the keys that differ from the rest."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen


@dataclasses.dataclass(frozen=True)
class KeyDiff(EvictingPolicy):
    """Entries are worth how little their key points the way of the mean key.

    Choose it to evict on the go at next to no cost: it looks at keys alone, and knows no query.

    Args:
        recent: Newest tokens that are never evicted.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Park et al., KeyDiff, https://arxiv.org/abs/2504.15364.
    """

    name = "key_diff"
    recent: int = 32

    def score(self, seen: Seen) -> tf.Tensor:
        there = tf.cast(seen.valid, tf.float32)[..., tf.newaxis]
        unit = tf.math.l2_normalize(seen.keys, axis=-1) * there
        mean = tf.math.l2_normalize(tf.reduce_sum(unit, axis=2), axis=-1)
        return -tf.einsum("bksh,bkh->bks", unit, mean)

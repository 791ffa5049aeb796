"""Keep what queries to come are expected to look at."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.policies.evicting_policy import ABSENT, EvictingPolicy, Seen
from tfkv.layers.rotary import once_more, rotary_angles, rotate


@dataclasses.dataclass(frozen=True)
class ExpectedAttention(EvictingPolicy):
    """Queries of the near future are taken for normally distributed, as the newest ones are; an
    entry is worth the attention expected of them, times the length of its value.

    Choose it where the question comes later or where one reads on: it asks what is to come, not
    what was.

    Args:
        recent: Newest tokens that are never evicted.
        window: Newest queries that mean and covariance are taken of.
        future: Positions ahead over which the rotation is averaged.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Devoto et al., Expected Attention, https://arxiv.org/abs/2510.00636, and its code,
        https://github.com/NVIDIA/kvpress. There, all queries of the prompt count; here the
        newest do, which is what a session without an end can keep.
    """

    name = "expected_attention"
    extrapolates = True
    recent: int = 32
    window: int = 128
    future: int = 512

    def __post_init__(self) -> None:
        for name in ("window", "future"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"`{name}` must be at least 1. Received: {name}={value!r}.")
        super().__post_init__()

    @property
    def observed(self) -> int:
        return self.window

    def score(self, seen: Seen) -> tf.Tensor:
        there = tf.cast(seen.asked_at >= 0, tf.float32)[:, tf.newaxis, tf.newaxis, :, tf.newaxis]
        queries = self._unrotated(seen)
        count = tf.maximum(tf.reduce_sum(there, axis=3), 1.0)
        mean = tf.reduce_sum(queries * there, axis=3) / count
        centred = (queries - mean[:, :, :, tf.newaxis]) * there
        covariance = tf.einsum("bkgwh,bkgwi->bkghi", centred, centred) / count[..., tf.newaxis]
        rotation = self._mean_rotation(seen)
        mean = tf.einsum("bkgh,bhi->bkgi", mean, rotation)
        covariance = tf.einsum("bhi,bkghj,bjl->bkgil", rotation, covariance, rotation)
        expected = tf.einsum("bksh,bkgh->bkgs", seen.keys, mean)
        spread = tf.einsum(
            "bkgsh,bksh->bkgs", tf.einsum("bksi,bkgih->bkgsh", seen.keys, covariance), seen.keys
        )
        scores = tf.where(seen.valid[:, :, tf.newaxis], expected + spread / 2, ABSENT)
        weights = tf.reduce_mean(tf.nn.softmax(scores, axis=-1), axis=2)
        return weights * tf.norm(seen.values, axis=-1)

    def _unrotated(self, seen: Seen) -> tf.Tensor:
        """The queries before RoPE."""
        if seen.rope is None:
            return seen.queries
        cosine, sine = rotary_angles(seen.asked_at, seen.keys.shape[-1], once_more(seen.rope))
        turned = rotate(
            tf.transpose(seen.queries, [0, 3, 1, 2, 4]),
            cosine[:, :, tf.newaxis],
            -sine[:, :, tf.newaxis],
        )
        return tf.transpose(turned, [0, 2, 3, 1, 4])

    def _mean_rotation(self, seen: Seen) -> tf.Tensor:
        """Mean matrix ``[B, H, H]`` that turns a query to the positions to come."""
        size = seen.keys.shape[-1]
        identity = tf.eye(size, batch_shape=[seen.filled.shape[0]])
        if seen.rope is None:
            return identity
        ahead = seen.filled[:, tf.newaxis] + tf.range(self.future)
        angles = rotary_angles(ahead, size, once_more(seen.rope))
        cosine, sine = (tf.reduce_mean(part, axis=1, keepdims=True) for part in angles)
        return rotate(identity[:, :, tf.newaxis], cosine, sine)[:, :, 0]

"""Eight-bit storage with a scale and a zero for each token and KV head."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.codecs.codec import Codec, Coded, PartSpec

_LEVELS = 127.0


class Int8Codec(Codec):
    """Asymmetric int8: ``x = scale * code + zero``, one pair for each token and KV head.

    Choose it for a quarter of the bytes at next to no loss; per-tensor scales, by
    contrast, break on the outlier channels of keys.

    Scale and zero are folded into the dots, so the codes are widened but never
    dequantised: ``q·x = scale (q·code) + zero Σq`` and
    ``Σ w x = Σ (w scale) code + Σ w zero``. Both are float16; codes are computed
    against the rounded pair, so that the rounding of the pair costs nothing.
    """

    name = "int8"

    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        return {"codes": PartSpec((head_dim,), tf.int8), "affine": PartSpec((2,), tf.float16)}

    def encode(self, x: tf.Tensor) -> Coded:
        x = tf.cast(x, tf.float32)
        low = tf.reduce_min(x, axis=-1, keepdims=True)
        high = tf.reduce_max(x, axis=-1, keepdims=True)
        scale = tf.maximum((high - low) / (2 * _LEVELS), 1e-7)
        affine = tf.cast(tf.concat([scale, (high + low) / 2], axis=-1), tf.float16)
        scale, zero = _split(affine)
        codes = tf.round((x - zero[..., tf.newaxis]) / scale[..., tf.newaxis])
        codes = tf.clip_by_value(codes, -_LEVELS, _LEVELS)
        return {"codes": tf.cast(codes, tf.int8), "affine": affine}

    def decode(self, coded: Coded) -> tf.Tensor:
        scale, zero = _split(coded["affine"])
        codes = tf.cast(coded["codes"], tf.float32)
        return codes * scale[..., tf.newaxis] + zero[..., tf.newaxis]

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        scale, zero = _split(coded["affine"], queries.dtype, axis=-2 if columns else -1)
        codes = tf.cast(coded["codes"], queries.dtype)
        dots = tf.matmul(queries, codes, transpose_b=not columns)
        sums = tf.reduce_sum(queries, axis=-1, keepdims=True)
        return dots * scale[..., tf.newaxis, :] + sums * zero[..., tf.newaxis, :]

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        scale, zero = _split(coded["affine"], weights.dtype)
        scaled = weights * scale[..., tf.newaxis, :]
        mixed = tf.matmul(scaled, tf.cast(coded["codes"], weights.dtype))
        return mixed + tf.reduce_sum(weights * zero[..., tf.newaxis, :], axis=-1, keepdims=True)


def _split(
    affine: tf.Tensor, dtype: tf.DType = tf.float32, axis: int = -1
) -> tuple[tf.Tensor, tf.Tensor]:
    """Scale and zero, which lie along an axis of 2; a float16 scale of 0 cannot divide."""
    scale, zero = tf.unstack(tf.cast(affine, dtype), axis=axis)
    return tf.maximum(scale, 6e-8), zero

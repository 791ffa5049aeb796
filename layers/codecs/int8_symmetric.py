"""Eight-bit storage whose dots are integer dots."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.codecs.codec import Codec, Coded, PartSpec

_LEVELS = 127.0


class Int8SymmetricCodec(Codec):
    """Symmetric int8: ``x = scale * code``, a scale for each token and KV head, and scores of
    int8 with int8 into int32.

    Choose it where scores over long caches are what takes the time: queries are quantised too,
    each by its own scale. It loses more than `Int8Codec`, whose queries stay float. Weights stay
    float in both: a scale for the weights of a page would make the answer depend on how a
    text was cut.

    Reference:
        Integer attention: SageAttention, https://arxiv.org/abs/2410.02367.
    """

    name = "int8_symmetric"

    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        return {"codes": PartSpec((head_dim,), tf.int8), "scale": PartSpec((1,), tf.float16)}

    def encode(self, x: tf.Tensor) -> Coded:
        x = tf.cast(x, tf.float32)
        scale = tf.maximum(tf.reduce_max(tf.abs(x), axis=-1, keepdims=True) / _LEVELS, 1e-7)
        scale = tf.cast(scale, tf.float16)
        codes = tf.round(x / _positive(scale, tf.float32))
        return {
            "codes": tf.cast(tf.clip_by_value(codes, -_LEVELS, _LEVELS), tf.int8),
            "scale": scale,
        }

    def decode(self, coded: Coded) -> tf.Tensor:
        return tf.cast(coded["codes"], tf.float32) * _positive(coded["scale"], tf.float32)

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        asked, by = _quantize_rows(queries)
        dots = tf.matmul(asked, coded["codes"], transpose_b=not columns, output_type=tf.int32)
        scale = _positive(coded["scale"], queries.dtype)
        scale = scale if columns else tf.linalg.matrix_transpose(scale)
        return tf.cast(dots, queries.dtype) * by * scale

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        scale = tf.linalg.matrix_transpose(_positive(coded["scale"], weights.dtype))
        return tf.matmul(weights * scale, tf.cast(coded["codes"], weights.dtype))


def _quantize_rows(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """int8 codes of ``x [..., n]``, and the scale ``[..., 1]`` of each row."""
    scale = tf.maximum(tf.reduce_max(tf.abs(x), axis=-1, keepdims=True) / _LEVELS, 1e-30)
    return tf.cast(tf.round(x / scale), tf.int8), scale


def _positive(scale: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """A float16 scale of 0 cannot divide."""
    return tf.maximum(tf.cast(scale, dtype), 6e-8)

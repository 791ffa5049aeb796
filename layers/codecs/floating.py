"""Floating-point storage."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.codecs.codec import Codec, Coded, PartSpec


class FloatCodec(Codec):
    """Stores keys and values as they are, or rounded to a shorter float.

    Choose ``float32`` as the reference, ``bfloat16`` or ``float16`` for half the bytes
    with no tuning at all.

    Args:
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    """

    def __init__(self, dtype: str) -> None:
        self.name = dtype
        self._dtype = tf.as_dtype(dtype)

    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        return {"codes": PartSpec((head_dim,), self._dtype)}

    def encode(self, x: tf.Tensor) -> Coded:
        return {"codes": tf.cast(x, self._dtype)}

    def decode(self, coded: Coded) -> tf.Tensor:
        return tf.cast(coded["codes"], tf.float32)

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        keys = tf.cast(coded["codes"], queries.dtype)
        return tf.matmul(queries, keys, transpose_b=not columns)

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        return tf.matmul(weights, tf.cast(coded["codes"], weights.dtype))

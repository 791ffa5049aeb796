"""Weight matrices as an artifact stores them, and products with them."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

#: The largest code of a weight.
_MOST = 127
#: Codes of activations have two digits of 8 bits: channels of a model differ so much that one
#: digit costs more than the weights' own rounding (docs/decisions/0026).
_DIGIT = 128.0
_MOST_STEPS = _MOST * _DIGIT
#: Most vectors at once that are multiplied as integers.
_SOME = 32


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One or more matrices, rows first, as they are stored.

    Attributes:
        numbers: ``[..., out, in]`` float32 or bfloat16; or int8, codes from −127 to 127.
        scale: float32 ``[..., out]``, what a code of 1 amounts to; None where there are no codes.
    """

    numbers: tf.Tensor
    scale: tf.Tensor | None = None

    def at(self, index: tf.Tensor) -> Matrix:
        """The matrices below `index` of the first axis."""
        return Matrix(self.numbers[index], None if self.scale is None else self.scale[index])

    def take(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of one matrix as float32, ``[..., in]``, by number ``[...]``."""
        numbers = tf.cast(tf.gather(self.numbers, rows), tf.float32)
        return numbers if self.scale is None else numbers * tf.gather(self.scale, rows)[..., None]

    def floats(self) -> tf.Tensor:
        """All of it as float32."""
        numbers = tf.cast(self.numbers, tf.float32)
        return numbers if self.scale is None else numbers * self.scale[..., None]

    def times(self, x: tf.Tensor) -> tf.Tensor:
        """Products ``[..., M, out]`` with vectors ``x [..., M, in]``.

        Codes meet codes: a vector is rounded to multiples of a step of its own. The answer does
        not depend on how many vectors there are, up to float32's rounding, though the way to it
        does: XLA on the CPU casts codes to float at no cost where a matrix meets a single vector,
        multiplies integers sooner than floats where it meets some, and loses that where it meets
        many.
        """
        if self.scale is None:
            return self._as_floats(x)
        step = tf.maximum(tf.reduce_max(tf.abs(x), axis=-1, keepdims=True) / _MOST_STEPS, 1e-30)
        codes, count = tf.round(x / step), x.shape[-2]
        if count is None:
            count = tf.shape(x)[-2]
        some = (count > 1) & (count <= _SOME)
        if isinstance(some, bool):
            added = self._as_integers(codes) if some else self._as_floats(codes)
        else:
            # Known when XLA compiles, so that one of the two is all that is compiled.
            added = tf.cond(some, lambda: self._as_integers(codes), lambda: self._as_floats(codes))
        return added * step * self.scale[..., tf.newaxis, :]

    def _as_floats(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, tf.cast(self.numbers, tf.float32), transpose_b=True)

    def _as_integers(self, codes: tf.Tensor) -> tf.Tensor:
        """Both digits of the vectors in one product: twice the vectors cost little more. Each row
        of the matrix meets them all at once, so that it is fetched once."""
        high = tf.round(codes / _DIGIT)
        digits = tf.cast(tf.concat([high, codes - high * _DIGIT], axis=-2), tf.int8)
        added = tf.matmul(self.numbers, digits, transpose_b=True, output_type=tf.int32)
        high, low = tf.split(tf.cast(added, tf.float32), 2, axis=-1)
        return tf.linalg.matrix_transpose(high * _DIGIT + low)


class StoredMatrix(tf.Module):
    """Variables of a `Matrix`.

    Args:
        value: float32 ``[..., out, in]``.
        dtype: What its numbers are stored as: one of `tfkv.config.WEIGHT_TYPES`.
    """

    def __init__(self, value: np.ndarray, dtype: str) -> None:
        super().__init__(name="matrix")
        scale = None
        if dtype == "int8":
            value, scale = quantized(value)
        self.numbers = tf.Variable(np.ascontiguousarray(value), trainable=False, dtype=dtype)
        self.scale = None if scale is None else tf.Variable(scale, trainable=False)

    def read(self) -> Matrix:
        """As tensors, for use inside loops."""
        scale = None if self.scale is None else self.scale.read_value()
        return Matrix(self.numbers.read_value(), scale)


def stored_as(value: np.ndarray, dtype: str) -> np.ndarray:
    """Matrices ``[..., out, in]`` with the roundings of a `StoredMatrix`, float32."""
    if dtype == "int8":
        codes, scale = quantized(value)
        return codes * scale[..., np.newaxis]
    return tf.cast(tf.cast(value, dtype), tf.float32).numpy() if dtype != "float32" else value


def quantized(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 ``[..., out, in]`` of a float32 matrix and the scale ``[..., out]`` of each row:
    its largest number is 127. A row of zeros has a scale of its own, too."""
    scale = np.abs(value).max(axis=-1).astype(np.float32) / _MOST
    scale = np.maximum(scale, np.finfo(np.float32).tiny)
    return np.rint(value / scale[..., np.newaxis]).astype(np.int8), scale

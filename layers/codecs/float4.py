"""Four-bit floats with a scale for each block of channels, as their standards define them."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.codecs.block_codec import BlockCodec
from tfkv.layers.codecs.codec import Coded, PartSpec

#: What the codes 0..7 of e2m1 stand for; 8 more is the same number below zero.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Halfway between two neighbours, and whether a number that lies there goes up: to the even
#: code.
_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


class Float4Codec(BlockCodec):
    """Codes of e2m1 (a sign, two bits of exponent, one of mantissa): NVFP4 and MXFP4.

    Choose them for files that other engines of these formats read, or to compare: integers
    of four bits with a zero of their own (`IntegerBlocks`) lose less at the same bytes.

    - ``nvfp4``: blocks of 16, scale e4m3 = amax / (6 · tensor scale) between 2⁻⁹ and 448.
      The tensor scale is fixed, 2⁻⁴ unless a calibration says otherwise: blocks of a
      greatest number from 0.006 to 168 have scales of full precision then.
    - ``mxfp4``: blocks of 32, scale a power of two (e8m0), 2^(⌊log₂ amax⌋ − 2).

    Args:
        name: ``"nvfp4"`` or ``"mxfp4"``.
        tensor_scale: Of nvfp4.

    Reference:
        NVFP4: NVIDIA Model-Optimizer; MXFP4: OCP Microscaling Formats 1.0, section 6.3.
    """

    def __init__(self, name: str, tensor_scale: float = 2.0**-4) -> None:
        super().__init__(4, {"nvfp4": 16, "mxfp4": 32}[name])
        self.name = name
        self._tensor_scale = tensor_scale

    def scale_parts(self, blocks: int) -> dict[str, PartSpec]:
        return {"scales": PartSpec((blocks,), tf.uint8)}

    def quantize(self, x: tf.Tensor) -> tuple[tf.Tensor, Coded]:
        most = tf.reduce_max(tf.abs(x), axis=-1)
        if self.name == "nvfp4":
            wanted = most / (6 * self._tensor_scale)
            scales = encode_e4m3(tf.clip_by_value(wanted, 2.0**-9, 448.0))
        else:
            scales = _exponent_byte(most)
        by = x / self._numbers(scales, tf.float32)[..., tf.newaxis]
        return encode_e2m1(by), {"scales": scales}

    def levels(self, codes: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        both = tf.constant([*E2M1, *(-level for level in E2M1)], dtype)
        return tf.gather(both, tf.cast(codes, tf.int32))

    def scales(
        self, coded: Coded, dtype: tf.DType, axis: int
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return tf.unstack(self._numbers(coded["scales"], dtype), axis=axis), []

    def _numbers(self, scales: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        if self.name == "nvfp4":
            return tf.cast(decode_e4m3(scales) * self._tensor_scale, dtype)
        bits = tf.bitwise.left_shift(tf.cast(scales, tf.int32), 23)
        # e8m0 begins at 2^-127, which float32 has as a subnormal only: XLA flushes it to 0.
        return tf.cast(tf.bitcast(tf.maximum(bits, 1 << 23), tf.float32), dtype)


def encode_e2m1(x: tf.Tensor) -> tf.Tensor:
    """uint8 codes of the nearest numbers of e2m1; beyond 6 it is 6, and ties are even."""
    size = tf.abs(x)
    above = [size >= at if up else size > at for at, up in _MIDPOINTS]
    code = tf.add_n([tf.cast(step, tf.int32) for step in above])
    return tf.cast(code + 8 * tf.cast((x < 0) & (code > 0), tf.int32), tf.uint8)


def encode_e4m3(x: tf.Tensor) -> tf.Tensor:
    """uint8 codes of the nearest e4m3 numbers (fn: no infinity) of float32 `x` in [0, 448]."""
    bits = tf.bitcast(x, tf.int32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 20), 1)
    normal = tf.bitwise.right_shift(bits + 0x7FFFF + odd, 20) - (120 << 3)
    subnormal = tf.cast(tf.round(x * 2.0**9), tf.int32)
    return tf.cast(tf.where(x < 2.0**-6, subnormal, normal), tf.uint8)


def decode_e4m3(codes: tf.Tensor) -> tf.Tensor:
    """The float32 numbers that uint8 codes of positive e4m3 stand for."""
    numbers = tf.cast(codes, tf.int32)
    normal = tf.bitcast(tf.bitwise.left_shift(numbers + (120 << 3), 20), tf.float32)
    return tf.where(numbers < 8, tf.cast(numbers, tf.float32) * 2.0**-9, normal)


def _exponent_byte(most: tf.Tensor) -> tf.Tensor:
    """e8m0 of the scale of a block whose greatest number is `most`; 0 has the least scale."""
    exponent = tf.bitwise.right_shift(tf.bitcast(most, tf.int32), 23)
    return tf.cast(tf.clip_by_value(exponent - 2, 1, 254), tf.uint8)

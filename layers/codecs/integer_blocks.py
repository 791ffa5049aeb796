"""Integers of 1 to 8 bits with a scale and a zero for each block of channels."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.codecs.affine import LEAST_SCALE, affine_codes, affine_of
from tfkv.layers.codecs.block_codec import BlockCodec
from tfkv.layers.codecs.codec import Coded, PartSpec


class IntegerBlocks(BlockCodec):
    """Asymmetric integers: the lowest number of a block is code 0, the highest the last one.

    Choose 4 bits for an eighth of float32's bytes and a quarter more for scales; rotate keys,
    which have outlier channels, or give them 8 bits: keys are far more sensitive than values.

    Scale and zero are float16, and codes are computed against the rounded pair.

    Args:
        bits: Of a code: 1 to 8.
        block: Channels that share a scale and a zero.
        rotate: Whether to rotate first; see `BlockCodec`.

    Reference:
        Values in groups of channels: KIVI, https://arxiv.org/abs/2402.02750.
    """

    def __init__(self, bits: int, block: int = 32, rotate: bool = False) -> None:
        super().__init__(bits, block, rotate)
        turned = "_rotated" if rotate else ""
        self.name = f"int{bits}_g{block}{turned}"

    def scale_parts(self, blocks: int) -> dict[str, PartSpec]:
        return {"affine": PartSpec((2 * blocks,), tf.float16)}

    def quantize(self, x: tf.Tensor) -> tuple[tf.Tensor, Coded]:
        affine = affine_of(x, self.bits, axis=-1)
        return affine_codes(x, affine, self.bits, axis=-1), {"affine": affine}

    def levels(self, codes: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(codes, dtype)

    def scales(
        self, coded: Coded, dtype: tf.DType, axis: int
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        numbers = tf.unstack(tf.cast(coded["affine"], dtype), axis=axis)
        blocks = len(numbers) // 2
        return [tf.maximum(scale, LEAST_SCALE) for scale in numbers[:blocks]], numbers[blocks:]

"""Keys whose sensitive channels get more bits, by a calibration."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.codecs.calibrated_codec import CalibratedCodec, CodecTables, as_tables
from tfkv.layers.codecs.codec import Codec
from tfkv.layers.codecs.integer_blocks import IntegerBlocks
from tfkv.layers.codecs.integer_segments import IntegerSegments
from tfkv.layers.codecs.projected_codec import ProjectedCodec

#: How the sensitivity of a block may be reckoned.
_SENSITIVITIES = ("product", "sum")


@dataclasses.dataclass(frozen=True)
class _Permutation:
    """The matrices ``[..., H, H]`` that put channels into an order ``[..., H]``."""

    order: Any

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        del name
        order = tf.cast(tf.convert_to_tensor(self.order), tf.int32)
        matrix = tf.one_hot(order, order.shape[-1], dtype=dtype or tf.float32)
        return tf.linalg.matrix_transpose(matrix)


@dataclasses.dataclass(frozen=True)
class BlockGTQ(CalibratedCodec):
    """Keys in integers of 1 to 8 bits, more for the blocks of two channels that scores depend
    on most; values in four bits, rotated.

    Choose it for fewer bytes than 8-bit keys take and less loss than 4-bit keys. RoPE turns
    channels i and i + H/2 together; such blocks differ by orders of magnitude in what an error
    costs, and in the same way for every text. The calibration puts each head's blocks in order
    and cuts that order into segments, which get their bits one by one where ``Σ s 4^-b`` falls
    most.

    Where it departs from the paper, all measured to lose less here: s is a block's
    ``E|q|² · E|k - mean|²``, the mean square error of scores, and not the mean of ``E|q|²`` and
    ``E|k|²`` (``sensitivity='sum'`` has that); keys are coded about the mean key of their head;
    each segment has a scale and a zero of its own instead of a norm and a codebook for normal
    numbers. All heads of the model share one list of bits, so that shapes are static.

    Args:
        bits: Of a key's channel, in the mean.
        segment: Channels that share bits, scale and zero; a multiple of 8.
        sensitivity: ``"product"`` or ``"sum"``.
        widths: Bits of each segment, the most sensitive one first; empty = by the calibration.
        recent: See `CacheCodec`.
        sinks: See `CacheCodec`.
        tables: Of a calibration: ``order [..., K, H]``, the channels by sensitivity, and ``mean``
            likewise, the mean key.

    Raises:
        ConfigError: A number is out of range.

    Reference:
        Liang et al., RoPE-Aware Bit Allocation, https://arxiv.org/abs/2606.24033, and its code,
        https://github.com/JIA-Lab-research/blockgtq.
    """

    ARGUMENTS: ClassVar[tuple[str, ...]] = (
        *("bits", "segment", "sensitivity", "widths"),
        *("recent", "sinks"),
    )

    name: str = dataclasses.field(init=False, default="block_gtq")
    bits: float = 4
    segment: int = 16
    sensitivity: str = "product"
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.bits, (int, float)) or not 1 <= self.bits <= 8:
            raise ConfigError(f"`bits` must be from 1 to 8. Received: bits={self.bits!r}.")
        if not isinstance(self.segment, int) or self.segment < 8 or self.segment % 8:
            raise ConfigError(
                f"`segment` must be a multiple of 8. Received: segment={self.segment!r}."
            )
        if self.sensitivity not in _SENSITIVITIES:
            raise ConfigError(
                f"`sensitivity` must be one of {', '.join(map(repr, _SENSITIVITIES))}. "
                f"Received: sensitivity={self.sensitivity!r}."
            )
        if self.widths and sum(self.widths) != self.bits * len(self.widths):
            raise ConfigError(
                f"`widths` must be bits={self.bits} in the mean. Received: widths={self.widths}."
            )
        super().__post_init__()

    def make_sides(self) -> tuple[Codec, Codec]:
        inner = IntegerSegments(self.bits, self.segment, self.widths)
        order = self.tables.get("order")
        # A product with ones and zeros: a gather with an order for each head is slow under XLA.
        turn = None if order is None else _Permutation(order)
        keys = ProjectedCodec(inner, None, turn, turn, self.tables.get("mean"))
        return keys, IntegerBlocks(4, rotate=True)

    def bind(self, tables: CodecTables, layer: int | None) -> Self:
        widths, arrays = tables.block_gtq(self.bits, self.segment, self.sensitivity, layer)
        if not self.widths:
            return dataclasses.replace(self, widths=widths, tables=as_tables(arrays))
        return self.with_tables(as_tables(arrays))

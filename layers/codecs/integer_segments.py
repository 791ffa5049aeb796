"""Integers of different numbers of bits, one number for each segment of channels."""

from __future__ import annotations

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.codecs.codec import Codec, Coded, PartSpec
from tfkv.layers.codecs.integer_blocks import IntegerBlocks


class IntegerSegments(Codec):
    """Segments of neighbouring channels, each asymmetric integers with a scale and a zero.

    Choose it where some channels matter more than others, and those come first. Bytes follow
    from the mean number of bits alone, and not from who gets how many.

    Args:
        bits: Of a channel, in the mean over the segments.
        segment: Channels of a segment; a narrower head is one segment.
        widths: Bits of each segment, 1 to 8; empty = not known yet, then it only says what it
            takes.
    """

    def __init__(self, bits: float, segment: int, widths: tuple[int, ...] = ()) -> None:
        self.name = f"segments{bits}_g{segment}"
        self.bits = bits
        self.segment = segment
        self.widths = widths

    def check(self, head_dim: int) -> None:
        width = min(self.segment, head_dim)
        count = head_dim // width
        if head_dim % width or width % 8 or self.bits * count % 1:
            raise ConfigError(
                "Segments must be a multiple of 8 channels that divides a head, and their bits "
                f"add up to a whole number. Received: head_dim={head_dim}, segment={self.segment}, "
                f"bits={self.bits}."
            )
        if self.widths and len(self.widths) != count:
            raise ConfigError(
                f"`widths` must name the bits of {count} segments of a head of {head_dim} "
                f"channels. Received: widths={self.widths}."
            )

    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        self.check(head_dim)
        segments = head_dim // min(self.segment, head_dim)
        return {
            "codes": PartSpec((int(head_dim * self.bits) // 8,), tf.uint8),
            "affine": PartSpec((2 * segments,), tf.float16),
        }

    def encode(self, x: tf.Tensor) -> Coded:
        parts = [
            codec.encode(piece)
            for codec, piece in zip(self._codecs(), self._pieces(x), strict=True)
        ]
        return {name: tf.concat([part[name] for part in parts], axis=-1) for name in parts[0]}

    def decode(self, coded: Coded) -> tf.Tensor:
        return tf.concat([codec.decode(part) for codec, part in self._parts(coded, -1)], axis=-1)

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        parts = self._parts(coded, -2 if columns else -1)
        asked = self._pieces(queries)
        return tf.add_n(
            [
                codec.scores(query, part, columns)
                for query, (codec, part) in zip(asked, parts, strict=True)
            ]
        )

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        return tf.concat(
            [codec.mix(weights, part) for codec, part in self._parts(coded, -1)], axis=-1
        )

    def _codecs(self) -> list[IntegerBlocks]:
        if not self.widths:
            raise ConfigError(
                "The bits of the segments are not known yet. Make a calibration with "
                "`tfkv calibrate`."
            )
        return [IntegerBlocks(bits, self.segment) for bits in self.widths]

    def _pieces(self, x: tf.Tensor) -> list[tf.Tensor]:
        return tf.split(x, len(self.widths) or 1, axis=-1)

    def _parts(self, coded: Coded, axis: int) -> list[tuple[IntegerBlocks, Coded]]:
        """The codec of each segment, and its code; the channels lie along `axis`."""
        codecs = self._codecs()
        channels = coded["codes"].shape[axis] * 8 // sum(self.widths)
        codes = tf.split(coded["codes"], [channels * bits // 8 for bits in self.widths], axis)
        affine = tf.split(coded["affine"], len(codecs), axis)
        return [
            (codec, {"codes": code, "affine": pair})
            for codec, code, pair in zip(codecs, codes, affine, strict=True)
        ]

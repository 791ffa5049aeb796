"""What codecs of few bits share: blocks of channels with a scale each, packed, maybe rotated."""

from __future__ import annotations

import abc
import functools
import math

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.codecs.codec import Codec, Coded, PartSpec
from tfkv.layers.codecs.packing import codes_together, pack, packed_size, unpack, unpack_parts
from tfkv.layers.products import times


class BlockCodec(Codec):
    """Codes of a token and KV head in blocks of neighbouring channels: ``x = scale * level``,
    or ``scale * level + zero``.

    Scale and zero are folded into the dots, one product a block, so that a page's levels
    are read as they are: ``q·x = Σ_blocks scale (q·level) + zero Σq``.

    With `rotate`, numbers are multiplied by a normalised Hadamard matrix first. It spreads an
    outlier channel over all others, and leaves dots of rotated queries with rotated keys as
    they were.

    Args:
        bits: Of a code: 1 to 8.
        block: Channels that share a scale; a narrower head is one block.
        rotate: Whether to rotate.

    Reference:
        Rotation: QuaRot, https://arxiv.org/abs/2404.00456, and llama.cpp pull request 21038.
    """

    def __init__(self, bits: int, block: int, rotate: bool = False) -> None:
        self.bits = bits
        self.block = block
        self.rotate = rotate

    # --- what a format says of itself ----------------------------------------------------

    @abc.abstractmethod
    def scale_parts(self, blocks: int) -> dict[str, PartSpec]:
        """The parts that hold scales and zeros of so many blocks."""

    @abc.abstractmethod
    def quantize(self, x: tf.Tensor) -> tuple[tf.Tensor, Coded]:
        """uint8 codes of ``x [..., blocks, channels]``, same shape, and the parts."""

    @abc.abstractmethod
    def levels(self, codes: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The numbers that uint8 codes stand for, before the scale."""

    @abc.abstractmethod
    def scales(
        self, coded: Coded, dtype: tf.DType, axis: int
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Scale of each block, and zero of each where the format has them, without `axis`."""

    # --- Codec ---------------------------------------------------------------------------

    def check(self, head_dim: int) -> None:
        width = min(self.block, head_dim)
        least = codes_together(self.bits)
        if head_dim % width or head_dim % least:
            raise ConfigError(
                f"Codec of {self.bits} bits in blocks of {self.block} needs heads of a multiple "
                f"of {width}. Received: head_dim={head_dim}. Choose 'int8', which takes any."
            )

    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        codes = PartSpec((packed_size(head_dim, self.bits),), tf.uint8)
        return {"codes": codes, **self.scale_parts(self._blocks(head_dim))}

    def encode(self, x: tf.Tensor) -> Coded:
        x = self._rotated(tf.cast(x, tf.float32))
        blocks = self._blocks(x.shape[-1])
        shape = tf.shape(x)
        split = tf.concat([shape[:-1], [blocks, x.shape[-1] // blocks]], axis=0)
        codes, parts = self.quantize(tf.reshape(x, split))
        return {"codes": pack(tf.reshape(codes, shape), self.bits), **parts}

    def decode(self, coded: Coded) -> tf.Tensor:
        levels = self.levels(unpack(coded["codes"], self.bits), tf.float32)
        scales, zeros = self.scales(coded, tf.float32, -1)
        blocks = [
            level * scale[..., tf.newaxis] + (zeros[index][..., tf.newaxis] if zeros else 0.0)
            for index, (level, scale) in enumerate(
                zip(tf.split(levels, len(scales), axis=-1), scales, strict=True)
            )
        ]
        return self._rotated(tf.concat(blocks, axis=-1))

    def prepare(self, queries: tf.Tensor) -> tf.Tensor:
        return self._rotated(queries)

    def finish(self, output: tf.Tensor) -> tf.Tensor:
        return self._rotated(output)

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        axis = -2 if columns else -1
        scales, zeros = self.scales(coded, queries.dtype, axis)
        pieces = self._pieces(coded["codes"], len(scales), axis)
        total: tf.Tensor = 0.0
        asked = tf.split(queries, len(pieces), axis=-1)
        for query, (block, codes) in zip(asked, pieces, strict=True):
            level = self.levels(codes, queries.dtype)
            dots = tf.matmul(query, level, transpose_b=not columns)
            total += dots * scales[block][..., tf.newaxis, :]
        for query, zero in zip(tf.split(queries, len(scales), axis=-1), zeros, strict=False):
            total += tf.reduce_sum(query, axis=-1, keepdims=True) * zero[..., tf.newaxis, :]
        return total

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        scales, zeros = self.scales(coded, weights.dtype, -1)
        mixed = []
        for block, codes in self._pieces(coded["codes"], len(scales), -1):
            scaled = weights * scales[block][..., tf.newaxis, :]
            piece = tf.matmul(scaled, self.levels(codes, weights.dtype))
            if zeros:
                zero = zeros[block][..., tf.newaxis, :]
                piece += tf.reduce_sum(weights * zero, axis=-1, keepdims=True)
            mixed.append(piece)
        return tf.concat(mixed, axis=-1)

    def _pieces(self, packed: tf.Tensor, blocks: int, axis: int) -> list[tuple[int, tf.Tensor]]:
        """Codes in equal pieces along `axis`, each within a block, and the block of each.

        The pieces are parts of a byte, cut where several blocks share one: they are never
        put side by side, which would cost more than the products that read them.
        """
        parts = unpack_parts(packed, self.bits, axis)
        cuts = math.lcm(blocks, len(parts)) // len(parts)
        pieces = [piece for part in parts for piece in tf.split(part, cuts, axis=axis)]
        return [(index * blocks // len(pieces), piece) for index, piece in enumerate(pieces)]

    def _blocks(self, head_dim: int) -> int:
        self.check(head_dim)
        return head_dim // min(self.block, head_dim)

    def _rotated(self, x: tf.Tensor) -> tf.Tensor:
        """Rotated, or rotated back: the matrix is its own inverse."""
        if not self.rotate:
            return x
        return times(x, tf.constant(hadamard(x.shape[-1]), x.dtype))


@functools.cache
def hadamard(size: int) -> tuple[tuple[float, ...], ...]:
    """Normalised symmetric Hadamard matrix, `size` rows; where `size` is no power of two, one
    of the largest that divides it, for each of as many groups of channels."""
    power = size & -size

    def entry(row: int, column: int) -> float:
        if row // power != column // power:
            return 0.0
        return (-1) ** (row & column & (power - 1)).bit_count() * power**-0.5

    return tuple(tuple(entry(row, column) for column in range(size)) for row in range(size))

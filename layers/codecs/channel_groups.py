"""Integer codes with a scale and a zero for each channel of a group of neighbouring tokens."""

from __future__ import annotations

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.codecs.affine import affine_codes, affine_of
from tfkv.layers.codecs.codec import Codec, Coded, PartSpec
from tfkv.layers.codecs.packing import codes_together, pack, packed_size, unpack, unpack_parts
from tfkv.layers.shapes import shape_of


class ChannelGroups(Codec):
    """``x = scale * code + zero`` with scale and zero for each channel of so many tokens.

    Choose it for keys, whose outliers stay in the same channels from token to token. A group
    is coded anew, from exact numbers, with each token that joins it, and never again once it
    is full: so the cache has to keep its newest tokens exactly, and a policy may not part the
    tokens of a group.

    Args:
        bits: Of a code: 2 or 4.
        tokens: Of a group.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        KIVI, https://arxiv.org/abs/2402.02750.
    """

    def __init__(self, bits: int, tokens: int = 32) -> None:
        if not isinstance(tokens, int) or tokens < 2:
            raise ConfigError(f"`group` must be at least 2. Received: group={tokens!r}.")
        self.bits = bits
        self.tokens = tokens
        self.name = f"int{bits}_c{tokens}"

    def check(self, head_dim: int) -> None:
        least = codes_together(self.bits)
        if head_dim % least or 4 * head_dim % self.tokens:
            raise ConfigError(
                f"Codec of {self.bits} bits in groups of {self.tokens} tokens needs heads of a "
                f"multiple of {max(least, self.tokens // 4)}. Received: head_dim={head_dim}. "
                "Choose 'int8', which takes any."
            )

    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        self.check(head_dim)
        return {
            "codes": PartSpec((packed_size(head_dim, self.bits),), tf.uint8),
            "affine": PartSpec((2 * head_dim,), tf.float16, self.tokens),
        }

    def encode(self, x: tf.Tensor) -> Coded:
        return self.encode_groups(x, tf.ones(tf.shape(x)[:-1], tf.bool))

    def encode_groups(self, x: tf.Tensor, there: tf.Tensor) -> Coded:
        """Codes of whole groups.

        Args:
            x: ``[..., S, H]``; S is a multiple of the tokens of a group.
            there: bool ``[..., S]``, False = a token that is still to come.
        """
        *lead, head_dim = shape_of(x)
        split = [*lead[:-1], lead[-1] // self.tokens, self.tokens, head_dim]
        x = tf.reshape(tf.cast(x, tf.float32), split)
        there = tf.reshape(tf.broadcast_to(there, lead), [*split[:-1], 1])
        # What is not there yet is what the group's first token is: that one always is.
        x = tf.where(there, x, x[..., :1, :])
        affine = affine_of(x, self.bits, axis=-2)
        codes = affine_codes(x, affine, self.bits, axis=-2)
        return {"codes": pack(tf.reshape(codes, [*lead, head_dim]), self.bits), "affine": affine}

    def decode(self, coded: Coded) -> tf.Tensor:
        levels = tf.cast(unpack(coded["codes"], self.bits), tf.float32)
        scale, zero = tf.split(tf.cast(coded["affine"], tf.float32), 2, axis=-1)
        return self._by_group(levels, scale, axis=-2) + self._spread(zero, levels, axis=-2)

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        tokens, channels = (-1, -2) if columns else (-2, -1)
        affine = tf.cast(coded["affine"], queries.dtype)
        scale, zero = tf.split(affine, 2, axis=channels)
        parts = unpack_parts(coded["codes"], self.bits, channels)
        of_parts = tf.split(scale, len(parts), axis=channels)
        # Of q·zero there is one number a group.
        total = tf.repeat(tf.matmul(queries, zero, transpose_b=not columns), self.tokens, axis=-1)
        asked = tf.split(queries, len(parts), axis=-1)
        for query, codes, by in zip(asked, parts, of_parts, strict=True):
            levels = self._by_group(tf.cast(codes, queries.dtype), by, tokens)
            total += tf.matmul(query, levels, transpose_b=not columns)
        return total

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        return tf.matmul(weights, tf.cast(self.decode(coded), weights.dtype))

    def _by_group(self, levels: tf.Tensor, scale: tf.Tensor, axis: int) -> tf.Tensor:
        """Levels times the scale of their group, whose tokens lie along `axis`."""
        return levels * self._spread(scale, levels, axis)

    def _spread(self, of_groups: tf.Tensor, like: tf.Tensor, axis: int) -> tf.Tensor:
        """A number for each token, from one for each group."""
        repeated = tf.repeat(of_groups, self.tokens, axis=axis)
        return tf.ensure_shape(repeated, like.shape)

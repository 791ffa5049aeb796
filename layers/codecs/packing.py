"""Small unsigned codes side by side in bytes."""

from __future__ import annotations

import tensorflow as tf


def codes_together(bits: int) -> int:
    """Codes of 2, 4, 6 or 8 bits that fill whole bytes together."""
    return {2: 4, 4: 2, 6: 4, 8: 1}[bits]


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` codes of 2, 4, 6 or 8 bits take."""
    return count * bits // 8


def pack(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """uint8 codes ``[..., n]`` below 2**bits as bytes ``[..., n · bits / 8]``.

    Codes that share bytes are far apart: the first half of them lie in the low bits, say.
    Unpacking is then a concatenation, and never an interleaving.

    Args:
        codes: n is a multiple of `codes_together`.
        bits: 2, 4, 6 or 8.
    """
    if bits == 8:
        return codes
    shift, either = tf.bitwise.left_shift, tf.bitwise.bitwise_or
    if bits in (2, 4):
        packed, *more = tf.split(codes, 8 // bits, axis=-1)
        for place, part in enumerate(more, start=1):
            packed = either(packed, shift(part, _byte(bits * place)))
        return packed
    *rest, last = tf.split(codes, 4, axis=-1)
    pieces = (tf.bitwise.right_shift(last, _byte(2 * place)) for place in range(3))
    both = zip(rest, pieces, strict=True)
    return tf.concat([either(code, shift(piece, _byte(6))) for code, piece in both], axis=-1)


def unpack(packed: tf.Tensor, bits: int, axis: int = -1) -> tf.Tensor:
    """Undoes `pack`; the codes lie along `axis`."""
    return tf.concat(unpack_parts(packed, bits, axis), axis=axis)


def unpack_parts(packed: tf.Tensor, bits: int, axis: int = -1) -> list[tf.Tensor]:
    """The codes in equal parts along `axis`, as many as share a byte.

    Choose it over `unpack` inside products: to concatenate the parts takes XLA longer on the
    CPU than the products do.
    """
    if bits == 8:
        return [packed]
    shift, mask = tf.bitwise.right_shift, tf.bitwise.bitwise_and
    if bits in (2, 4):
        *low, high = (shift(packed, _byte(first)) for first in range(0, 8, bits))
        return [*(mask(part, _byte(2**bits - 1)) for part in low), high]
    high = tf.split(shift(packed, _byte(6)), 3, axis=axis)
    last = tf.add_n(
        [tf.bitwise.left_shift(part, _byte(2 * place)) for place, part in enumerate(high)]
    )
    return [*tf.split(mask(packed, _byte(63)), 3, axis=axis), last]


def _byte(number: int) -> tf.Tensor:
    return tf.constant(number, tf.uint8)

"""Small unsigned codes side by side in bytes."""

from __future__ import annotations

import functools

import tensorflow as tf


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` codes of 1 to 8 bits take."""
    return count * bits // 8


def pack(codes: tf.Tensor, bits: int) -> tf.Tensor:
    """uint8 codes ``[..., n]`` below 2**bits as bytes ``[..., n · bits / 8]``.

    Codes that share bytes are far apart: the first half of them lie in the low bits, say.
    Unpacking is then a concatenation, and never an interleaving.

    Args:
        codes: n is a multiple of `codes_together(bits)`.
        bits: 1 to 8.
    """
    if bits == 8:
        return codes
    shift, either = tf.bitwise.left_shift, tf.bitwise.bitwise_or
    if bits in (1, 2, 4):
        parts = tf.split(codes, 8 // bits, axis=-1)
        moved = (shift(part, _byte(bits * place)) for place, part in enumerate(parts))
        return functools.reduce(either, moved)
    if bits != 6:
        top, low = _planes(bits)
        above = tf.bitwise.right_shift(codes, _byte(low))
        below = tf.bitwise.bitwise_and(codes, _byte(2**low - 1))
        return tf.concat([pack(above, top), pack(below, low)], axis=-1)
    *rest, last = tf.split(codes, 4, axis=-1)
    pieces = (tf.bitwise.right_shift(last, _byte(2 * place)) for place in range(3))
    both = zip(rest, pieces, strict=True)
    return tf.concat([either(code, shift(piece, _byte(6))) for code, piece in both], axis=-1)


def unpack(packed: tf.Tensor, bits: int, axis: int = -1) -> tf.Tensor:
    """Undoes `pack`; the codes lie along `axis`."""
    return tf.concat(unpack_parts(packed, bits, axis), axis=axis)


def unpack_parts(packed: tf.Tensor, bits: int, axis: int = -1) -> list[tf.Tensor]:
    """The codes in equal parts along `axis`, as many as share a byte; in one, where the bits of
    a code lie in several bytes.

    Choose it over `unpack` inside products: to concatenate the parts takes XLA longer on the
    CPU than the products do.
    """
    if bits == 8:
        return [packed]
    shift, mask = tf.bitwise.right_shift, tf.bitwise.bitwise_and
    if bits in (1, 2, 4):
        moved = (shift(packed, _byte(bits * place)) for place in range(8 // bits))
        return [mask(part, _byte(2**bits - 1)) for part in moved]
    if bits != 6:
        top, low = _planes(bits)
        size = packed.shape[axis] // bits
        above, below = tf.split(packed, [size * top, size * low], axis=axis)
        above = tf.bitwise.left_shift(unpack(above, top, axis), _byte(low))
        return [tf.bitwise.bitwise_or(above, unpack(below, low, axis))]
    high = tf.split(shift(packed, _byte(6)), 3, axis=axis)
    last = tf.add_n(
        [tf.bitwise.left_shift(part, _byte(2 * place)) for place, part in enumerate(high)]
    )
    return [*tf.split(mask(packed, _byte(63)), 3, axis=axis), last]


def codes_together(bits: int) -> int:
    """Codes of 1 to 8 bits of which a whole multiple can be packed."""
    return {4: 2, 6: 4, 8: 1}.get(bits, 4 if bits == 2 else 8)


def _planes(bits: int) -> tuple[int, int]:
    """Upper and lower bits of codes of 3, 5 or 7 bits, which lie in bytes of their own."""
    top = 2 if bits == 3 else 4
    return top, bits - top


def _byte(number: int) -> tf.Tensor:
    return tf.constant(number, tf.uint8)

"""Codecs by name. A new one is one file and one line here."""

from __future__ import annotations

from tfkv.layers.codecs.codec import CacheCodec, Codec, Coded, Dots, PartSpec
from tfkv.layers.codecs.float4 import Float4Codec
from tfkv.layers.codecs.floating import FloatCodec
from tfkv.layers.codecs.int8 import Int8Codec
from tfkv.layers.codecs.int8_symmetric import Int8SymmetricCodec
from tfkv.layers.codecs.integer_blocks import IntegerBlocks


def _rotated(key_bits: int) -> CacheCodec:
    """Rotated integers, values of 4 bits."""
    keys = IntegerBlocks(key_bits, block=64 if key_bits == 8 else 32, rotate=True)
    return CacheCodec(f"k{key_bits}v4", keys, IntegerBlocks(4, rotate=True))


def _same(name: str, codec: Codec) -> CacheCodec:
    """Keys and values alike."""
    return CacheCodec(name, codec, codec)


CODECS: dict[str, CacheCodec] = {
    codec.name: codec
    for codec in (
        *(_same(name, FloatCodec(name)) for name in ("float32", "bfloat16", "float16")),
        _same("int8", Int8Codec()),
        _same("int8_symmetric", Int8SymmetricCodec()),
        _same("int4", IntegerBlocks(4)),
        *(_rotated(bits) for bits in (8, 6, 4)),
        *(_same(name, Float4Codec(name)) for name in ("nvfp4", "mxfp4")),
    )
}

__all__ = [
    "CODECS",
    "CacheCodec",
    "Codec",
    "Coded",
    "Dots",
    "Float4Codec",
    "FloatCodec",
    "Int8Codec",
    "Int8SymmetricCodec",
    "IntegerBlocks",
    "PartSpec",
]

"""Codecs by name. A new one is one file and one line here."""

from __future__ import annotations

from tfkv.layers.codecs.block_gtq import BlockGTQ
from tfkv.layers.codecs.calibrated_codec import CalibratedCodec, CodecTables
from tfkv.layers.codecs.channel_groups import ChannelGroups
from tfkv.layers.codecs.codec import CacheCodec, Codec, Coded, Dots, PartSpec
from tfkv.layers.codecs.float4 import Float4Codec
from tfkv.layers.codecs.floating import FloatCodec
from tfkv.layers.codecs.int8 import Int8Codec
from tfkv.layers.codecs.int8_symmetric import Int8SymmetricCodec
from tfkv.layers.codecs.integer_blocks import IntegerBlocks
from tfkv.layers.codecs.kivi import Kivi
from tfkv.layers.codecs.low_rank import LowRank
from tfkv.layers.codecs.table import Table

#: Exact tokens of codecs of few bits.
_RECENT, _SINKS = 128, 4


def _rotated(key_bits: int) -> CacheCodec:
    """Rotated integers, values of 4 bits."""
    keys = IntegerBlocks(key_bits, block=64 if key_bits == 8 else 32, rotate=True)
    return CacheCodec(f"k{key_bits}v4", keys, IntegerBlocks(4, rotate=True), _RECENT, _SINKS)


def _same(name: str, codec: Codec) -> CacheCodec:
    """Keys and values alike."""
    return CacheCodec(name, codec, codec)


def _few_bits(name: str, codec: Codec) -> CacheCodec:
    """Keys and values alike, so coarse that the newest tokens have to be exact."""
    return CacheCodec(name, codec, codec, _RECENT, _SINKS)


CODECS: dict[str, CacheCodec] = {
    codec.name: codec
    for codec in (
        *(_same(name, FloatCodec(name)) for name in ("float32", "bfloat16", "float16")),
        _same("int8", Int8Codec()),
        _same("int8_symmetric", Int8SymmetricCodec()),
        _few_bits("int4", IntegerBlocks(4)),
        *(Kivi(f"kivi{bits}", recent=_RECENT, sinks=_SINKS) for bits in (4, 2)),
        *(_rotated(bits) for bits in (8, 6, 4)),
        *(_few_bits(name, Float4Codec(name)) for name in ("nvfp4", "mxfp4")),
        BlockGTQ(),
        LowRank(),
    )
}

__all__ = [
    "CODECS",
    "BlockGTQ",
    "CacheCodec",
    "CalibratedCodec",
    "ChannelGroups",
    "Codec",
    "CodecTables",
    "Coded",
    "Dots",
    "Float4Codec",
    "FloatCodec",
    "Int8Codec",
    "Int8SymmetricCodec",
    "IntegerBlocks",
    "Kivi",
    "LowRank",
    "PartSpec",
    "Table",
]

"""Codecs by name. A new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from tfkv.layers.codecs.codec import Codec, Coded, PartSpec
from tfkv.layers.codecs.floating import FloatCodec
from tfkv.layers.codecs.int8 import Int8Codec

CODECS: dict[str, Callable[[], Codec]] = {
    "float32": lambda: FloatCodec("float32"),
    "bfloat16": lambda: FloatCodec("bfloat16"),
    "float16": lambda: FloatCodec("float16"),
    "int8": Int8Codec,
}

__all__ = ["CODECS", "Codec", "Coded", "FloatCodec", "Int8Codec", "PartSpec"]

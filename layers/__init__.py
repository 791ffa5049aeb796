"""The CachedMultiHeadAttention family: layers, cache policies, codecs and masks.

Names are imported on first use, so that reading one module does not load all.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "CacheSpec": "cache_spec",
    "CacheView": "cache_view",
    "CachedCrossAttention": "cached_cross_attention",
    "CachedMultiHeadAttention": "cached_multi_head_attention",
    "DecoderBlock": "decoder_block",
    "DenseStore": "dense_store",
    "EncodedStore": "encoded_store",
    "EntryLayout": "entry_layout",
    "EvictingStore": "evicting_store",
    "Experts": "experts",
    "LayerNorm": "layer_norm",
    "RMSNorm": "rms_norm",
    "layer_caches": "per_layer",
}

__all__ = [
    "CacheSpec",
    "CacheView",
    "CachedCrossAttention",
    "CachedMultiHeadAttention",
    "DecoderBlock",
    "DenseStore",
    "EncodedStore",
    "EntryLayout",
    "EvictingStore",
    "Experts",
    "LayerNorm",
    "RMSNorm",
    "layer_caches",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

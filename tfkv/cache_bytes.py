"""What a session takes, without a model that holds it."""

from __future__ import annotations

import dataclasses

from tfkv.config import DecoderConfig
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.per_layer import CalibrationTables, layer_caches
from tfkv.layers.policies import Dense
from tfkv.layers.stores import make_store

__all__ = ["session_bytes"]


def session_bytes(
    config: DecoderConfig,
    cache: CacheSpec | str,
    tokens: int,
    calibration: CalibrationTables | None = None,
) -> int:
    """Bytes that one session fills in contiguous tensors: a dense cache of its codec, or what the
    policy keeps where that is less.

    Args:
        config: Architecture.
        cache: Policy and codec.
        tokens: What the session has read.
        calibration: For a cache that needs one.

    Raises:
        ConfigError: The cache cannot be read, or needs a calibration.
    """
    layers, heads = config.num_layers, config.num_key_value_heads
    total = 0
    for spec in layer_caches(CacheSpec.parse(cache), layers, heads, (), calibration):
        choices = (spec, dataclasses.replace(spec, policy=Dense()))
        stores = (
            make_store(one, heads, config.head_dim, tokens, 0, config.query_group_size)
            for one in choices
        )
        total += min(store.bytes_per_session() for store in stores)
    return total

"""The store that a cache needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfkv.errors import ConfigError
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.dense_store import DenseStore
from tfkv.layers.evicting_store import EvictingStore
from tfkv.layers.policies import EvictingPolicy
from tfkv.layers.ragged_store import RaggedStore
from tfkv.layers.selecting_store import SelectingStore

Store = DenseStore | EvictingStore | RaggedStore | SelectingStore


def make_store(
    cache: CacheSpec | str | Mapping[str, Any],
    num_key_value_heads: int,
    head_dim: int,
    capacity: int,
    slack: int,
    group: int,
) -> Store:
    """The store of a layer; the arguments are those of `EvictingStore`.

    Raises:
        ConfigError: A value is out of range, or the budgets of heads are to come from a
            calibration that was not given.
    """
    cache = CacheSpec.parse(cache)
    policy = cache.policy
    if policy.selects:
        return SelectingStore(cache, num_key_value_heads, head_dim, capacity, slack)
    if not isinstance(policy, EvictingPolicy):
        return DenseStore(cache, num_key_value_heads, head_dim, capacity, slack)
    if policy.budgets:
        return RaggedStore(cache, num_key_value_heads, head_dim, capacity, slack, group)
    if policy.caps:
        raise ConfigError(
            f"`caps` names a table of a calibration, which only a whole model has. Received: "
            f"cache={str(cache)!r}. Give the model `calibration`, or this layer `budgets`."
        )
    return EvictingStore(cache, num_key_value_heads, head_dim, capacity, slack, group)

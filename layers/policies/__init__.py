"""Policies by name. A new one is one file and one line here."""

from __future__ import annotations

from tfkv.layers.policies.cache_policy import CachePolicy
from tfkv.layers.policies.dense import Dense
from tfkv.layers.policies.sliding_window import SlidingWindow
from tfkv.layers.policies.streaming_llm import StreamingLLM

POLICIES: dict[str, type[CachePolicy]] = {
    policy.name: policy
    for policy in (
        Dense,
        SlidingWindow,
        StreamingLLM,
    )
}

__all__ = ["POLICIES", "CachePolicy", "Dense", "SlidingWindow", "StreamingLLM"]

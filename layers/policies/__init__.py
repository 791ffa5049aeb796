"""Policies by name. A new one is one file and one line here."""

from __future__ import annotations

from tfkv.layers.policies.ada_kv import AdaKV
from tfkv.layers.policies.baselines import (
    RandomEviction,
    RandomPages,
    RecentPages,
    RecentTokens,
)
from tfkv.layers.policies.cache_policy import CachePolicy
from tfkv.layers.policies.critical_kv import CriticalKV
from tfkv.layers.policies.defensive_kv import DefensiveKV, LayerDefensiveKV
from tfkv.layers.policies.dense import Dense
from tfkv.layers.policies.duo_attention import DuoAttention
from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen
from tfkv.layers.policies.expected_attention import ExpectedAttention
from tfkv.layers.policies.h2o import H2O
from tfkv.layers.policies.key_diff import KeyDiff
from tfkv.layers.policies.knorm import Knorm
from tfkv.layers.policies.kvzip import KVzip
from tfkv.layers.policies.pyramid_kv import PyramidKV
from tfkv.layers.policies.quest import Quest
from tfkv.layers.policies.sliding_window import SlidingWindow
from tfkv.layers.policies.snapkv import SnapKV
from tfkv.layers.policies.streaming_llm import StreamingLLM
from tfkv.layers.policies.tova import TOVA

POLICIES: dict[str, type[CachePolicy]] = {
    policy.name: policy
    for policy in (
        Dense,
        SlidingWindow,
        StreamingLLM,
        Quest,
        H2O,
        TOVA,
        SnapKV,
        PyramidKV,
        AdaKV,
        CriticalKV,
        DefensiveKV,
        LayerDefensiveKV,
        ExpectedAttention,
        KeyDiff,
        Knorm,
        KVzip,
        DuoAttention,
        RandomEviction,
        RecentTokens,
        RandomPages,
        RecentPages,
    )
}

__all__ = [
    "POLICIES",
    "TOVA",
    "AdaKV",
    "CachePolicy",
    "CriticalKV",
    "DefensiveKV",
    "Dense",
    "DuoAttention",
    "EvictingPolicy",
    "ExpectedAttention",
    "H2O",
    "KVzip",
    "KeyDiff",
    "Knorm",
    "LayerDefensiveKV",
    "PyramidKV",
    "Quest",
    "RandomEviction",
    "RandomPages",
    "RecentPages",
    "RecentTokens",
    "Seen",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
]

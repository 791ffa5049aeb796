"""Every policy with every codec."""

from __future__ import annotations

import pathlib

import cache_conformance
import pytest
from cache_conformance import CASES, TOLERANCE, run_cache_policy_test

from tfkv.layers.codecs import CODECS
from tfkv.layers.policies import POLICIES

#: One codec of each kind: as it is, by the token, with exact tokens beside it, in groups.
KINDS = ("float32", "int8", "k8v4", "kivi4")


def _matrix() -> list:
    """Every policy with every codec; `make test` leaves out what its neighbours show: the
    windows without sinks or turned sinks, and selected pages, have one codec of each kind."""
    brief = (
        "sliding_window(window=5)",
        "streaming_llm(window=5,sinks=2)",
        "quest(pages=2,page_size=4,recent=1)",
    )
    return [
        pytest.param(
            case,
            codec,
            id=f"{case.cache}-{codec}",
            marks=[pytest.mark.slow]
            if case.cache in brief and codec.partition("(")[0] not in KINDS
            else [],
        )
        for case in CASES
        for codec in TOLERANCE
    ]


@pytest.mark.parametrize(("case", "codec"), _matrix())
def test_cache_policy(case: cache_conformance.CacheCase, codec: str, tmp_path: pathlib.Path):
    run_cache_policy_test(case, codec, tmp_path)


def test_the_table_names_every_policy_and_codec():
    named = {case.cache.partition("(")[0] for case in CASES}
    evicting = {name for name, policy in POLICIES.items() if policy.evicts}  # test_eviction.py
    baselines = {"random_pages", "recent_pages"}  # policies/test_quest.py
    assert named | evicting | baselines == set(POLICIES)
    assert {codec.partition("(")[0] for codec in TOLERANCE} == set(CODECS)

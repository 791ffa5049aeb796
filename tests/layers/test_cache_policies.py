"""Every policy with every codec."""

from __future__ import annotations

import pathlib

import cache_conformance
import pytest
from cache_conformance import CASES, TOLERANCE, run_cache_policy_test

from tfkv.layers.codecs import CODECS
from tfkv.layers.policies import POLICIES


@pytest.mark.parametrize("codec", TOLERANCE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cache)
def test_cache_policy(case: cache_conformance.CacheCase, codec: str, tmp_path: pathlib.Path):
    run_cache_policy_test(case, codec, tmp_path)


def test_the_table_names_every_policy_and_codec():
    named = {case.cache.partition("(")[0] for case in CASES}
    evicting = {name for name, policy in POLICIES.items() if policy.evicts}  # test_eviction.py
    assert named | evicting == set(POLICIES)
    assert {codec.partition("(")[0] for codec in TOLERANCE} == set(CODECS)

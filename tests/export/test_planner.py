"""The memory plan against engines that are really built."""

from __future__ import annotations

import pytest
import tiny_model

from tfkv.config import EngineConfig
from tfkv.errors import ConfigError
from tfkv.export import Engine, plan_memory
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs import CODECS

MB = 10**6


@pytest.mark.parametrize("codec", [{"low_rank": "low_rank(rank=6)"}.get(n, n) for n in CODECS])
@pytest.mark.parametrize("policy", ["dense", "sliding_window(window=40,sinks=3)"])
def test_pages_are_those_that_an_engine_allocates(policy: str, codec: str):
    size = max(16, CacheSpec.parse(codec).codec.tokens)
    engine = EngineConfig(cache=f"{policy}+{codec}", slots=2, capacity=96, page_size=size)
    # A window's session is full only beyond its window.
    context = 96 if policy == "dense" else tiny_model.CONFIG.context_length
    found = plan_memory(tiny_model.CONFIG, engine, context, memory=10**9)
    weights, calibration = tiny_model.make_weights(), tiny_model.calibration()
    built = Engine(tiny_model.CONFIG, weights, engine, calibration=calibration)
    assert found.page_bytes == built.pools.page_bytes
    assert found.pool_bytes(2) == built.pools.nbytes
    assert found.token_bytes == built.bytes_per_token
    history = built.history
    held = sum(v.nbytes for v in (history.tokens, history.kinds, history.logprobs))
    assert found.history_bytes * 3 == held
    assert found.beside_bytes == built.beside_bytes
    weights = sum(variable.shape.num_elements() * 4 for variable in built.weights.variables)
    assert found.weight_bytes == weights


def test_the_sessions_that_fit_are_the_most():
    engine = EngineConfig(page_size=16)
    found = plan_memory(tiny_model.CONFIG, engine, context=96, memory=900 * MB)
    for sessions, versions in ((found.sessions, 1), (found.sessions_with_swap, 2)):
        assert found.peak_bytes(sessions, versions) <= 900 * MB
        assert found.peak_bytes(sessions + 1, versions) > 900 * MB
    assert 0 < found.sessions_with_swap < found.sessions / 2 + 1


def test_a_budget_below_the_program_fits_nothing():
    found = plan_memory(tiny_model.CONFIG, EngineConfig(page_size=16), context=96, memory=MB)
    assert found.sessions == found.sessions_with_swap == 0


def test_a_window_needs_no_more_pages_than_it_shows():
    window = EngineConfig(cache="sliding_window(window=16)", page_size=16)
    longest = tiny_model.CONFIG.context_length
    found = plan_memory(tiny_model.CONFIG, window, longest, MB)
    dense = plan_memory(tiny_model.CONFIG, EngineConfig(page_size=16), longest, MB)
    assert found.session_pages < dense.session_pages


@pytest.mark.parametrize("caps", ["", "kvzip"])
def test_a_policy_that_evicts_takes_its_budget_and_the_pages_since(caps: str):
    cache = f"key_diff(budget=64,whole_prompt=True,caps={caps!r})+int8"
    engine = EngineConfig(cache=cache, page_size=16)
    short, long = (plan_memory(tiny_model.CONFIG, engine, n, MB) for n in (300, 500))
    # Two layers and KV heads: 64 entries of keys and values of 8 + 4 bytes, and a position.
    assert short.beside_bytes == long.beside_bytes == 4 * 64 * (2 * 12 + 4)
    # 64 tokens since the last eviction, which may lie on five pages.
    assert short.session_pages == long.session_pages == 5
    assert plan_memory(tiny_model.CONFIG, engine, 100, MB).session_pages == 7


def test_what_entries_got_takes_four_bytes_each():
    engine = EngineConfig(cache="h2o(budget=64,recent=8)+int8", page_size=16)
    short, long = (plan_memory(tiny_model.CONFIG, engine, n, MB) for n in (300, 500))
    # Kept entries as above, and the 13 pages of a slot: budget, interval and what one call adds.
    assert short.beside_bytes == long.beside_bytes == 4 * (64 * (2 * 12 + 4 + 4) + 13 * 16 * 4)


def test_a_session_without_an_end_takes_what_its_window_does():
    engine = EngineConfig(cache="streaming_llm(window=61,sinks=3)", page_size=16)
    short, long = (plan_memory(tiny_model.CONFIG, engine, n, MB) for n in (400, 10**6))
    assert short.session_bytes == long.session_bytes


@pytest.mark.parametrize(("context", "memory"), [(0, MB), (10**6, MB), (96, 0)])
def test_what_cannot_be_planned_is_refused(context: int, memory: int):
    with pytest.raises(ConfigError, match="must be"):
        plan_memory(tiny_model.CONFIG, EngineConfig(page_size=16), context, memory)

"""Where tokens lie on a session's pages: every small case against a simulated ring."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tiny_model
from tiny_model import everything, sliding_pages, window

from tfkv.config import EngineConfig
from tfkv.errors import ConfigError
from tfkv.export.geometry import CacheGeometry
from tfkv.export.layer_groups import LayerGroups

CASES = {
    "dense": ("dense", 96, 16, 64),
    "dense, two pages": ("dense", 16, 8, 4),
    "dense, pages of one": ("dense", 5, 1, 1),
    "dense, ragged capacity": ("dense", 30, 8, 8),
    "window": ("sliding_window(window=20, sinks=3)", 96, 16, 64),
    "window of one": ("sliding_window(window=1)", 96, 4, 4),
    "no sinks": ("sliding_window(window=9)", 96, 4, 3),
    "sinks of whole pages": ("sliding_window(window=5, sinks=8)", 96, 4, 6),
    "pages wider than a piece": ("sliding_window(window=131)", 512, 128, 64),
    "page as wide as the window": ("sliding_window(window=8, sinks=1)", 96, 8, 8),
}


def geometry_of(cache: str, capacity: int, page: int, piece: int) -> CacheGeometry:
    engine = EngineConfig(cache=cache, capacity=capacity, page_size=page, decode_chunk=1)
    return LayerGroups.of(tiny_model.CONFIG, engine, piece).first


def sees_of(geometry: CacheGeometry):
    policy = geometry.cache.policy
    if policy.bounded:
        return window(policy.window, policy.sinks)
    return sliding_pages(geometry.layout.entries, geometry.page_size)


def entry_of(geometry: CacheGeometry, position: int) -> int:
    column = int(geometry.column_of(tf.constant(position // geometry.page_size)))
    return column * geometry.page_size + position % geometry.page_size


@pytest.fixture(params=CASES)
def geometry(request) -> CacheGeometry:
    return geometry_of(*CASES[request.param])


@pytest.fixture
def upto(geometry) -> int:
    """Positions that are tried: three times round the ring."""
    return min(3 * geometry.layout.entries, 400)


def test_mask_is_the_visibility_rule(geometry, upto):
    positions = tf.range(upto)[tf.newaxis]
    got = geometry.mask(positions, positions)[0].numpy()
    sees = sees_of(geometry)
    expected = [[sees(q, k) for k in range(upto)] for q in range(upto)]
    np.testing.assert_array_equal(got, expected)


def test_session_that_does_not_slide_sees_everything():
    geometry = geometry_of(*CASES["dense"])
    positions = tf.range(96)[tf.newaxis]
    got = geometry.mask(positions, positions)[0].numpy()
    expected = [[everything(q, k) for k in range(96)] for q in range(96)]
    np.testing.assert_array_equal(got, expected)


def test_whatever_a_chunk_sees_is_still_there_when_it_is_read(geometry, upto):
    """litgpt #2182: a chunk is read before it overwrites, and the ring has room for it."""
    sees = sees_of(geometry)
    entries = [entry_of(geometry, p) for p in range(upto)]
    for start in range(upto):
        held = {entries[p]: p for p in range(start)}
        for key in range(start):
            if sees(start, key):
                assert held[entries[key]] == key, (start, key)


def test_pages_read_hold_all_that_is_seen_and_fit_the_list(geometry, upto):
    spans = geometry.page_span(tf.range(upto)).numpy()
    sees, size = sees_of(geometry), geometry.page_size
    for start, (sinks, first, end) in enumerate(spans):
        pages = [*range(sinks), *range(first, end)]
        assert len(pages) == len(set(pages))
        assert len(pages) <= geometry.columns
        seen = {key // size for key in range(start) if sees(start, key)}
        assert seen <= set(pages)


def test_reversible_means_that_all_a_query_sees_is_still_there(geometry):
    """Never true where something is lost; false only where something is (or for whole pages)."""
    sees = sees_of(geometry)
    upto = min(2 * geometry.layout.entries + 2 * geometry.page_size, 300)
    entries = [entry_of(geometry, p) for p in range(upto)]
    positions = tf.range(upto)
    for reached in range(1, upto, 1 if upto < 80 else 7):
        held = {entries[p]: p for p in range(reached)}
        claims = geometry.reversible(tf.fill([upto], reached), 0, positions).numpy()
        earliest = int(geometry.earliest_reversible(tf.constant(reached), 0))
        for position in range(reached):
            whole = all(held[entries[k]] == k for k in range(position) if sees(position, k))
            if claims[position]:
                assert whole, (reached, position)
            assert claims[position] == (position >= earliest), (reached, position, earliest)
        assert claims[reached - 1], "the last token can always be computed again"


def test_rollback_is_always_possible(geometry):
    rollback = geometry.rollback
    for reached in range(1, min(3 * geometry.layout.entries, 400), 3):
        back = reached if rollback < 0 else min(rollback, reached)
        if rollback < 0 and reached > geometry.layout.entries:
            continue  # a session that slides keeps no promise
        position = max(reached - back, 0)
        assert bool(geometry.reversible(tf.constant(reached), 0, tf.constant(position)))


def test_limit_is_the_capacity_unless_a_session_slides():
    dense = geometry_of("dense", 96, 16, 64)
    assert list(dense.limit(tf.constant([0, 1, 2]))) == [96, 96, 512]
    ring = geometry_of("sliding_window(window=20)", 96, 16, 64)
    assert list(ring.limit(tf.constant([0, 1, 2]))) == [512, 512, 512]


def test_capacity_beyond_the_trained_context_is_cut_to_it():
    dense = geometry_of("dense", 10_000, 16, 64)
    assert list(dense.limit(tf.constant([0, 2]))) == [512, 512]


def test_capacity_below_two_pages_is_refused():
    with pytest.raises(ConfigError, match="at least two pages of 16 tokens.*capacity=16"):
        geometry_of("dense", 16, 16, 64)

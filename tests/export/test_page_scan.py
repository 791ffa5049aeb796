"""Which pages a batch reads: every row all that it sees, and what half of them share once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from test_geometry import geometry_of

from tfkv.export import page_scan

STEP = 4
CACHES = ("dense", "sliding_window(window=11, sinks=5)")


def _related_tables(random: np.random.Generator, rows: int, columns: int):
    """Rows of a block table that share pages from the first one on, like sessions that were
    forked from each other; every other page is a row's own."""
    numbers = iter(random.permutation(np.arange(1, rows * columns + 1)))
    table: list[list[int]] = []
    for row in range(rows):
        common = int(random.integers(0, columns + 1)) if row else 0
        parent = table[int(random.integers(0, row))] if row else []
        own = [int(next(numbers)) for _ in range(columns - common)]
        table.append([*parent[:common], *own])
    return np.array(table, np.int32)


def _listed(pages: page_scan.PageList):
    count = int(pages.count)
    assert count + STEP <= pages.pages.shape[0]
    assert set(pages.owners.numpy()[count:]) <= {-1}
    return list(zip(*(x.numpy()[:count].tolist() for x in pages[:3]), strict=True))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("seed", range(20))
def test_every_row_reads_what_it_sees_and_what_half_of_them_share_is_read_once(
    cache: str, seed: int
):
    geometry = geometry_of(cache, capacity=48, page=4, piece=4)
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 9))
    table = _related_tables(random, rows, geometry.columns)
    start = random.integers(0, geometry.layout.entries + 1, rows)
    reads = random.random(rows) < 0.8
    scan = page_scan.scan(
        geometry,
        tf.constant(table),
        tf.constant(start, tf.int32),
        tf.zeros([rows], tf.int32),
        tf.constant(reads),
        STEP,
    )
    own, shared = _listed(scan.own), _listed(scan.shared)
    common = scan.common.numpy()
    seen: list[set[tuple[int, int]]] = [set() for _ in range(rows)]
    for page, owner, base in own:
        seen[owner].add((page, base))
    for page, owner, base in shared:
        readers = np.flatnonzero(common[owner] > base // geometry.page_size)
        assert len(readers) >= max(2, rows / 2)
        assert owner == readers[0]
        for row in readers:
            seen[row].add((page, base))
    for row in range(rows):
        span = geometry.page_span(tf.constant([start[row]], tf.int32)).numpy()[0]
        visible = [*range(span[0]), *range(span[1], span[2])] if reads[row] else []
        needed = {(int(table[row, page]), page * geometry.page_size) for page in visible}
        assert needed <= seen[row]
        if cache == "dense" and start[row] < geometry.layout.entries:
            assert needed == seen[row]
    once = [page for page, *_ in shared]
    assert len(once) == len(set(once))
    often = Counter(page for page, *_ in own)
    assert not set(once) & set(often)
    assert all(times < max(2, rows / 2) for times in often.values())


def test_rows_that_went_round_share_nothing():
    """Their first columns hold newer pages, at other positions."""
    geometry = geometry_of("sliding_window(window=11)", capacity=48, page=4, piece=4)
    table = np.tile(np.arange(1, geometry.columns + 1, dtype=np.int32), (2, 1))
    start = tf.constant([geometry.layout.entries + 9, 8])
    scan = page_scan.scan(
        geometry, tf.constant(table), start, tf.zeros_like(start), tf.constant([True, True]), STEP
    )
    assert int(scan.shared.count) == 0
    span = geometry.page_span(start).numpy()
    assert int(scan.own.count) == (span[:, 0] + span[:, 2] - span[:, 1]).sum()

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.errors import CacheError, ConfigError
from tfkv.layers import DenseStore


def _chunk(store: DenseStore, positions: list[list[int]]):
    """Keys and values that spell their position: 1 + p in every channel."""
    positions = tf.constant(positions)
    shape = [positions.shape[0], store.num_key_value_heads, positions.shape[1], store.head_dim]
    numbers = tf.broadcast_to(tf.cast(1 + positions, tf.float32)[:, None, :, None], shape)
    coded = store.cache.codec.keys.encode(numbers)
    return positions, coded, coded


def _held(store: DenseStore, state) -> list[dict[int, float]]:
    """Position → stored number of each row; every head and channel must agree."""
    view = store.view(state)
    rows = []
    for positions, keys in zip(view.positions.numpy(), view.keys["codes"].numpy(), strict=True):
        assert (keys == keys[:1, :, :1]).all()
        numbers = keys[0, :, 0]
        rows.append({int(p): float(numbers[e]) for e, p in enumerate(positions) if p >= 0})
    return rows


def test_rows_advance_apart_and_padding_writes_nothing():
    """mlx-lm #965, omlx #2172: no row's length or padding moves another's entries."""
    store = DenseStore("dense", 2, 4, capacity=6)
    state = store.init(3)
    state = store.write(state, *_chunk(store, [[0, 1, 2], [-1, -1, 0], [-1, -1, -1]]))
    state = store.write(state, *_chunk(store, [[-1], [1], [0]]))
    state = store.write(state, *_chunk(store, [[3, 4, 5], [2, -1, 3], [-1, 1, -1]]))
    assert state["filled"].numpy().tolist() == [6, 4, 2]
    assert _held(store, state) == [{p: p + 1.0 for p in range(n)} for n in (6, 4, 2)]


@pytest.mark.parametrize("width", [1, 3, 4, 5, 9, 11])
def test_a_chunk_longer_than_the_ring_leaves_its_newest_tokens(width: int):
    """litgpt #2182. No entry is written twice: scatter promises no order."""
    store = DenseStore("sliding_window(window=4,sinks=1)", 1, 4, capacity=99)
    state = store.init(1)
    for first in range(0, 33, width):
        state = store.write(state, *_chunk(store, [list(range(first, first + width))]))
        end = first + width
        kept = {p for p in range(end) if p < 1 or p >= end - 4}
        assert _held(store, state) == [{p: p + 1.0 for p in kept}]


def test_a_view_hides_what_a_chunk_takes_back():
    store = DenseStore("dense", 1, 4, capacity=8)
    state = store.write(store.init(2), *_chunk(store, [[0, 1, 2, 3], [0, 1, -1, -1]]))
    view = store.view(state, before=tf.constant([2, tf.int32.max]))
    assert view.positions.numpy()[:, :4].tolist() == [[0, 1, -1, -1], [0, 1, -1, -1]]


@pytest.mark.parametrize("positions", [[[4]], [[2, 4]], [[3, 2]], [[2, 2]], [[7, 8]]], ids=str)
@pytest.mark.parametrize("xla", [None, False, True])
def test_what_does_not_follow_is_refused(positions: list[list[int]], xla: bool | None):
    """openxla #49118, jax #3649: an index out of range goes nowhere; it is never clamped."""
    store = DenseStore("dense", 1, 4, capacity=8)
    state = store.write(store.init(1), *_chunk(store, [[0, 1]]))
    if xla is None:
        with pytest.raises(CacheError, match=r"row 0 holds 2 tokens, so its next are 2, 3, …"):
            store.write(state, *_chunk(store, positions))
        return
    write = tf.function(store.write, jit_compile=xla)
    after = write(state, *_chunk(store, positions))
    assert after.pop("dropped").numpy().tolist() == [len(positions[0])]
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, state[name])


def test_a_row_whose_attention_is_not_a_number_is_refused():
    store = DenseStore("dense", 1, 4, capacity=8)
    after = tf.constant([[1.0], [np.nan]])
    chunk = _chunk(store, [[0], [0]])
    with pytest.raises(CacheError, match="Attention of row 1 is not a number"):
        store.write(store.init(2), *chunk, after=after)
    state = tf.function(store.write)(store.init(2), *chunk, after=after)
    assert state["filled"].numpy().tolist() == [1, 0]
    assert state["dropped"].numpy().tolist() == [0, 1]


def test_bytes_of_a_session_are_exact():
    store = DenseStore("sliding_window(window=10,sinks=2)+int8", 3, 64, capacity=99, slack=4)
    assert store.bytes_per_session() == 2 * 16 * 3 * (64 + 4) + 3 * 4
    assert store.capacity == -1
    assert store.rollback == 4


@pytest.mark.parametrize("name", ["num_key_value_heads", "head_dim", "capacity", "slack"])
def test_arguments_out_of_range(name: str):
    arguments = {"num_key_value_heads": 1, "head_dim": 4, "capacity": 8, "slack": 0}
    with pytest.raises(ConfigError, match=f"`{name}` must be an integer of at least .*=-1"):
        DenseStore("dense", **{**arguments, name: -1})


def test_scatter_is_never_given_an_entry_twice():
    store = DenseStore("sliding_window(window=4,sinks=1)", 1, 4, capacity=99)
    state = store.write(store.init(1), *_chunk(store, [[0, 1, 2]]))
    plan = store._plan(state, tf.range(3, 16)[tf.newaxis], tf.constant([True]))
    written = plan.entries.numpy()[plan.entries.numpy() >= 0].tolist()
    assert sorted(written) == [1, 2, 3, 4]


def test_a_view_shows_no_entry_that_was_overwritten_and_taken_back():
    store = DenseStore("sliding_window(window=4)", 1, 4, capacity=99, slack=3)
    state = store.write(store.init(1), *_chunk(store, [list(range(12))]))
    state = store.write(state, *_chunk(store, [[9]]))
    assert _held(store, state) == [{p: p + 1.0 for p in range(5, 10)}]

from __future__ import annotations

import pytest
import tensorflow as tf

from tfkv.layers.entry_layout import EntryLayout


@pytest.mark.parametrize("sinks", [0, 1, 3])
@pytest.mark.parametrize("ring", [1, 2, 5])
def test_equals_a_simulated_ring(ring: int, sinks: int):
    """Every write is played on a list, token by token, three times round the ring."""
    layout = EntryLayout(sinks + ring, sinks)
    entries = [-1] * layout.entries
    for position in range(sinks + 3 * ring + 1):
        held = layout.positions_of(tf.constant([position]))[0].numpy().tolist()
        assert held == entries, f"after {position} tokens"
        free = position if position < sinks else sinks + (position - sinks) % ring
        assert layout.entry_of(tf.constant(position)) == free
        entries[free] = position


def test_padding_has_no_entry():
    assert EntryLayout(8, 2).entry_of(tf.constant([-1])).numpy().tolist() == [-1]


def test_asks_for_some_entries_of_some_rows():
    layout = EntryLayout(6, 2)
    filled = tf.constant([[3], [9]])
    entries = tf.constant([[0, 2, 5], [1, 2, 4]])
    whole = layout.positions_of(tf.constant([3, 9]))
    expected = tf.gather(whole, entries, batch_dims=1)
    tf.debugging.assert_equal(layout.positions_of(filled, entries), expected)

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from cache_conformance import CacheCase, make_input, make_layer, reference_output, run

from tfkv.layers.policies import SlidingWindow

WINDOW = 6


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("prefill", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 19])
def test_prefill_around_the_window_equals_a_masked_full_run(prefill: int, sinks: int):
    """transformers #37574, #39408, mlx-lm #390: off by one. litgpt #2182: a prefill longer than
    the ring. Decode steps follow, so that what the prefill left behind is read."""
    cache = f"sliding_window(window={WINDOW},sinks={sinks})"
    case = CacheCase(cache, WINDOW, sinks, 0, WINDOW + sinks, bounded=True)
    layer = make_layer(case, "float32")
    x = make_input(prefill + 8)
    expected = reference_output(layer, case, "float32", x)
    actual, state = run(layer, x, [prefill] + [1] * 8)
    np.testing.assert_allclose(actual, expected, atol=3e-6)
    assert state["keys/codes"].shape[2] == WINDOW + sinks
    masked, _ = layer(tf.constant(x))
    np.testing.assert_allclose(masked, expected, atol=3e-6)


def test_keeps_the_sinks_and_the_newest_positions():
    """kvpress #16, #31, transformers #35350, #33691: positions stay true, whatever is dropped."""
    case = CacheCase("sliding_window(window=4,sinks=2)", 4, 2, 0, 6, bounded=True)
    layer = make_layer(case, "float32")
    _, state = run(layer, make_input(15), [3, 12])
    positions = layer.store.view(state).positions.numpy()
    assert [sorted(row) for row in positions.tolist()] == [[0, 1, 11, 12, 13, 14]] * 3
    assert state["filled"].numpy().tolist() == [15] * 3


def test_layout_is_cut_to_pages():
    policy = SlidingWindow(window=100, sinks=4)
    layout = policy.layout(capacity=4096, slack=16, page_size=64)
    assert (layout.entries, layout.sinks) == (64 + 128, 64)
    assert policy.rollback(layout) == 28

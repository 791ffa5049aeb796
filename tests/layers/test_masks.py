from __future__ import annotations

import itertools

import pytest
import reference
import tensorflow as tf

from tfkv.layers import masks
from tfkv.layers.policies import Dense, SlidingWindow


@pytest.mark.parametrize(
    ("policy", "window", "sinks"),
    [
        (Dense(), None, 0),
        (SlidingWindow(1), 1, 0),
        (SlidingWindow(4), 4, 0),
        (SlidingWindow(3, 2), 3, 2),
    ],
    ids=str,
)
def test_mask_of_a_policy_by_definition(policy, window, sinks):
    """transformers #37574, #39408, mlx-lm #390: W is the token itself and the W − 1 before it."""
    queries, keys = tf.range(-1, 12), tf.range(-1, 12)
    mask = masks.visible(queries, keys, policy.first_visible(queries), policy.sinks).numpy()
    for (i, query), (j, key) in itertools.product(enumerate(range(-1, 12)), repeat=2):
        expected = query >= 0 <= key and reference.sees(query, key, window, sinks)
        assert mask[i, j] == expected, (query, key)


def test_rows_have_positions_of_their_own():
    mask = masks.visible(tf.constant([[2], [0]]), tf.constant([[0, 1, 2], [0, 1, -1]]))
    assert mask.numpy().tolist() == [[[True, True, True]], [[True, False, False]]]

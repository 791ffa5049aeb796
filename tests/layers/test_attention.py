from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfkv.layers import attention
from tfkv.layers.codecs import FloatCodec

FLOAT = FloatCodec("float32")


def _inputs(keys: int = 12):
    random = np.random.default_rng(2)
    queries = tf.constant(random.normal(size=(2, 3, 4, 8)), tf.float32)
    coded = [
        FLOAT.encode(tf.constant(random.normal(size=(2, 2, keys, 8)), tf.float32)) for _ in "kv"
    ]
    mask = tf.constant(random.random((2, 3, keys)) < 0.6)
    return attention.group_queries(queries, 2), *coded, mask


def _part(coded, first: int, last: int):
    return {name: part[:, :, first:last] for name, part in coded.items()}


def _saw_nothing(queries):
    """The part that saw no key."""
    mass = tf.zeros_like(queries[..., 0])
    return attention.Partial(mass - 1e30, mass, tf.zeros_like(queries))


def test_parts_merge_to_the_whole_in_any_order():
    queries, keys, values, mask = _inputs()
    whole = attention.normalize(attention.attend(queries, keys, values, mask, FLOAT))
    parts = [
        attention.attend(queries, _part(keys, a, b), _part(values, a, b), mask[..., a:b], FLOAT)
        for a, b in ((0, 5), (5, 6), (6, 12))
    ]
    for order in ((0, 1, 2), (2, 0, 1)):
        merged = _saw_nothing(queries)
        for index in order:
            merged = attention.merge(merged, parts[index])
        np.testing.assert_allclose(attention.normalize(merged), whole, atol=1e-6)


def test_weights_are_those_of_the_output():
    queries, keys, values, mask = _inputs()
    part = attention.attend(queries, keys, values, mask, FLOAT)
    weights = attention.attention_weights(FLOAT.scores(queries, keys), mask)
    np.testing.assert_allclose(FLOAT.mix(weights, values), attention.normalize(part), atol=1e-6)


def test_shares_of_parts_are_the_weights_of_the_whole():
    queries, keys, values, mask = _inputs()
    sums = attention.log_sum(attention.attend(queries, keys, values, mask, FLOAT))
    columns = {name: tf.linalg.matrix_transpose(part) for name, part in keys.items()}
    found = [
        attention.shares(
            queries,
            {name: part[..., a:b] for name, part in columns.items()},
            mask[..., a:b],
            FLOAT,
            sums,
        )
        for a, b in ((0, 5), (5, 12))
    ]
    expected = attention.attention_weights(FLOAT.scores(queries, keys), mask)
    np.testing.assert_allclose(tf.concat(found, axis=-1), expected, atol=1e-6)


def test_a_query_that_sees_nothing_answers_zero():
    queries, keys, values, mask = _inputs()
    part = attention.attend(queries, keys, values, tf.zeros_like(mask), FLOAT)
    np.testing.assert_array_equal(attention.normalize(part), 0)


def test_heads_side_by_side_are_the_normalized_output():
    queries, keys, values, mask = _inputs()
    part = attention.attend(queries, keys, values, mask, FLOAT)
    expected = attention.ungroup_output(attention.normalize(part), 4)
    flat = attention.concatenate_heads(part, 4)
    np.testing.assert_allclose(flat, tf.reshape(expected, [2, 3, 32]), atol=1e-7)


def test_gradient_is_finite_beside_huge_hidden_scores():
    """exp of a hidden score overflows; 0 times its slope must not become NaN."""
    queries, keys, values, mask = _inputs()
    hidden = tf.concat([tf.ones([2, 3, 11], tf.bool), tf.zeros([2, 3, 1], tf.bool)], axis=-1)
    hidden &= mask & tf.constant([[[True], [True], [False]]])
    with tf.GradientTape() as tape:
        tape.watch(queries)
        keys = {"codes": tf.concat([keys["codes"][:, :, :11], keys["codes"][:, :, 11:] * 1e4], 2)}
        part = attention.attend(queries, keys, values, hidden, FLOAT)
        loss = tf.reduce_sum(attention.normalize(part) ** 2)
    assert np.isfinite(tape.gradient(loss, queries)).all()


def test_pages_of_several_owners_equal_attention_of_each_row_alone():
    """A page goes to its owner; pages of nobody (−1) count for no row."""
    queries, keys, values, mask = _inputs(keys=4)
    owners = tf.constant([1, 0, 1, -1, 0])
    rows = tf.maximum(owners, 0)
    random = np.random.default_rng(5)
    pages = [{"codes": tf.constant(random.normal(size=(5, 2, 4, 8)), tf.float32)} for _ in "kv"]
    columns = {"codes": tf.linalg.matrix_transpose(pages[0]["codes"])}
    seen = tf.gather(mask, rows)
    so_far = attention.attend(queries, keys, values, mask, FLOAT)
    merged = attention.attend_owned(
        so_far, tf.gather(queries, rows), columns, pages[1], seen, FLOAT, owners
    )
    parts = attention.attend(tf.gather(queries, rows), *pages, seen, FLOAT)
    for row, own in ((0, [1, 4]), (1, [0, 2])):
        expected = attention.Partial(*(field[row : row + 1] for field in so_far))
        for page in own:
            one = attention.Partial(*(field[page : page + 1] for field in parts))
            expected = attention.merge(expected, one)
        one = attention.Partial(*(field[row : row + 1] for field in merged))
        np.testing.assert_allclose(
            attention.normalize(one), attention.normalize(expected), atol=1e-6
        )


def test_rows_without_a_page_stay_as_they_were():
    queries, keys, values, mask = _inputs(keys=4)
    so_far = attention.attend(queries, keys, values, mask, FLOAT)
    columns = {"codes": tf.linalg.matrix_transpose(keys["codes"])}
    nobody = tf.constant([-1, -1])
    same = attention.attend_owned(so_far, queries, columns, values, mask, FLOAT, nobody)
    for one, other in zip(same, so_far, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_page_of_several_rows_equals_attention_of_each_row_alone():
    """One of the pages is row 1's alone, one is nobody's."""
    queries, keys, values, mask = _inputs(keys=4)
    random = np.random.default_rng(6)
    pages = [{"codes": tf.constant(random.normal(size=(3, 2, 4, 8)), tf.float32)} for _ in "kv"]
    columns = {"codes": tf.linalg.matrix_transpose(pages[0]["codes"])}
    seen = random.random((3, 2, 3, 4)) < 0.7
    seen[1, 0], seen[2] = False, False
    so_far = attention.attend(queries, keys, values, mask, FLOAT)
    together = attention.attend_shared(so_far, queries, columns, pages[1], tf.constant(seen), FLOAT)
    for row in range(2):
        one = slice(row, row + 1)
        expected = attention.Partial(*(field[one] for field in so_far))
        for page in range(3):
            coded = ({"codes": side["codes"][page : page + 1]} for side in pages)
            visible = tf.constant(seen[page, one])
            part = attention.attend(queries[one], *coded, visible, FLOAT)
            expected = attention.merge(expected, part)
        actual = attention.Partial(*(field[one] for field in together))
        np.testing.assert_allclose(
            attention.normalize(actual), attention.normalize(expected), atol=1e-6
        )

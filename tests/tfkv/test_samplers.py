"""Samplers against a NumPy reference that sorts."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv import samplers

SIZES = [5, 128, 1000, 4097]


def make_params(batch, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=0):
    def row(value, dtype):
        return tf.constant(np.broadcast_to(np.asarray(value, dtype), [batch]))

    return samplers.SamplingParams(
        temperature=row(temperature, np.float32),
        top_p=row(top_p, np.float32),
        min_p=row(min_p, np.float32),
        repetition_penalty=row(1.0, np.float32),
        top_k=row(top_k, np.int32),
        seed=row(seed, np.int64),
    )


def random_logits(batch, size, scale=3.0, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(scale=scale, size=[batch, size]).astype(np.float32)


def expected_probabilities(logits, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0):
    """One row: the distribution to sample from, by sorting, in float64."""
    logits = np.asarray(logits, np.float64)
    shares = np.exp((logits - logits.max()) / temperature)
    if top_k > 0:
        last = np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
        shares = np.where(logits >= last, shares, 0)
    if top_p < 1:
        ranked = np.argsort(-logits, kind="stable")
        mass = np.cumsum(shares[ranked]) / shares.sum()
        crossing = ranked[np.argmax(mass >= np.float32(top_p))]
        shares = np.where(logits >= logits[crossing], shares, 0)
    shares = np.where(shares >= np.float32(min_p) * shares.max(), shares, 0)
    return shares / shares.sum()


_RUN = {jit: tf.function(samplers.sample, jit_compile=jit) for jit in (False, True)}


def run(logits, params, positions, how="xla"):
    function = samplers.sample if how == "eager" else _RUN[how == "xla"]
    return function(tf.constant(logits), params, tf.constant(positions, tf.int32)).numpy()


def draws(row, count, batch=64, **how):
    """`count` tokens of one distribution, at positions 0, 1, ..."""
    logits = np.tile(row, [batch, 1])
    params = make_params(batch, seed=np.arange(batch), **how)
    pieces = [run(logits, params, np.full(batch, step)) for step in range(-(-count // batch))]
    return np.concatenate(pieces)


@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_lowest_id_among_the_best(size):
    logits = random_logits(3, size)
    logits[0] = 1.5
    logits[1, [1, 4]] = 50.0
    logits[2] = np.where(np.arange(size) % 2, 0.0, -0.0)
    for how in ("eager", "graph", "xla"):
        tokens = run(logits, make_params(3, temperature=0.0), [0, 1, 2], how)
        np.testing.assert_array_equal(tokens, [0, 1, 0])


def test_greedy_rows_ignore_the_other_parameters():
    logits = random_logits(4, 1000)
    params = make_params(4, temperature=[0, 1, 0, 1], top_p=0.5, top_k=3, min_p=0.1)
    tokens = run(logits, params, [0, 0, 0, 0])
    np.testing.assert_array_equal(tokens[[0, 2]], logits.argmax(-1)[[0, 2]])


@pytest.mark.parametrize(
    "how",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10_000},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 40, "top_p": 0.8},
        {"temperature": 2.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.3, "top_p": 0.99},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", SIZES)
def test_the_kept_set_equals_a_sort(size, how, monkeypatch):
    logits = random_logits(6, size)
    seen = {}

    def keep(weights, uniform):
        seen["weights"] = weights.numpy()
        return search(weights, uniform)

    search = samplers._search
    monkeypatch.setattr(samplers, "_search", keep)
    run(logits, make_params(6, **how), np.zeros(6), "eager")
    for row, weights in zip(logits, seen["weights"], strict=True):
        expected = expected_probabilities(row, **how)
        np.testing.assert_allclose(weights / weights.sum(), expected, atol=2e-7)
        np.testing.assert_array_equal(weights > 0, expected > 1e-12)


def test_ties_at_the_threshold_are_all_kept():
    row = np.array([3.0, 1.0, 2.0, 1.0, 1.0, 0.0], np.float32)
    assert set(draws(row, 2000, top_k=3)) == {0, 1, 2, 3, 4}
    assert set(draws(row, 2000, top_k=2)) == {0, 2}
    assert set(draws(np.zeros(6, np.float32), 2000, top_p=0.01)) == set(range(6))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 100, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(how):
    row = random_logits(1, 300, scale=2.0, seed=3)[0]
    expected = expected_probabilities(row, **how)
    count = 20_000
    observed = np.bincount(draws(row, count, batch=250, **how), minlength=300)
    assert observed.sum() == count
    assert not observed[expected == 0].any()
    likely = expected * count >= 5
    expected = np.append(expected[likely], expected[~likely].sum()) * count
    observed = np.append(observed[likely], observed[~likely].sum())
    filled = expected > 0
    statistic = np.sum((observed - expected)[filled] ** 2 / expected[filled])
    freedom = filled.sum() - 1
    # Mean + 4 standard deviations of chi-square: seeds are fixed, so the outcome is, too.
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_streams_along_positions_and_along_seeds_are_uniform():
    seeds = tf.range(64, dtype=tf.int64)
    numbers = np.stack(
        [samplers._uniform(seeds, tf.fill([64], step)).numpy() for step in range(64)]
    )
    assert len(np.unique(numbers)) == numbers.size
    np.testing.assert_allclose(numbers.mean(0), 0.5, atol=0.15)
    np.testing.assert_allclose(numbers.mean(1), 0.5, atol=0.15)
    correlation = np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]
    assert abs(correlation) < 0.05
    assert numbers.min() >= 0
    assert numbers.max() < 1


def mixed_case(batch=8, size=1000):
    generator = np.random.default_rng(11)
    params = make_params(
        batch,
        temperature=generator.choice([0.0, 0.5, 1.0, 3.0], batch),
        top_p=generator.choice([0.4, 0.9, 1.0], batch),
        min_p=generator.choice([0.0, 0.02], batch),
        top_k=generator.choice([0, 1, 40], batch),
        seed=generator.integers(-(2**63), 2**63 - 1, batch),
    )
    return random_logits(batch, size, seed=5), params, generator.integers(0, 2**31 - 1, batch)


def test_a_row_depends_on_nothing_but_itself():
    logits, params, positions = mixed_case()
    together = run(logits, params, positions)
    order = np.array([3, 0, 7, 5, 1, 6, 2, 4])
    shuffled = samplers.SamplingParams(*(tf.gather(field, order) for field in params))
    np.testing.assert_array_equal(run(logits[order], shuffled, positions[order]), together[order])
    for row in range(8):
        alone = samplers.SamplingParams(*(field[row : row + 1] for field in params))
        token = run(logits[row : row + 1], alone, positions[row : row + 1])
        np.testing.assert_array_equal(token, together[row : row + 1])


def test_eager_graph_and_xla_agree():
    logits, params, positions = mixed_case()
    for shift in range(10):
        moved = (positions + shift).clip(max=2**31 - 1)
        eager = run(logits, params, moved, "eager")
        np.testing.assert_array_equal(run(logits, params, moved, "graph"), eager)
        np.testing.assert_array_equal(run(logits, params, moved, "xla"), eager)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_inside_a_loop(jit):
    logits, params, _ = mixed_case(batch=2)

    @tf.function(jit_compile=jit)
    def loop(logits, params):
        def step(index, tokens):
            token = samplers.sample(logits, params, tf.fill([2], index))
            return index + 1, tf.tensor_scatter_nd_update(tokens, [[index]], [token])

        tokens = tf.zeros([12, 2], tf.int32)
        return tf.while_loop(lambda index, _: index < 12, step, (0, tokens))[1]

    tokens = loop(tf.constant(logits), params).numpy()
    steps = [run(logits, params, np.full(2, step), "eager") for step in range(12)]
    np.testing.assert_array_equal(tokens, steps)


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_extreme_values(how):
    size = 300
    logits = random_logits(8, size)
    logits[0] = -np.inf
    logits[0, 123] = -50.0
    logits[1] = -np.inf  # nothing to choose from: the lowest id
    logits[2, 77] = np.inf
    logits[3, :] = 2.0
    logits[4] = np.where(np.arange(size) < 290, -np.inf, 1e30)
    logits[5, 10] = 3e38
    logits[6] *= 1e-40
    params = make_params(
        8,
        temperature=[1, 1, 1, 1e30, 1, 1e-30, 1, 1e-30],
        top_k=[0, 5, 0, 0, 3, 0, 0, 0],
        top_p=[1, 1, 0.5, 1, 1, 1, 1, 1e-30],
    )
    for position in range(20):
        tokens = run(logits, params, np.full(8, position), how)
        assert tokens[0] == 123
        assert tokens[1] == 0
        assert tokens[2] == 77
        assert 290 <= tokens[4] < size
        assert tokens[5] == 10
        assert tokens[7] == logits[7].argmax()
        assert ((tokens >= 0) & (tokens < size)).all()


def test_a_huge_temperature_is_uniform():
    tokens = draws(random_logits(1, 130)[0], 13_000, batch=100, temperature=1e30)
    counts = np.bincount(tokens, minlength=130)
    assert counts.min() > 55
    assert counts.max() < 150


@pytest.mark.parametrize("size", [3, 128, 129, 1000])
def test_search_never_finds_weight_zero(size):
    """Numbers at both ends of every token's interval, and the largest below one."""
    generator = np.random.default_rng(1)
    weights = generator.integers(0, 5, size) * generator.integers(0, 2, size) * 2**38
    weights[[0, size - 1]] = 0
    weights[1] = 2**40
    ends = np.cumsum(weights)
    numbers = np.concatenate([ends[:-1] / ends[-1], (ends - 1)[ends > 0] / ends[-1]])
    numbers = np.append(numbers, [0.0, np.nextafter(1.0, 0.0)])
    numbers = numbers[numbers < 1]
    tiled = tf.constant(np.tile(weights, [len(numbers), 1]), tf.int64)
    tokens, found = samplers._search(tiled, tf.constant(numbers))
    assert found.numpy().all()
    assert (weights[tokens.numpy()] > 0).all()
    targets = np.minimum((numbers * ends[-1]).astype(np.int64), ends[-1] - 1)
    np.testing.assert_array_equal(tokens, np.searchsorted(ends, targets, side="right"))


def test_penalize_divides_positive_and_multiplies_negative_logits():
    logits = tf.constant([[2.0, -2.0, 3.0, -np.inf], [2.0, -2.0, 3.0, 0.0]])
    seen = tf.constant([[True, True, False, True], [True, False, True, True]])
    result = samplers.penalize(logits, seen, tf.constant([2.0, 1.0]))
    np.testing.assert_array_equal(result, [[1.0, -4.0, 3.0, -np.inf], [2.0, -2.0, 3.0, 0.0]])


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_log_probability(jit):
    logits = random_logits(4, 1000, scale=30.0)
    logits[1, :500] = -np.inf
    tokens = logits.argmax(-1).astype(np.int32)
    tokens[2] = 17
    result = tf.function(samplers.log_probability, jit_compile=jit)(logits, tokens)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected -= wide.max(-1, keepdims=True)
    np.testing.assert_allclose(result, expected[np.arange(4), tokens], rtol=1e-5, atol=1e-5)

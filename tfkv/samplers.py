"""Choosing the next token from logits: pure functions, the same eagerly, in graphs and under XLA.

There is no sort. Logits are ordered through integers that compare as the floats do, and the
thresholds of top-k and top-p are found by bisecting those integers. Probabilities are integer
weights, so that sums are exact whatever their order: the same row gives the same token in a
batch of one and of eight, compiled or not (save where a draw falls within the rounding of
``exp``, some 1e-7 of the mass, since TensorFlow and XLA round it apart).
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

_LANES = 128  # tokens a block of the two-level search
_PHILOX = 1
# The top token weighs 2**40: a sum over 2**22 tokens fits int64, what a lighter token loses by
# rounding is below 1e-7 of the mass.
_WEIGHT_ONE = float(2**40)


class SamplingParams(NamedTuple):
    """How each row of a batch is sampled; every field is a tensor ``[B]``.

    Args:
        temperature: float32; 0 = greedy, and the fields below do not count then.
        top_p: float32; 1 = off. Smallest set of most likely tokens with at least this mass.
        min_p: float32; 0 = off. Least probability, as a share of the top one.
        repetition_penalty: float32; 1 = off. See `penalize`.
        top_k: int32; 0 = off. Most likely tokens kept; ties with the last are kept, too.
        seed: int64; the row's random stream.
    """

    temperature: tf.Tensor
    top_p: tf.Tensor
    min_p: tf.Tensor
    repetition_penalty: tf.Tensor
    top_k: tf.Tensor
    seed: tf.Tensor


def penalize(logits: tf.Tensor, seen: tf.Tensor, penalty: tf.Tensor) -> tf.Tensor:
    """Makes tokens that were seen less likely, as Hugging Face ``transformers`` does.

    Args:
        logits: float32 ``[B, V]``.
        seen: bool ``[B, V]``, tokens of the prompt and the answer so far.
        penalty: float32 ``[B]``; positive logits are divided by it, others multiplied.

    Returns:
        float32 ``[B, V]``.

    Reference:
        - [Keskar et al., 2019](https://arxiv.org/abs/1909.05858), section 4.1
    """
    penalty = penalty[:, tf.newaxis]
    return tf.where(seen, tf.where(logits > 0, logits / penalty, logits * penalty), logits)


def log_probability(logits: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
    """Log-probability of a token of each row: ``logit - logsumexp(logits)``.

    Args:
        logits: float32 ``[B, V]``.
        tokens: int32 ``[B]``.

    Returns:
        float32 ``[B]``.
    """
    chosen = tf.gather(logits, tokens, batch_dims=1)
    top = tf.reduce_max(logits, axis=-1)
    mass = tf.reduce_sum(tf.exp(logits - top[:, tf.newaxis]), axis=-1)
    return chosen - top - tf.math.log(mass)


def sample(logits: tf.Tensor, params: SamplingParams, positions: tf.Tensor) -> tf.Tensor:
    """Samples one token for each row.

    Temperature, then top-k, then top-p over what top-k left, then min-p; one number of the
    stream ``(seed, position)`` picks the token. When every row is greedy, the rest is skipped
    at run time.

    Args:
        logits: float32 ``[B, V]``, penalised already; V static. ``-inf`` is never
            chosen, unless the row holds nothing else.
        params: How to sample.
        positions: int32 ``[B]``, not negative; where the sampled token will stand.

    Returns:
        int32 ``[B]``; for greedy rows the most likely token, the lowest id among equals.
    """
    order = _order(logits)
    best = tf.reduce_max(order, axis=-1)
    greedy = _first(tf.equal(order, best[:, tf.newaxis]))
    stochastic = params.temperature > 0
    return tf.cond(
        tf.reduce_any(stochastic),
        lambda: tf.where(stochastic, _draw(logits, order, greedy, params, positions), greedy),
        lambda: greedy,
    )


def _order(logits: tf.Tensor) -> tf.Tensor:
    """int32 that compare as the floats do; equal floats, both zeros too, give equal integers."""
    bits = tf.bitcast(tf.where(tf.equal(logits, 0.0), 0.0, logits), tf.int32)
    return tf.where(bits < 0, tf.bitwise.bitwise_xor(bits, 0x7FFFFFFF), bits)


def _first(holds: tf.Tensor) -> tf.Tensor:
    """Lowest index of each row ``[B, V]`` where the condition holds."""
    size = holds.shape[-1]
    index = tf.range(size, dtype=tf.int32)
    return tf.reduce_min(tf.where(holds, index, size - 1), axis=-1)


def _draw(
    logits: tf.Tensor,
    order: tf.Tensor,
    greedy: tf.Tensor,
    params: SamplingParams,
    positions: tf.Tensor,
) -> tf.Tensor:
    """Draws from every row as if it were stochastic."""
    top = tf.gather(logits, greedy, batch_dims=1)
    temperature = tf.where(params.temperature > 0, params.temperature, 1.0)
    shares = tf.exp((logits - top[:, tf.newaxis]) / temperature[:, tf.newaxis])
    shares = tf.where(shares > 0, shares, 0.0)  # NaN of inf - inf, too
    weights = tf.cast(shares * _WEIGHT_ONE, tf.int64)
    weights = tf.cond(
        tf.reduce_any(params.top_k > 0), lambda: _top_k(weights, order, params), lambda: weights
    )
    weights = tf.cond(
        tf.reduce_any(params.top_p < 1), lambda: _top_p(weights, order, params), lambda: weights
    )
    least = tf.minimum(params.min_p, 1.0)[:, tf.newaxis]
    weights = tf.where(shares >= least, weights, tf.zeros_like(weights))
    token, found = _search(weights, _uniform(params.seed, positions))
    return tf.where(found, token, greedy)


def _top_k(weights: tf.Tensor, order: tf.Tensor, params: SamplingParams) -> tf.Tensor:
    size = order.shape[-1]
    need = tf.where(params.top_k > 0, tf.minimum(params.top_k, size), size)
    lowest = _bisect(tf.ones_like(order), order, need)
    return tf.where(order >= lowest[:, tf.newaxis], weights, tf.zeros_like(weights))


def _top_p(weights: tf.Tensor, order: tf.Tensor, params: SamplingParams) -> tf.Tensor:
    total = tf.reduce_sum(weights, axis=-1)
    share = tf.cast(params.top_p, tf.float64) * tf.cast(total, tf.float64)
    need = tf.where(params.top_p < 1, tf.cast(tf.math.ceil(share), tf.int64), total)
    lowest = _bisect(weights, order, tf.maximum(need, 1))
    return tf.where(order >= lowest[:, tf.newaxis], weights, tf.zeros_like(weights))


def _bisect(values: tf.Tensor, order: tf.Tensor, need: tf.Tensor) -> tf.Tensor:
    """Greatest threshold whose tokens at or above it have values that add up to `need`.

    Args:
        values: Integers ``[B, V]``, not negative; all of them add up to `need` or more.
        order: int32 ``[B, V]``.
        need: ``[B]``, of the type of `values`.

    Returns:
        int32 ``[B]``.
    """
    high = tf.reduce_max(order, axis=-1)
    low = tf.reduce_min(order, axis=-1)
    zero = tf.zeros([], values.dtype)

    def step(low: tf.Tensor, high: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # The mean rounded up, without the overflow of low + high.
        half = tf.bitwise.right_shift(tf.bitwise.bitwise_xor(low, high), 1)
        middle = tf.bitwise.bitwise_or(low, high) - half
        above = tf.where(order >= middle[:, tf.newaxis], values, zero)
        have = tf.reduce_sum(above, axis=-1)
        high = tf.where(have > need, high, tf.where(have < need, middle - 1, middle))
        return tf.where(have >= need, middle, low), high

    return tf.while_loop(lambda low, high: tf.reduce_any(low < high), step, (low, high))[0]


def _uniform(seed: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """float64 ``[B]`` in [0, 1), each from its own row's seed and position alone.

    Whole integers are drawn because TensorFlow and XLA turn the same bits into different
    floats (``StatelessRandomUniformV2``).
    """

    def draw(stream: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        key, place = stream
        bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=tf.constant([1]),
            key=tf.bitcast(key, tf.uint64)[tf.newaxis],
            counter=tf.stack([tf.cast(place, tf.uint64), tf.zeros([], tf.uint64)]),
            alg=_PHILOX,
            dtype=tf.uint32,
        )
        return bits[0]

    bits = tf.map_fn(draw, (seed, positions), fn_output_signature=tf.uint32)
    return tf.cast(bits, tf.float64) * 2.0**-32


def _search(weights: tf.Tensor, uniform: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Inverse of the cumulative weights: first the block, then the token in it.

    Integers keep both levels exact, so a token of weight 0 is never found.

    Returns:
        int32 ``[B]`` tokens, and bool ``[B]``: false where all weights are 0.
    """
    size = weights.shape[-1]
    blocks = -(-size // _LANES)
    weights = tf.pad(weights, [[0, 0], [0, blocks * _LANES - size]])
    weights = tf.reshape(weights, [-1, blocks, _LANES])
    ends = tf.cumsum(tf.reduce_sum(weights, axis=-1), axis=-1)
    total = ends[:, -1]
    target = tf.cast(uniform * tf.cast(total, tf.float64), tf.int64)
    target = tf.minimum(target, total - 1)  # a product rounded up to the total itself
    passed = ends <= target[:, tf.newaxis]
    block = tf.minimum(tf.reduce_sum(tf.cast(passed, tf.int32), axis=-1), blocks - 1)
    before = tf.reduce_max(tf.where(passed, ends, tf.zeros_like(ends)), axis=-1)
    inside = tf.cumsum(tf.gather(weights, block, batch_dims=1), axis=-1)
    passed = inside <= (target - before)[:, tf.newaxis]
    lane = tf.reduce_sum(tf.cast(passed, tf.int32), axis=-1)
    return tf.minimum(block * _LANES + lane, size - 1), total > 0

"""Softmax attention in parts, so that no part has to see the whole cache.

A part answers with its peak score, the mass under it and the weighted values; parts
merge exactly. Cache pages, fresh tokens and dense caches are all read through this one
function.

Reference:
    Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Dao et al., FlashAttention,
    https://arxiv.org/abs/2205.14135
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfkv.layers.codecs.codec import Coded, Dots
from tfkv.layers.scoring import PLAIN, Scoring
from tfkv.layers.shapes import shape_of

#: Stands for minus infinity: exp of it is 0, and it can be subtracted from itself.
_FLOOR = -1e30


class Partial(NamedTuple):
    """Attention over a part of the keys.

    Attributes:
        peak: Highest visible score, ``[A, K, Q]``; very negative where none is visible.
        mass: Sum of exp(score − peak), ``[A, K, Q]``.
        output: Values weighted by exp(score − peak), ``[A, K, Q, H]``.
    """

    peak: tf.Tensor
    mass: tf.Tensor
    output: tf.Tensor


def group_queries(
    queries: tf.Tensor, num_key_value_heads: int, scale: float | None = None
) -> tf.Tensor:
    """``[A, T, N, H]`` to ``[A, K, Q, H]`` with Q = G·T, multiplied by `scale`, or by 1/√H.

    Query heads that share a KV head become rows of one product; KV heads are never
    repeated.
    """
    batch, width, heads, head_dim = shape_of(queries)
    group = heads // num_key_value_heads
    grouped = tf.reshape(queries, [batch, width, num_key_value_heads, group, head_dim])
    grouped = tf.transpose(grouped, [0, 2, 3, 1, 4])
    grouped = tf.reshape(grouped, [batch, num_key_value_heads, group * width, head_dim])
    return grouped * tf.cast(head_dim**-0.5 if scale is None else scale, queries.dtype)


def ungroup_output(output: tf.Tensor, num_query_heads: int) -> tf.Tensor:
    """``[A, K, Q, H]`` back to ``[A, T, N, H]``."""
    batch, kv_heads, rows, head_dim = shape_of(output)
    group = num_query_heads // kv_heads
    width = rows // group
    split = tf.reshape(output, [batch, kv_heads, group, width, head_dim])
    split = tf.transpose(split, [0, 3, 1, 2, 4])
    return tf.reshape(split, [batch, width, num_query_heads, head_dim])


def attend(
    queries: tf.Tensor,
    keys: Coded,
    values: Coded,
    mask: tf.Tensor,
    codec: Dots,
    columns: bool = False,
    scoring: Scoring = PLAIN,
) -> Partial:
    """Attention of grouped queries over one part of the keys.

    Args:
        queries: ``[A, K, Q, H]`` of `group_queries`.
        keys: Coded keys, parts ``[A, K, S, ...]``.
        values: Coded values likewise.
        mask: bool ``[A, T, S]``, from `tfkv.layers.masks`, or ``[A, K, T, S]`` where KV heads
            differ; Q is a multiple of T.
        codec: How keys and values are written.
        columns: Whether keys lie a token a column; see `Codec.scores`.
        scoring: What becomes of scores, with the distances that belong to `mask`.
    """
    seen = _attend(codec.prepare(queries), keys, values, mask, codec, columns, scoring)
    return seen._replace(output=codec.finish(seen.output))


def _attend(
    queries: tf.Tensor,
    keys: Coded,
    values: Coded,
    mask: tf.Tensor,
    codec: Dots,
    columns: bool,
    scoring: Scoring,
) -> Partial:
    """As `attend`, of queries that the codec has prepared, and with an output to be finished."""
    scores = scoring(codec.scores(queries, keys, columns))
    mask = _spread(mask, scores)
    # Masked before exp as well as after: a hidden score far above the peak would overflow,
    # and 0 times its infinite slope is NaN when trained.
    scores = tf.where(mask, scores, _FLOOR)
    peak = tf.reduce_max(scores, axis=-1)
    weights = tf.where(mask, tf.exp(scores - peak[..., tf.newaxis]), 0.0)
    return Partial(peak, tf.reduce_sum(weights, axis=-1), codec.mix(weights, values))


def attention_weights(scores: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Softmax of ``scores [A, K, Q, S]`` over what ``mask [A, T, S]`` lets through."""
    masked = tf.where(_spread(mask, scores), scores, _FLOOR)
    return tf.nn.softmax(masked, axis=-1)


def log_sum(partial: Partial) -> tf.Tensor:
    """Logarithm of the sum of exp(score) over all that queries saw, ``[A, K, Q]``: what
    `shares` needs of them."""
    return partial.peak + tf.math.log(tf.maximum(partial.mass, 1e-30))


def shares(
    queries: tf.Tensor,
    keys: Coded,
    mask: tf.Tensor,
    codec: Dots,
    log_sums: tf.Tensor,
    scoring: Scoring = PLAIN,
) -> tf.Tensor:
    """What part of their attention queries gave to some of the keys that they saw, float32
    ``[A, K, Q, C]``.

    Args:
        queries: ``[A, K, Q, H]``, prepared by the codec.
        keys: Coded keys, a token a column: parts ``[A, K, ..., C]``.
        mask: bool ``[A, T, C]``; Q is a multiple of T.
        codec: How keys are written.
        log_sums: ``[A, K, Q]`` of `log_sum`, over all that the queries saw.
        scoring: What becomes of scores, with the distances that belong to `mask`.
    """
    scores = scoring(codec.scores(queries, keys, columns=True)) - log_sums[..., tf.newaxis]
    return tf.exp(tf.where(_spread(mask, scores), scores, _FLOOR))


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over both parts; exact, in any order."""
    peak = tf.maximum(first.peak, second.peak)
    left = tf.exp(first.peak - peak)
    right = tf.exp(second.peak - peak)
    return Partial(
        peak,
        first.mass * left + second.mass * right,
        first.output * left[..., tf.newaxis] + second.output * right[..., tf.newaxis],
    )


def attend_owned(
    so_far: Partial,
    queries: tf.Tensor,
    keys: Coded,
    values: Coded,
    mask: tf.Tensor,
    codec: Dots,
    owners: tf.Tensor,
    scoring: Scoring = PLAIN,
) -> Partial:
    """What rows have seen so far, and several pages more of each; the same as to `attend` to
    each page and to `merge`, in fewer operations.

    Args:
        so_far: Of the rows, fields ``[B, K, Q, ...]``; the output unfinished, as is that of the
            result (see `Codec.finish`).
        queries: Of each page's owner, ``[A, K, Q, H]``, prepared by the codec.
        keys: Coded keys of the pages, a token a column: parts ``[A, K, ..., C]``.
        values: Coded values, parts ``[A, K, C, ...]``.
        mask: bool ``[A, T, C]``; Q is a multiple of T.
        codec: How keys and values are written.
        owners: int32 ``[A]``, row of each page; −1 = nobody's.
        scoring: What becomes of scores, with the distances that belong to `mask`.
    """
    owned = tf.range(shape_of(so_far.peak)[0])[:, tf.newaxis] == owners
    scores = scoring(codec.scores(queries, keys, columns=True))
    mask = _spread(mask & (owners >= 0)[:, tf.newaxis, tf.newaxis], scores)
    scores = tf.where(mask, scores, _FLOOR)
    peaks = tf.where(
        owned[:, :, tf.newaxis, tf.newaxis], tf.reduce_max(scores, axis=-1)[tf.newaxis], _FLOOR
    )
    peak = tf.maximum(so_far.peak, tf.reduce_max(peaks, axis=1))
    of_owner = tf.gather(peak, tf.maximum(owners, 0))
    weights = tf.where(mask, tf.exp(scores - of_owner[..., tf.newaxis]), 0.0)
    share = tf.cast(owned, weights.dtype)

    def collect(x: tf.Tensor) -> tf.Tensor:
        pages, *rest = shape_of(x)
        return tf.reshape(tf.matmul(share, tf.reshape(x, [pages, -1])), [shape_of(share)[0], *rest])

    left = tf.exp(so_far.peak - peak)
    return Partial(
        peak,
        so_far.mass * left + collect(tf.reduce_sum(weights, axis=-1)),
        so_far.output * left[..., tf.newaxis] + collect(codec.mix(weights, values)),
    )


def attend_shared(
    so_far: Partial,
    queries: tf.Tensor,
    keys: Coded,
    values: Coded,
    mask: tf.Tensor,
    codec: Dots,
    scoring: Scoring = PLAIN,
) -> Partial:
    """What rows have seen so far, and pages that several of them read: each page is read once,
    by the queries of all rows.

    Args:
        so_far: Of the rows, fields ``[B, K, Q, ...]``; the output unfinished, as is that of the
            result.
        queries: Of the rows, ``[B, K, Q, H]``, prepared by the codec.
        keys: Coded keys of the pages, a token a column: parts ``[A, K, ..., C]``.
        values: Coded values, parts ``[A, K, C, ...]``.
        mask: bool ``[A, B, T, C]``; Q is a multiple of T.
        codec: How keys and values are written.
        scoring: What becomes of scores, with the distances that belong to `mask`.
    """
    rows, heads, grouped, head_dim = shape_of(queries)
    pages, _, width, size = shape_of(mask)
    group = grouped // width

    def by_row(x: tf.Tensor) -> tf.Tensor:
        """``[K, G·B·T, ...]`` back to ``[B, K, Q, ...]``."""
        split = tf.reshape(x, [heads, group, rows, width, -1])
        split = tf.transpose(split, [2, 0, 1, 3, 4])
        return tf.reshape(split, [rows, heads, grouped, *shape_of(x)[2:]])

    # All rows as one of B·T tokens, so that `attend` reads its mask as it always does.
    asked = tf.reshape(queries, [rows, heads, group, width, head_dim])
    asked = tf.reshape(tf.transpose(asked, [1, 2, 0, 3, 4]), [1, heads, rows * grouped, head_dim])
    asked = tf.tile(asked, [pages, 1, 1, 1])
    seen = tf.reshape(mask, [pages, rows * width, size])
    if scoring.distances is not None:
        flat = tf.reshape(scoring.distances, [pages, rows * width, size])
        scoring = scoring._replace(distances=flat)
    part = _attend(asked, keys, values, seen, codec, True, scoring)
    peak = tf.reduce_max(part.peak, axis=0)
    share = tf.exp(part.peak - peak)
    whole = Partial(
        peak,
        tf.reduce_sum(part.mass * share, axis=0),
        tf.reduce_sum(part.output * share[..., tf.newaxis], axis=0),
    )
    return merge(so_far, Partial(*map(by_row, whole)))


def nothing(queries: tf.Tensor, width: int | None = None) -> Partial:
    """What ``queries [A, K, Q, H]`` have seen before they saw a key; the output is of another
    `width` than H where codes are mixed that have one."""
    mass = tf.zeros_like(queries[..., 0])
    if width is None:
        return Partial(mass + _FLOOR, mass, tf.zeros_like(queries))
    return Partial(mass + _FLOOR, mass, tf.zeros([*shape_of(mass), width], queries.dtype))


def normalize(partial: Partial) -> tf.Tensor:
    """Attention output ``[A, K, Q, H]``; 0 where a query saw nothing."""
    mass = partial.mass[..., tf.newaxis]
    return partial.output / tf.maximum(mass, tf.cast(1e-30, mass.dtype))


def concatenate_heads(partial: Partial, num_query_heads: int) -> tf.Tensor:
    """Attention output ``[A, T, N·H]``, heads side by side; 0 where a query saw nothing.

    It is divided in this shape and in no other: a product with the weights that reads its
    operand through another shape takes XLA five times as long on the CPU.
    """
    output = ungroup_output(partial.output, num_query_heads)
    *lead, head_dim = shape_of(output)
    flat = [*lead[:2], num_query_heads * head_dim]
    mass = ungroup_output(partial.mass[..., tf.newaxis], num_query_heads)
    mass = tf.reshape(tf.broadcast_to(mass, [*lead, head_dim]), flat)
    return tf.reshape(output, flat) / tf.maximum(mass, tf.cast(1e-30, mass.dtype))


def _spread(mask: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    """``mask [A, T, S]``, or ``[A, K, T, S]``, for ``scores [A, K, G·T, S]``: the G heads of a
    group share it."""
    group = shape_of(scores)[-2] // shape_of(mask)[-2]
    by_head = mask if mask.shape.rank == 4 else mask[:, tf.newaxis]
    return tf.tile(by_head, [1, 1, group, 1])

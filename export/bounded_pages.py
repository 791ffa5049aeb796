"""Least and greatest keys of pages, beside their codes: what a policy selects pages by."""

from __future__ import annotations

import tensorflow as tf

from tfkv.export.geometry import CacheGeometry
from tfkv.export.page_pool import PagePool, Parts
from tfkv.layers import page_bounds
from tfkv.layers.codecs.grouping import touched_groups
from tfkv.layers.shapes import shape_of


def write_bounds(
    pool: PagePool, geometry: CacheGeometry, parts: Parts, table: tf.Tensor, positions: tf.Tensor
) -> Parts:
    """Bounds of all pages that new tokens lie on, anew from what is on them then: so they hold
    for whatever was there before.

    Args:
        pool: The pages.
        geometry: Where tokens lie.
        parts: The cache, with the new tokens in it.
        table: int32 ``[B, columns]``.
        positions: int32 ``[B, T]``, of the new tokens, consecutive; −1 = none.
    """
    if not pool.selects:
        return parts
    size, layers = geometry.page_size, len(pool.layers)
    touched = touched_groups(positions, size).positions
    first = touched[:, ::size]
    column = geometry.column_of(tf.maximum(first, 0) // size)
    physical = tf.gather(table, column, batch_dims=1)
    physical = tf.reshape(tf.where(first >= 0, physical, 0), [-1])
    # Tables of a codec are of layers before heads before tokens.
    rows = physical * layers + tf.range(layers)[:, tf.newaxis]

    def by_token(part: tf.Tensor) -> tf.Tensor:
        """``[L, M, K, ..., C]`` as ``[L, K, M · C, ...]``."""
        of_layers, pages, heads, *inner, tokens = shape_of(part)
        turned = tf.transpose(part, [0, 2, 1, 4, 3])
        return tf.reshape(turned, [of_layers, heads, pages * tokens, *inner])

    stored = parts[pool.sides[0]]
    coded = {name: by_token(tf.gather(part, rows)) for name, part in stored.items()}
    keys = pool.codec_of_layers.keys.decode(coded)
    _, heads, tokens, width = shape_of(keys)
    keys = tf.reshape(keys, [layers, heads, tokens // size, size, width])
    bounds = page_bounds.bounds_of(keys, tf.reshape(touched >= 0, [tokens // size, size]))
    updated = tf.tensor_scatter_nd_update(
        parts[pool.bounds]["keys"],
        tf.reshape(rows, [-1, 1]),
        tf.reshape(tf.transpose(bounds, [0, 2, 1, 3]), [-1, heads, 2 * width]),
    )
    return {**parts, pool.bounds: {"keys": updated}}

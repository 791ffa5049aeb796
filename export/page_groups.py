"""Codes of tokens that are coded together, on pages."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfkv.export.exact_tail import ExactTail, Tails
from tfkv.export.geometry import CacheGeometry
from tfkv.export.page_pool import PagePool, Parts, gather_columns, rows_of_tokens, scatter_columns
from tfkv.layers.codecs import ChannelGroups
from tfkv.layers.codecs.grouping import touched_groups
from tfkv.layers.positions import first_position


class _Places(NamedTuple):
    """Where tokens, or groups, of a batch lie in a part of the pool, in all layers and heads.

    Attributes:
        rows: int32 ``[L · n · K]``.
        offsets: int32, likewise.
        shape: Rows of the batch, and tokens or groups of each.
    """

    rows: tf.Tensor
    offsets: tf.Tensor
    shape: tuple[tf.Tensor, int]


def write_key_groups(
    pool: PagePool,
    tail: ExactTail,
    geometry: CacheGeometry,
    parts: Parts,
    keys: tf.Tensor,
    table: tf.Tensor,
    positions: tf.Tensor,
    tails: Tails,
) -> Parts:
    """Codes all groups that new tokens join, in the layers of a pool whose codec codes keys
    together: from exact numbers where there are any, and from codes where a session has none of
    its own (see `Tails.since`).

    Args:
        pool: The pages.
        tail: What is kept exactly, before the new tokens are in it.
        geometry: Where tokens lie.
        parts: The cache.
        keys: float32 ``[L, B, K, T, H]`` of the new tokens, in all layers.
        table: int32 ``[B, columns]``.
        positions: int32 ``[B, T]``; −1 is written nowhere.
        tails: Fields ``[B]``.
    """
    codec, side = pool.codec.keys, pool.sides[0]
    if not isinstance(codec, ChannelGroups):
        return parts
    config, size, stored = pool.config, geometry.page_size, parts[side]
    layers = len(pool.layers)
    touched = touched_groups(positions, codec.tokens)
    batch, width = tf.shape(positions)[0], touched.positions.shape[1]

    def places(at: tf.Tensor, tokens: int) -> _Places:
        """Of ``at [B, n]``, positions that are `tokens` apart."""
        page = tf.maximum(at, 0) // size
        physical = tf.gather(table, geometry.column_of(page), batch_dims=1)
        physical = tf.reshape(tf.where(at >= 0, physical, 0), [-1])
        offsets = tf.reshape(tf.maximum(at, 0) % size // tokens, [-1])
        rows = rows_of_tokens(config, physical, offsets, layers=layers)
        return _Places(*rows, (batch, at.shape[1]))

    def by_batch(x: tf.Tensor, shape: tuple[tf.Tensor, int], layers: int = layers) -> tf.Tensor:
        """``[L · B · n · K, ...]`` as ``[B, L, K, n, ...]``."""
        lead = [layers, *shape, config.num_key_value_heads]
        return tf.transpose(tf.reshape(x, [*lead, *x.shape[1:]]), [1, 0, 3, 2, 4])

    where = {
        "codes": places(touched.positions, 1),
        "affine": places(touched.positions[:, :: codec.tokens], codec.tokens),
    }
    old = {
        name: by_batch(gather_columns(stored[name], at.rows, at.offsets), at.shape)
        for name, at in where.items()
    }
    exact = tail.gather_tokens(parts["exact"], tails.slot, touched.positions)
    exact = pool.own(by_batch(exact, (batch, width), config.num_layers), axis=1)
    of_rows = tf.transpose(pool.own(keys), [1, 0, 2, 3, 4])
    fresh = tf.gather(of_rows, touched.sources, axis=3, batch_dims=1)
    held = tail.holds(pool.codec, tails, first_position(positions), touched.positions)
    known = tf.where(_of_tokens(held), exact, codec.decode(old))
    whole = tf.where(_of_tokens(touched.fresh), fresh, known)
    coded = codec.encode_groups(whole, (touched.positions >= 0)[:, tf.newaxis, tf.newaxis])
    written = {
        name: scatter_columns(
            stored[name], at.rows, at.offsets, tf.transpose(coded[name], [1, 0, 3, 2, 4])
        )
        for name, at in where.items()
    }
    return {**parts, side: written}


def _of_tokens(flags: tf.Tensor) -> tf.Tensor:
    """``flags [B, M]`` for tensors ``[B, L, K, M, H]``."""
    return flags[:, tf.newaxis, tf.newaxis, :, tf.newaxis]

"""Attention weights of chosen positions, for pictures."""

from __future__ import annotations

import functools

import tensorflow as tf

from tfkv.export.decoder import PackedDecoder, Reading, Tables
from tfkv.export.exact_tail import Tails
from tfkv.export.layer_options import scoring_of
from tfkv.export.layer_pools import Layer, Run
from tfkv.export.page_pool import PagePool
from tfkv.layers import attention, masks
from tfkv.layers.attention import Partial
from tfkv.layers.codecs import CacheCodec, Coded, FloatCodec
from tfkv.layers.shapes import keep_shape

_FRESH = FloatCodec("float32")


class AttentionProbe:
    """Computes one token of each row again, up to a layer, and looks at what it attends to.

    It reads the pool and writes nothing. It runs outside XLA: pictures are rare, and nothing
    is compiled for them when an artifact is loaded.

    Args:
        decoder: The model over its pool.
    """

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder = decoder

    def __call__(
        self,
        token: tf.Tensor,
        position: tf.Tensor,
        layer: tf.Tensor,
        tables: Tables,
        filled: tf.Tensor,
        tails: Tails,
        chosen: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Weights of each row's query.

        Args:
            token: int32 ``[B]``, the token at `position`.
            position: int32 ``[B]``; −1 = a row that looks at nothing.
            layer: int32 ``[B]``.
            tables: int32 ``[B, columns]`` of each group of layers, block-table rows.
            filled: int32 ``[B]``, most positions that were ever on the row's pages.
            tails: What is kept exactly of the rows.
            chosen: int32 ``[B]``, number of each row's adapter; 0 = none.

        Returns:
            Weights float32 ``[B, N, S]``, and the position that each entry holds, int32
            ``[B, S]``, −1 where it is empty.
        """
        decoder, at = self._decoder, position[:, tf.newaxis]
        scans = decoder.scan(tables, tf.maximum(position, 0), tails.floor, position >= 0)
        reading = Reading(decoder.read_cache(), at, scans, tails, alone=True)
        query, key = self._project(reading, token, layer, chosen)
        widest = max(geometry.layout.entries for geometry in decoder.groups.groups)
        rows, heads = tf.size(position), decoder.config.num_query_heads
        weights, entries = tf.zeros([rows, heads, widest]), tf.zeros([rows, widest], tf.int32) - 1
        for group, geometry in enumerate(decoder.groups.groups):
            seen = self._weights(reading, group, query, key, layer, tables[group], filled)
            more = widest - geometry.layout.entries
            mine = tf.reduce_any(layer[:, tf.newaxis] == tf.constant(geometry.layers), axis=1)
            own = tf.pad(seen[0], [[0, 0], [0, 0], [0, more]])
            at_entries = tf.pad(seen[1], [[0, 0], [0, more]], constant_values=-1)
            weights = tf.where(mine[:, tf.newaxis, tf.newaxis], own, weights)
            entries = tf.where(mine[:, tf.newaxis], at_entries, entries)
        return weights, entries

    def _weights(
        self,
        reading: Reading,
        group: int,
        query: tf.Tensor,
        key: tf.Tensor,
        layer: tf.Tensor,
        table: tf.Tensor,
        filled: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Weights ``[B, N, S]`` and positions ``[B, S]`` of entries where a row's layer is one of
        the group's; anything elsewhere."""
        decoder, geometry = self._decoder, self._decoder.groups.groups[group]
        layout, asked_at, tails = geometry.layout, reading.positions, reading.tails
        position = asked_at[:, 0]
        entries = layout.positions_of(tf.maximum(filled, position + 1))
        own = tf.range(layout.entries) == layout.entry_of(position)[:, tf.newaxis]
        entries = tf.where(own, position[:, tf.newaxis], entries)
        first, *others = (pool for pool in decoder.pools.pools if pool.group == group)
        scores = self._scores(first, query, position, entries, layer, table, tails)
        for pool in others:
            mine = tf.reduce_any(layer[:, tf.newaxis] == tf.constant(pool.layers), axis=1)
            found = self._scores(pool, query, position, entries, layer, table, tails)
            scores = tf.where(mine[:, tf.newaxis, tf.newaxis, tf.newaxis], found, scores)
        alone = _FRESH.scores(query, {"codes": key})
        scores = tf.where(own[:, tf.newaxis, tf.newaxis], alone, scores)
        scoring = scoring_of(decoder.config, layer)
        mask = scoring.narrow(geometry.mask(asked_at, entries), asked_at, entries)
        if any(geometry.selects):
            mask = mask[:, tf.newaxis] & (
                self._read(reading, query, entries, layer) | own[:, None, None]
            )
        weights = attention.attention_weights(scoring.between(asked_at, entries)(scores), mask)
        shape = [tf.size(position), decoder.config.num_query_heads, layout.entries]
        return tf.reshape(weights, shape), entries

    def _read(
        self, reading: Reading, query: tf.Tensor, entries: tf.Tensor, layer: tf.Tensor
    ) -> tf.Tensor:
        """Which entries a row's layer reads where layers select pages, bool ``[B, K, 1, S]``."""
        decoder, position = self._decoder, reading.positions[:, 0]
        geometry = decoder.groups.first
        size = geometry.page_size
        read = tf.ones(
            [tf.size(layer), decoder.config.num_key_value_heads, entries.shape[1]], tf.bool
        )
        for pool in decoder.pools.pools:
            if not pool.selects:
                continue
            row = _row_in(pool, layer)[:, tf.newaxis]
            mine = Layer(layer, row, pool, feed=row, sparse=False)
            chosen, _ = decoder.choose_pages(reading, mine, query)
            here = chosen[..., tf.newaxis] == tf.range(geometry.columns)
            some = tf.repeat(tf.reduce_any(here, axis=2), size, axis=-1)
            if pool.codec.recent:
                near = self._near(pool.codec, reading.tails, position, entries)
                some |= near[:, tf.newaxis]
            own = tf.reduce_any(layer[:, tf.newaxis] == tf.constant(pool.layers), axis=1)
            read = tf.where(own[:, tf.newaxis, tf.newaxis], some, read)
        return read[:, :, tf.newaxis]

    def _near(
        self, codec: CacheCodec, tails: Tails, position: tf.Tensor, entries: tf.Tensor
    ) -> tf.Tensor:
        """Entries that are read exactly, bool ``[B, S]``."""
        near = masks.exact(position[:, tf.newaxis], entries, codec.recent, codec.sinks)[:, 0]
        return near & self._decoder.tail.holds(codec, tails, position, entries) & (entries >= 0)

    def _project(
        self, reading: Reading, token: tf.Tensor, layer: tf.Tensor, chosen: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Grouped query ``[B, K, G, H]`` and key ``[B, K, 1, H]`` of the token in its layer."""
        decoder, queries_at = self._decoder, reading.positions
        weights = decoder.read_weights(chosen)
        angles = decoder.turning.angles(queries_at)
        looks = decoder.looks(queries_at, queries_at)

        def attend(at: Layer, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Partial:
            here = decoder.attend_fresh(at, q, {"codes": k}, {"codes": v}, looks)
            return decoder.attend_cache(reading, at, q, here)

        def body(
            run: Run, at: tf.Tensor, x: tf.Tensor, query: tf.Tensor, key: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            after, q, k, _, _ = decoder.block(weights, run.layer(at), x, angles, attend)
            wanted = (layer == at)[:, tf.newaxis, tf.newaxis, tf.newaxis]
            query, key = tf.where(wanted, q, query), tf.where(wanted, k, key)
            return at + 1, keep_shape(after, x), query, key

        x = decoder.embed(weights, token[:, tf.newaxis], queries_at)
        config, rows = decoder.config, tf.size(token)
        heads, width = config.num_key_value_heads, config.head_dim
        query = tf.zeros([rows, heads, config.num_query_heads // heads, width])
        key = tf.zeros([rows, heads, 1, width])
        stop = tf.reduce_max(layer) + 1
        for run in decoder.pools.runs:
            _, x, query, key = tf.while_loop(
                lambda at, *_, run=run: at < tf.minimum(stop, run.end),
                functools.partial(body, run),
                (tf.constant(run.first), x, query, key),
            )
        return query, key

    def _scores(
        self,
        pool: PagePool,
        query: tf.Tensor,
        position: tf.Tensor,
        entries: tf.Tensor,
        layer: tf.Tensor,
        table: tf.Tensor,
        tails: Tails,
    ) -> tf.Tensor:
        """Scores of all entries, ``[B, K, G, S]``, where a row's layer is one of the pool's;
        anything elsewhere."""
        decoder, looking = self._decoder, query
        keys, codec = _keys(pool, table, layer), pool.codec.of_layers(layer)
        geometry = decoder.groups.groups[pool.group]
        scores = codec.scores(codec.prepare(query), keys, columns=True)
        if geometry.cache.policy.furthest is not None:
            mine = Layer(layer, layer, pool, feed=layer, sparse=False)
            looking = decoder.look_at_sinks(query, position[:, tf.newaxis], mine)
            sink = (entries < geometry.sinks)[:, tf.newaxis, tf.newaxis]
            at_sinks = codec.scores(codec.prepare(looking), keys, columns=True)
            scores = tf.where(sink, at_sinks, scores)
        if not codec.recent:
            return scores
        return self._with_exact(pool, scores, query, looking, position, entries, layer, tails)

    def _with_exact(
        self,
        pool: PagePool,
        scores: tf.Tensor,
        query: tf.Tensor,
        looking: tf.Tensor,
        position: tf.Tensor,
        entries: tf.Tensor,
        layer: tf.Tensor,
        tails: Tails,
    ) -> tf.Tensor:
        """``scores [B, K, G, S]`` with those of the tokens that are read exactly."""
        tail, codec = self._decoder.tail, pool.codec
        geometry = self._decoder.groups.groups[pool.group]
        keys, _ = tail.gather(tail.read(), tails, layer)
        exact = _FRESH.scores(query, {"codes": keys})
        sink = tf.range(tail.layout.entries) < min(codec.sinks, geometry.sinks)
        exact = tf.where(sink, _FRESH.scores(looking, {"codes": keys}), exact)
        entry = tf.maximum(tail.layout.entry_of(entries), 0)
        exact = tf.gather(tf.transpose(exact, [0, 3, 1, 2]), entry, batch_dims=1)
        near = self._near(codec, tails, position, entries)
        return tf.where(near[:, tf.newaxis, tf.newaxis], tf.transpose(exact, [0, 2, 3, 1]), scores)


def _row_in(pool: PagePool, layer: tf.Tensor) -> tf.Tensor:
    """How many of the pool's layers come before each of ``layer [B]``; the last where it is behind
    all of them."""
    before = tf.reduce_sum(tf.cast(layer[:, tf.newaxis] > tf.constant(pool.layers), tf.int32), 1)
    return tf.minimum(before, len(pool.layers) - 1)


def _keys(pool: PagePool, table: tf.Tensor, layer: tf.Tensor) -> Coded:
    """Coded keys of all entries in each row's layer, parts ``[B, K, ..., S]``."""
    rows, columns = tf.shape(table)[0], table.shape[1]
    layers = tf.repeat(_row_in(pool, layer), columns)
    keys, _ = pool.gather(pool.read(), tf.reshape(table, [-1]), layers)

    def join(part: tf.Tensor) -> tf.Tensor:
        heads, *inner, size = part.shape[1:]
        pages = tf.reshape(part, [rows, columns, heads, *inner, size])
        axes = range(3, 3 + len(inner))
        pages = tf.transpose(pages, [0, 2, *axes, 1, 3 + len(inner)])
        return tf.reshape(pages, [rows, heads, *inner, columns * size])

    return {name: join(part) for name, part in keys.items()}

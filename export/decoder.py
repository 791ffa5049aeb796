"""The decoder as the artifact runs it: loops over stacked layers, reading pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.export.geometry import CacheGeometry
from tfkv.export.packed_weights import PackedWeights
from tfkv.export.page_pool import PagePool, Parts
from tfkv.layers import attention
from tfkv.layers.attention import Partial
from tfkv.layers.codecs import FloatCodec
from tfkv.layers.normalization import rms_normalize
from tfkv.layers.rotary import rotary_angles, rotate
from tfkv.layers.shapes import keep_shape, shape_of

_FRESH = FloatCodec("float32")


class PageScan(NamedTuple):
    """The pages that a batch reads, in one list.

    Attributes:
        pages: int32 ``[A]``, physical pages.
        owners: int32 ``[A]``, row that reads each; −1 behind the last.
        bases: int32 ``[A]``, position of each page's first token.
        count: int32, how many of the list count.
        start: int32 ``[B]``, positions below it are read from pages.
    """

    pages: tf.Tensor
    owners: tf.Tensor
    bases: tf.Tensor
    count: tf.Tensor
    start: tf.Tensor


class Weights(NamedTuple):
    """`PackedWeights` read once for a computation."""

    embedding: tf.Tensor
    output: tf.Tensor
    final_norm: tf.Tensor
    stacked: dict[str, tf.Tensor]


class PackedDecoder:
    """Runs a packed decoder over a page pool.

    Args:
        config: Architecture.
        weights: Packed weights.
        pool: Where keys and values lie.
        geometry: Which positions lie where, and who sees them.
        scan_pages: Pages read at once; the scan's cost follows live pages in such steps.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: PackedWeights,
        pool: PagePool,
        geometry: CacheGeometry,
        scan_pages: int,
    ) -> None:
        self.config = config
        self.weights = weights
        self.pool = pool
        self.geometry = geometry
        self.scan_pages = scan_pages

    def read_weights(self) -> Weights:
        """All weights as tensors, for use inside loops."""
        w = self.weights
        names = ("qkv", "attention_output", "gate_up", "down", "attention_norm", "feedforward_norm")
        return Weights(
            w.embedding.read_value(),
            w.output.read_value(),
            w.final_norm.read_value(),
            {name: getattr(w, name).read_value() for name in names},
        )

    def scan(self, table: tf.Tensor, start: tf.Tensor, reads: tf.Tensor) -> PageScan:
        """Lists the live pages of rows.

        Args:
            table: int32 ``[B, columns]``, block-table rows.
            start: int32 ``[B]``, first position that is not on pages.
            reads: bool ``[B]``, whether the row reads at all.
        """
        rows, columns = shape_of(table)
        span = self.geometry.page_span(start)
        sinks, first, end = tf.unstack(span, axis=-1)
        counts = tf.where(reads, sinks + end - first, 0)
        ends = tf.cumsum(counts)
        item = tf.range(rows * columns + self.scan_pages)
        owner = tf.reduce_sum(tf.cast(item[:, tf.newaxis] >= ends, tf.int32), axis=1)
        live = owner < rows
        owner = tf.minimum(owner, rows - 1)
        nth = item - tf.gather(ends - counts, owner)
        own_sinks = tf.gather(sinks, owner)
        page = tf.where(nth < own_sinks, nth, tf.gather(first, owner) + nth - own_sinks)
        column = tf.where(live, self.geometry.column_of(page), 0)
        physical = tf.gather(tf.reshape(table, [-1]), owner * columns + column)
        return PageScan(
            tf.where(live, physical, 0),
            tf.where(live, owner, -1),
            page * self.geometry.page_size,
            ends[-1],
            start,
        )

    def attend_pages(
        self,
        parts: Parts,
        layer: tf.Tensor,
        queries: tf.Tensor,
        positions: tf.Tensor,
        scan: PageScan,
    ) -> Partial:
        """Attention of grouped ``queries [B, K, Q, H]`` over the pages of a scan."""
        step = self.scan_pages
        rows = shape_of(queries)[0]

        def body(index: tf.Tensor, *so_far: tf.Tensor) -> tuple[tf.Tensor, ...]:
            def take(x: tf.Tensor) -> tf.Tensor:
                return tf.slice(x, [index * step], [step])

            owners, bases = take(scan.owners), take(scan.bases)
            owned = tf.maximum(owners, 0)
            keys = bases[:, tf.newaxis] + tf.range(self.geometry.page_size)
            stored = keys < tf.gather(scan.start, owned)[:, tf.newaxis]
            keys = tf.where(stored & (owners >= 0)[:, tf.newaxis], keys, -1)
            mask = self.geometry.mask(tf.gather(positions, owned), keys)
            part = attention.attend(
                tf.gather(queries, owned),
                *self.pool.gather(parts, take(scan.pages), layer),
                mask,
                self.pool.codec,
            )
            part = attention.merge_by_owner(part, owners, rows)
            merged = attention.merge(Partial(*so_far), part)
            return (index + 1, *map(keep_shape, merged, so_far))

        trips = (scan.count + step - 1) // step
        state = (tf.constant(0), *attention.empty_partial(queries))
        state = tf.while_loop(lambda index, *_: index < trips, body, state)
        return Partial(*state[1:])

    def layers(
        self,
        weights: Weights,
        x: tf.Tensor,
        positions: tf.Tensor,
        fresh: tuple[tf.TensorArray, tf.TensorArray],
        attend_fresh: Callable[..., tuple[tf.Tensor, tf.Tensor, Partial]],
        read_pages: Callable[[tf.Tensor, tf.Tensor], Partial],
    ) -> tuple[tf.Tensor, tuple[tf.TensorArray, tf.TensorArray]]:
        """All decoder blocks.

        Args:
            weights: Of `read_weights`.
            x: ``[A, T, D]``.
            positions: int32 ``[A, T]``.
            fresh: Keys and values not on pages yet, one element a layer.
            attend_fresh: ``(old keys, old values, keys, values, queries)`` to the new
                elements of `fresh` and the attention over them.
            read_pages: ``(layer, queries)`` to the attention over pages.

        Returns:
            Output ``[A, T, D]`` before the final norm, and `fresh` with the new tokens.
        """
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_max_wavelength)
        heads = self.config.num_query_heads

        def body(
            layer: tf.Tensor, x: tf.Tensor, keys: tf.TensorArray, values: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray, tf.TensorArray]:
            w = {name: value[layer] for name, value in weights.stacked.items()}
            q, k, v = self._project(w, x, angles)
            q = attention.group_queries(q, self.config.num_key_value_heads)
            on_pages = read_pages(layer, q)
            new_k, new_v, part = attend_fresh(keys.read(layer), values.read(layer), k, v, q)
            seen = attention.normalize(attention.merge(on_pages, part))
            seen = attention.ungroup_output(seen, heads)
            seen = tf.reshape(seen, [*shape_of(x)[:2], heads * self.config.head_dim])
            after = x + _linear(seen, w["attention_output"])
            after = after + self._feed_forward(w, after)
            return (
                layer + 1,
                keep_shape(after, x),
                keys.write(layer, new_k),
                values.write(layer, new_v),
            )

        _, x, *fresh_out = tf.while_loop(
            lambda layer, *_: layer < self.config.num_layers, body, (tf.constant(0), x, *fresh)
        )
        return x, (fresh_out[0], fresh_out[1])

    def _project(
        self, w: dict[str, tf.Tensor], x: tf.Tensor, angles: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Queries ``[A, T, N, H]``, keys and values ``[A, T, K, H]`` as they are stored."""
        c = self.config
        heads = [c.num_query_heads, c.num_key_value_heads, c.num_key_value_heads]
        normal = rms_normalize(x, w["attention_norm"], c.rms_epsilon)
        fused = _linear(normal, w["qkv"])
        q, k, v = tf.split(
            tf.reshape(fused, [*shape_of(x)[:2], sum(heads), c.head_dim]), heads, axis=2
        )
        codec = self.pool.codec
        return rotate(q, *angles), codec.round_trip(rotate(k, *angles)), codec.round_trip(v)

    def _feed_forward(self, w: dict[str, tf.Tensor], x: tf.Tensor) -> tf.Tensor:
        normal = rms_normalize(x, w["feedforward_norm"], self.config.rms_epsilon)
        gate, up = tf.split(_linear(normal, w["gate_up"]), 2, axis=-1)
        return _linear(tf.nn.silu(gate) * up, w["down"])

    def logits(self, weights: Weights, x: tf.Tensor) -> tf.Tensor:
        """Logits ``[..., V]`` of block outputs ``[..., D]``."""
        normal = rms_normalize(x, weights.final_norm, self.config.rms_epsilon)
        return _linear(normal, weights.output)

    def fresh_store(
        self, rows: int | tf.Tensor, width: int
    ) -> tuple[tf.TensorArray, tf.TensorArray]:
        """Room for `width` tokens of `rows` rows that are not on pages yet, layer by layer."""
        c = self.config
        shape = [c.num_key_value_heads, width, c.head_dim]
        zeros = tf.zeros([c.num_layers, rows, *shape])
        known = rows if isinstance(rows, int) else None
        keys, values = (
            tf.TensorArray(
                tf.float32, c.num_layers, clear_after_read=False, element_shape=[known, *shape]
            ).unstack(zeros)
            for _ in range(2)
        )
        return keys, values

    def prefill_piece(
        self,
        weights: Weights,
        parts: Parts,
        tokens: tf.Tensor,
        positions: tf.Tensor,
        table: tf.Tensor,
        start: tf.Tensor,
    ) -> tuple[tf.Tensor, Parts]:
        """Fills one piece of one row.

        Args:
            weights: Of `read_weights`.
            parts: The pool.
            tokens: int32 ``[T]``.
            positions: int32 ``[T]``; −1 = not a token.
            table: int32 ``[columns]``, the row's pages.
            start: int32, position of the piece's first token.

        Returns:
            Block outputs ``[T, D]`` and the pool with the piece in it.
        """
        width = tokens.shape[0]
        scan = self.scan(table[tf.newaxis], start[tf.newaxis], tf.constant([True]))
        queries_at = positions[tf.newaxis]
        mask = self.geometry.mask(queries_at, queries_at)

        def attend_fresh(
            _k: tf.Tensor, _v: tf.Tensor, k: tf.Tensor, v: tf.Tensor, q: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, Partial]:
            k, v = (tf.transpose(x, [0, 2, 1, 3]) for x in (k, v))
            coded = ({"codes": k}, {"codes": v})
            return k, v, attention.attend(q, *coded, mask, _FRESH)

        x = tf.gather(weights.embedding, tokens)[tf.newaxis]
        x, fresh = self.layers(
            weights,
            x,
            queries_at,
            self.fresh_store(1, width),
            attend_fresh,
            lambda layer, q: self.attend_pages(parts, layer, q, queries_at, scan),
        )
        parts = self.commit(parts, fresh, table[tf.newaxis], queries_at)
        return x[0], parts

    def commit(
        self,
        parts: Parts,
        fresh: tuple[tf.TensorArray, tf.TensorArray],
        table: tf.Tensor,
        positions: tf.Tensor,
    ) -> Parts:
        """Writes fresh tokens to pages.

        Args:
            parts: The pool.
            fresh: Keys and values, ``[B, K, T, H]`` a layer.
            table: int32 ``[B, columns]``.
            positions: int32 ``[B, T]``; −1 is written nowhere.
        """
        size = self.geometry.page_size
        page = tf.maximum(positions, 0) // size
        physical = tf.gather(table, self.geometry.column_of(page), batch_dims=1)
        physical = tf.where(positions >= 0, physical, 0)
        keys, values = (
            tf.reshape(
                tf.transpose(array.stack(), [0, 1, 3, 2, 4]),
                [self.config.num_layers, -1, self.config.num_key_value_heads, self.config.head_dim],
            )
            for array in fresh
        )
        return self.pool.write(
            parts,
            tf.reshape(physical, [-1]),
            tf.reshape(tf.maximum(positions, 0) % size, [-1]),
            keys,
            values,
        )


def _linear(x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """``x [..., in]`` times ``weight [out, in]``.

    One matrix product: left to itself, a product with a batch axis would repeat the weights
    for each row.
    """
    *lead, width = shape_of(x)
    flat = tf.matmul(tf.reshape(x, [-1, width]), weight, transpose_b=True)
    return tf.reshape(flat, [*lead, weight.shape[0]])

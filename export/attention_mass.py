"""How much attention each stored token got, for policies that evict by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.export import page_scan
from tfkv.export.geometry import CacheGeometry
from tfkv.export.kept_tokens import KeptTokens
from tfkv.export.layer_options import scoring_of
from tfkv.export.page_pool import PagePool, Parts
from tfkv.export.page_scan import PageList
from tfkv.layers import attention
from tfkv.layers.shapes import shape_of

#: A part of the mass, and some pages or units, to that part with their mass in it.
_Add = Callable[[tf.Tensor, PageList], tf.Tensor]


class Questions(NamedTuple):
    """Queries of a batch whose attention is added up.

    Attributes:
        slot: int32 ``[B]``.
        table: int32 ``[B, columns]``, pages of the rows.
        floor: int32 ``[B]``, positions below it are not on pages.
        end: int32 ``[B]``, nor are positions from here on.
        since: int32 ``[B]``, tokens from this position on have got nothing before.
        positions: int32 ``[B, T]``; −1 = none.
        queries: float32 ``[L, B, N, T, H + 1]``: the queries, and as one channel more what
            `attention.log_sum` says of all that they saw.
    """

    slot: tf.Tensor
    table: tf.Tensor
    floor: tf.Tensor
    end: tf.Tensor
    since: tf.Tensor
    positions: tf.Tensor
    queries: tf.Tensor


class _OfLayer(NamedTuple):
    """What one layer is asked: number, prepared queries ``[B, K, Q, H]`` and their sums
    ``[B, K, Q]``."""

    number: tf.Tensor
    prepared: tf.Tensor
    log_sums: tf.Tensor


class AttentionMass:
    """Adds what queries looked at to the mass of what is stored; see `KeptTokens` for where it
    lies.

    It looks at keys once more when tokens are written, a whole chunk of queries at a time, and
    at codes alone. By then it is known what each query's attention sums to, so that weights need
    neither a second look nor a correction. Decode steps stay as they are, but for that sum.

    Args:
        config: Architecture.
        geometry: Where positions lie.
        pool: Keys of all layers.
        kept: Where the mass lies.
        scan_pages: Pages looked at at once.
    """

    def __init__(
        self,
        config: DecoderConfig,
        geometry: CacheGeometry,
        pool: PagePool,
        kept: KeptTokens,
        scan_pages: int,
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.pool = pool
        self.kept = kept
        self.scan_pages = scan_pages

    def add(self, parts: Parts, asked: Questions) -> Parts:
        """The cache with the attention of some queries in its mass, their own tokens stored."""
        reads = tf.reduce_any(asked.positions >= 0, axis=1)
        pages = page_scan.pages_of_rows(
            self.geometry, asked.table, asked.end, asked.floor, reads, self.scan_pages
        )
        end = tf.where(tf.reduce_any(reads), self.config.num_layers, 0)

        def body(number: tf.Tensor, mass: dict[str, tf.Tensor]) -> tuple:
            layer = self._of_layer(number, asked)
            added = {
                "pages": self._add_to_pages(parts, asked, layer, pages, mass["pages"]),
                "kept": self._add_to_kept(parts, asked, layer, reads, mass["kept"]),
            }
            return number + 1, added

        state = (tf.constant(0), dict(parts["mass"]))
        _, mass = tf.while_loop(lambda number, _: number < end, body, state)
        return {**parts, "mass": mass}

    def _of_layer(self, number: tf.Tensor, asked: Questions) -> _OfLayer:
        config = self.config
        both = tf.gather(asked.queries, number)
        rows, width = shape_of(both)[0], shape_of(both)[2]
        grouped = config.query_group_size * width
        both = tf.reshape(both, [rows, config.num_key_value_heads, grouped, config.head_dim + 1])
        codec = self.pool.codec.of_layers(number)
        return _OfLayer(number, codec.prepare(both[..., :-1]), both[..., -1])

    def _add_to_pages(
        self, parts: Parts, asked: Questions, layer: _OfLayer, pages: PageList, mass: tf.Tensor
    ) -> tf.Tensor:
        kept, size = self.kept, self.geometry.page_size
        scoring = scoring_of(self.config, layer.number)
        codec = self.pool.codec.of_layers(layer.number)

        def add(mass: tf.Tensor, some: PageList) -> tf.Tensor:
            owned, live = tf.maximum(some.owners, 0), some.owners >= 0
            end, floor, since = (
                tf.gather(limit, owned)[:, tf.newaxis]
                for limit in (asked.end, asked.floor, asked.since)
            )
            keys_at = some.bases[:, tf.newaxis] + tf.range(size)
            stored = (keys_at >= floor) & (keys_at < end) & live[:, tf.newaxis]
            keys_at = tf.where(stored, keys_at, -1)
            asked_at = tf.gather(asked.positions, owned)
            mask = scoring.narrow(self.geometry.mask(asked_at, keys_at), asked_at, keys_at)
            keys, _ = self.pool.gather(parts, some.pages, layer.number)
            weights = attention.shares(
                tf.gather(layer.prepared, owned),
                keys,
                mask,
                codec,
                tf.gather(layer.log_sums, owned),
                scoring.between(asked_at, keys_at),
            )
            slot = tf.where(live, tf.gather(asked.slot, owned), kept.slots)
            rows = kept.mass_rows(slot, some.bases // size, layer.number)
            old = tf.where((keys_at < since)[:, tf.newaxis], tf.gather(mass, rows), 0.0)
            new = kept.policy.accumulate(old, weights)
            return tf.tensor_scatter_nd_update(mass, rows[:, tf.newaxis], new)

        return _over(pages, mass, add, self.scan_pages)

    def _add_to_kept(
        self, parts: Parts, asked: Questions, layer: _OfLayer, reads: tf.Tensor, mass: tf.Tensor
    ) -> tf.Tensor:
        kept, heads = self.kept, self.config.num_key_value_heads
        step = self.scan_pages * heads
        floor = tf.where(reads, asked.floor, 0)
        units = kept.units_to_read(layer.number, asked.slot, floor, step)
        rows, _, grouped, width = shape_of(layer.prepared)
        prepared = tf.reshape(layer.prepared, [rows * heads, 1, grouped, width])
        log_sums = tf.reshape(layer.log_sums, [rows * heads, 1, grouped])
        scoring = scoring_of(self.config, layer.number)

        def add(mass: tf.Tensor, some: PageList) -> tf.Tensor:
            owned = tf.maximum(some.owners, 0)
            keys, _, keys_at = kept.gather(parts, some.pages)
            asked_at = tf.gather(asked.positions, owned // heads)
            mask = scoring.narrow(self.geometry.mask(asked_at, keys_at), asked_at, keys_at)
            weights = attention.shares(
                tf.gather(prepared, owned),
                keys,
                mask,
                self.pool.codec,
                tf.gather(log_sums, owned),
                scoring.of_owners(owned % heads).between(asked_at, keys_at),
            )
            old = tf.gather(mass, some.pages)[:, tf.newaxis]
            new = kept.policy.accumulate(old, weights)[:, 0]
            # Those behind the last of the list lie in the spare slot.
            rows = tf.where(some.owners >= 0, some.pages, kept.slots * kept.units)
            return tf.tensor_scatter_nd_update(mass, rows[:, tf.newaxis], new)

        return _over(units, mass, add, step)


def _over(pages: PageList, mass: tf.Tensor, add: _Add, step: int) -> tf.Tensor:
    """The mass after all pages of a list, `step` of them at a time."""

    def body(index: tf.Tensor, mass: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return index + 1, add(mass, pages.part(index, step))

    trips = pages.parts(step)
    return tf.while_loop(lambda index, _: index < trips, body, (tf.constant(0), mass))[1]

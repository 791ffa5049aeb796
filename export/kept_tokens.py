"""What a policy that evicts by score has kept of each session: beside the pages, a slot each."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import ConfigError
from tfkv.export.geometry import CacheGeometry
from tfkv.export.layer_options import scoring_of
from tfkv.export.layer_pools import as_strings
from tfkv.export.matrices import Matrix
from tfkv.export.page_pool import Parts, rows_of_tokens, scatter_rows
from tfkv.export.page_scan import PageList
from tfkv.export.transient import TransientVariable
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.per_layer import CalibrationTables, layer_caches
from tfkv.layers.policies import EvictingPolicy, Seen
from tfkv.layers.policies.evicting_policy import ABSENT
from tfkv.layers.shapes import shape_of

#: Parts of the cache that are kept here, by side of the pool.
_SIDES = {"keys": "kept_keys", "values": "kept_values"}


class Evicted(NamedTuple):
    """One row whose pages go into what is kept.

    Attributes:
        slot: int32.
        table: int32 ``[columns]``, its pages.
        floor: int32, positions below it went before.
        start: int32, positions below it go now.
    """

    slot: tf.Tensor
    table: tf.Tensor
    floor: tf.Tensor
    start: tf.Tensor


class _Entries(NamedTuple):
    """All entries of a row in one layer.

    Attributes:
        coded: Codes by side and part, ``[K, S, ...]``.
        positions: int32 ``[K, S]``; −1 = none.
        mass: The attention that they got, float32 ``[K, S]``, where the policy adds it up.
    """

    coded: Parts
    positions: tf.Tensor
    mass: tuple[tf.Tensor, ...]


class KeptTokens:
    """Holds the entries that survived evictions, for each slot, layer and KV head its budget.

    New tokens are written to pages, as with any policy. When there are too many, the pages of
    all layers, and what was kept before, are judged by the policy, and the best of each head
    are moved here as they are coded; the pages are free again. Every head has as many entries
    as its budget, in *units* of a page's tokens, so that heads with budgets of their own cost
    no more than the sum.

    Parts of the cache, beside those of `PagePool`: ``kept_keys`` ``[(slots + 1) · U, ..., C]``
    and ``kept_values`` ``[(slots + 1) · U, C, ...]`` over the U units of a slot; under ``kept``
    the ``positions`` of the entries, int32 ``[(slots + 1) · U, C]``, −1 = none, and where the
    policy looks at the newest queries, ``queries`` ``[(slots + 1) · L, N, W, H]`` and their
    positions ``asked_at`` ``[slots + 1, W]``, one higher. Where it adds up attention (see
    `AttentionMass`), under ``mass`` what the entries got, ``kept``
    ``[(slots + 1) · U, C]``, and what tokens on the slot's columns got, ``pages``
    ``[(slots + 1) · columns · L, K, C]``: of the slot and not of the page, since branches share
    pages and ask questions of their own.

    Args:
        config: Architecture.
        geometry: Policy, codec, and where positions lie.
        engine: Slots, and the budgets of heads.

    Raises:
        ConfigError: The policy cannot be had in an artifact.
    """

    def __init__(
        self, config: DecoderConfig, geometry: CacheGeometry, engine: EngineConfig
    ) -> None:
        self.config = config
        self.geometry = geometry
        self.slots = engine.slots
        self.variables: dict[str, dict[str, TransientVariable]] = {}
        policy = geometry.cache.policy
        self.evicts = isinstance(policy, EvictingPolicy)
        self.window, self.accumulates, self.repeats = 0, False, False
        if not isinstance(policy, EvictingPolicy):
            return
        self.policy = policy
        self.window = policy.observed
        self.accumulates, self.repeats = policy.accumulates, policy.repeats
        self.budgets = budgets_of(config, policy, engine.head_budgets)
        self.size = size = geometry.page_size
        units = -(-self.budgets // size)
        #: Units of a slot (axis U), and most of one head.
        self.units, self.most = int(units.sum()), int(units.max())
        self._first_of_head = np.cumsum(units.ravel()).reshape(units.shape) - units
        self._head_of_unit = np.repeat(np.indices(units.shape)[1].ravel(), units.ravel())
        self._of_layer = units.sum(axis=1)
        self._units = units
        spec = {
            side: codec.spec(config.head_dim)
            for side, codec in geometry.cache.codec.sides().items()
        }
        rows = (engine.slots + 1) * self.units
        shapes: dict[str, dict[str, tuple[tuple[int, ...], tf.DType]]] = {
            "kept_keys": {n: ((rows, *p.shape, size), p.dtype) for n, p in spec["keys"].items()},
            "kept_values": {
                n: ((rows, size, *p.shape), p.dtype) for n, p in spec["values"].items()
            },
            "kept": {"positions": ((rows, size), tf.int32)},
        }
        if self.window:
            heads = config.num_query_heads
            queries = ((engine.slots + 1) * config.num_layers, heads, self.window, config.head_dim)
            shapes["kept"]["queries"] = (queries, tf.float32)
            shapes["kept"]["asked_at"] = ((engine.slots + 1, self.window), tf.int32)
        if self.accumulates:
            columns = (engine.slots + 1) * geometry.columns * config.num_layers
            shapes["mass"] = {
                "kept": ((rows, size), tf.float32),
                "pages": ((columns, config.num_key_value_heads, size), tf.float32),
            }
        self.variables = {
            part: {
                name: TransientVariable(f"{part}_{name}", shape, dtype)
                for name, (shape, dtype) in inner.items()
            }
            for part, inner in shapes.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of it, all slots."""
        return sum(v.nbytes for inner in self.variables.values() for v in inner.values())

    def read(self) -> Parts:
        """All of it as tensors."""
        return {
            part: {name: variable.read() for name, variable in inner.items()}
            for part, inner in self.variables.items()
        }

    def assign(self, parts: Parts) -> None:
        """Publishes what a computation wrote."""
        for part, inner in self.variables.items():
            for name, variable in inner.items():
                variable.assign(parts[part][name])

    def begin(self, parts: Parts, slot: tf.Tensor, fresh: tf.Tensor) -> Parts:
        """The cache in which the sessions of ``slot [B]`` that are ``fresh [B]`` were asked
        nothing yet."""
        if not (self.evicts and self.window):
            return parts
        asked = parts["kept"]["asked_at"]
        rows = tf.where(fresh, slot, self.slots)[:, tf.newaxis]
        none = tf.zeros([shape_of(slot)[0], self.window], tf.int32)
        asked = tf.tensor_scatter_nd_update(asked, rows, none)
        return {**parts, "kept": {**parts["kept"], "asked_at": asked}}

    def copy(self, source: tf.Tensor, target: tf.Tensor) -> None:
        """Copies all that slots keep to other slots, outside XLA."""
        for inner in self.variables.values():
            for variable in inner.values():
                each = variable.shape[0] // (self.slots + 1)
                rows = (slots[:, tf.newaxis] * each + tf.range(each) for slots in (source, target))
                taken, given = (tf.reshape(r, [-1]) for r in rows)
                tf.raw_ops.ResourceScatterUpdate(
                    resource=variable.resource_handle,
                    indices=given,
                    updates=tf.gather(variable.read(), taken),
                )

    @property
    def query_channels(self) -> int:
        """Channels of the queries that it is shown; 0 = it is shown none."""
        if self.accumulates:
            return self.config.head_dim + 1
        return self.config.head_dim if self.window else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of the mass of one page's tokens, all layers; 0 where there is none."""
        heads = self.config.num_layers * self.config.num_key_value_heads
        return 4 * heads * self.geometry.page_size if self.accumulates else 0

    def read_bytes(self, slot: tf.Tensor, page: tf.Tensor) -> tf.Tensor:
        """The mass of logical ``page [B]`` of each slot as it is stored, string ``[B]``."""
        found = tf.gather(self.variables["mass"]["pages"].read(), self._rows_of(slot, page))
        numbers = tf.reshape(tf.bitcast(found, tf.uint8), [-1, self.page_bytes])
        return as_strings(numbers, self.page_bytes)

    def write_bytes(self, slot: tf.Tensor, page: tf.Tensor, data: tf.Tensor, before: int) -> None:
        """Puts back what `read_bytes` gave, from ``data [B]`` that has so many bytes before it."""
        variable = self.variables["mass"]["pages"]
        numbers = tf.io.decode_raw(data, tf.uint8, fixed_length=before + self.page_bytes)
        shape = [-1, self.config.num_layers, *variable.shape[1:], 4]
        tf.raw_ops.ResourceScatterUpdate(
            resource=variable.resource_handle,
            indices=self._rows_of(slot, page),
            updates=tf.bitcast(tf.reshape(numbers[:, before:], shape), tf.float32),
        )

    def _rows_of(self, slot: tf.Tensor, page: tf.Tensor) -> tf.Tensor:
        """Rows of ``mass/pages``, int32 ``[B, L]``."""
        return self.mass_rows(slot, page, 0)[:, tf.newaxis] + tf.range(self.config.num_layers)

    # --- when, and how far ---------------------------------------------------------------

    def due(
        self, floor: tf.Tensor, start: tf.Tensor, count: tf.Tensor, reads_on: bool
    ) -> tf.Tensor:
        """Whether rows have to evict before so many tokens more; bool, broadcast.

        Args:
            floor: int32, positions below it are not on pages any more.
            start: int32, positions below it are stored.
            count: int32, tokens to come.
            reads_on: Whether they are a piece of a prompt, which a policy may want whole.
        """
        policy = self.policy
        room = tf.where(floor > 0, policy.interval, policy.budget + policy.interval)
        if policy.whole_prompt and reads_on:
            room = tf.zeros_like(room) + self.geometry.layout.entries - 2 * self.size
        return (start - floor + count > room) & (count > 0)

    # --- reading -------------------------------------------------------------------------

    def units_to_read(
        self, layer: tf.Tensor, slot: tf.Tensor, floor: tf.Tensor, step: int
    ) -> PageList:
        """The units of all rows in one layer, as pages whose owners are ``row · K + head``."""
        rows = shape_of(slot)[0]
        count = tf.gather(tf.constant(self._of_layer, tf.int32), layer)
        first = tf.gather(tf.constant(self._first_of_head[:, 0], tf.int32), layer)
        most = int(self._of_layer.max())
        item = tf.range(rows * most + step)
        row = tf.minimum(item // count, rows - 1)
        unit = first + item % count
        live = (item < rows * count) & (tf.gather(floor, row) > 0)
        head = tf.gather(tf.constant(self._head_of_unit, tf.int32), unit)
        pages = tf.gather(slot, row) * self.units + unit
        total = tf.where(tf.reduce_any(floor > 0), rows * count, 0)
        heads = self.config.num_key_value_heads
        owners = tf.where(live, row * heads + head, -1)
        return PageList(tf.where(live, pages, 0), owners, tf.zeros_like(pages), total)

    def gather(
        self, parts: Parts, units: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor], tf.Tensor]:
        """Coded keys ``[A, 1, ..., C]`` and values ``[A, 1, C, ...]`` of ``units [A]``, and the
        positions ``[A, C]``."""
        keys, values = (
            {name: tf.gather(part, units)[:, tf.newaxis] for name, part in parts[side].items()}
            for side in _SIDES.values()
        )
        return keys, values, tf.gather(parts["kept"]["positions"], units)

    def mass_rows(self, slot: tf.Tensor, pages: tf.Tensor, layer: tf.Tensor | int) -> tf.Tensor:
        """Rows of ``mass/pages`` that belong to logical pages of slots in a layer; int32."""
        column = self.geometry.column_of(pages)
        return (slot * self.geometry.columns + column) * self.config.num_layers + layer

    # --- writing -------------------------------------------------------------------------

    def observe(
        self, parts: Parts, slot: tf.Tensor, positions: tf.Tensor, queries: tf.Tensor
    ) -> Parts:
        """The cache with the newest queries in it.

        Args:
            parts: The cache.
            slot: int32 ``[B]``.
            positions: int32 ``[B, T]``; −1 = none.
            queries: As of `Fresh`.
        """
        if not (self.evicts and self.window):
            return parts
        newest = tf.reduce_max(positions, axis=1, keepdims=True)
        stays = (positions >= 0) & (positions > newest - self.window)
        place = tf.where(stays, positions % self.window, 0)
        owner = tf.where(stays, slot[:, tf.newaxis], self.slots)
        flat_owner, flat_place = tf.reshape(owner, [-1]), tf.reshape(place, [-1])
        heads = self.config.num_query_heads
        rows, offsets = rows_of_tokens(self.config, flat_owner, flat_place, heads)
        if self.accumulates:
            queries = queries[..., :-1]
        by_token = tf.transpose(queries, [0, 1, 3, 2, 4])
        kept = parts["kept"]
        where = tf.stack([flat_owner, flat_place], axis=1)
        asked = tf.tensor_scatter_nd_update(
            kept["asked_at"], where, tf.reshape(positions + 1, [-1])
        )
        kept = {
            **kept,
            "queries": scatter_rows(kept["queries"], rows, offsets, by_token),
            "asked_at": asked,
        }
        return {**parts, "kept": kept}

    def evict(self, parts: Parts, row: Evicted, output: Matrix) -> Parts:
        """The cache in which a row's pages were judged, and the best moved to its slot.

        Args:
            parts: The cache.
            row: Whose.
            output: ``[L, D, N · H]``, output projections.
        """
        page = row.floor // self.size + tf.range(self.geometry.columns)
        pages = tf.gather(row.table, self.geometry.column_of(page))
        at = tf.reshape(page[:, tf.newaxis] * self.size + tf.range(self.size), [-1])
        at = tf.where((at >= row.floor) & (at < row.start), at, -1)
        pool = {side: parts[side] for side in _SIDES}

        def body(layer: tf.Tensor, kept: Parts) -> tuple[tf.Tensor, Parts]:
            units, there = self._units_of(layer, row.slot)
            old_at = tf.where(
                there[..., tf.newaxis] & (row.floor > 0),
                tf.gather(kept["kept"]["positions"], units),
                -1,
            )
            coded = {
                side: {
                    name: self._entries(side, tf.gather(kept[own][name], units), part, pages, layer)
                    for name, part in pool[side].items()
                }
                for side, own in _SIDES.items()
            }
            heads = self.config.num_key_value_heads
            positions = tf.concat(
                [tf.reshape(old_at, [heads, -1]), tf.tile(at[tf.newaxis], [heads, 1])], axis=1
            )
            # Side by side, as in a store without gaps: some scores look at neighbours.
            last = tf.int32.max
            order = tf.argsort(tf.where(positions < 0, last, positions), axis=1, stable=True)
            entries = _Entries(coded, positions, self._mass_of(kept, units, row, page, layer))
            entries = tf.nest.map_structure(lambda x: tf.gather(x, order, batch_dims=1), entries)
            chosen = self._choose(entries, layer, row, kept["kept"], output)
            return layer + 1, self._move(kept, entries, chosen, units, there)

        kept = {name: parts[name] for name in self.variables}
        kept = tf.while_loop(
            lambda layer, _: layer < self.config.num_layers, body, (tf.constant(0), kept)
        )[1]
        return {**parts, **kept}

    def _units_of(self, layer: tf.Tensor, slot: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Units of each head of a slot, int32 ``[K, most]``, and which of them there are; those
        that are not lie in the spare slot."""
        first = tf.gather(tf.constant(self._first_of_head, tf.int32), layer)[:, tf.newaxis]
        count = tf.gather(tf.constant(self._units, tf.int32), layer)[:, tf.newaxis]
        number = tf.range(self.most)
        there = number < count
        return tf.where(there, slot * self.units + first + number, self.slots * self.units), there

    def _entries(
        self, side: str, own: tf.Tensor, part: tf.Tensor, pages: tf.Tensor, layer: tf.Tensor
    ) -> tf.Tensor:
        """A part of the codes of all entries, kept ones before those on pages, ``[K, S, ...]``."""
        paged = tf.gather(part, pages * self.config.num_layers + layer)
        axes, width = ([1, 0, 2, 3], part.shape[3])
        if side == "keys":  # a token a column
            own = tf.transpose(own, [0, 1, 3, 2])
            axes, width = ([1, 0, 3, 2], part.shape[2])
        both = (own, tf.transpose(paged, axes))
        heads = self.config.num_key_value_heads
        return tf.concat([tf.reshape(side, [heads, -1, width]) for side in both], axis=1)

    def _mass_of(
        self, kept: Parts, units: tf.Tensor, row: Evicted, page: tf.Tensor, layer: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """What all entries got, kept ones before those on pages, float32 ``[K, S]``; nothing
        where the policy does not ask."""
        if not self.accumulates:
            return ()
        heads = self.config.num_key_value_heads
        paged = tf.gather(kept["mass"]["pages"], self.mass_rows(row.slot, page, layer))
        paged = tf.reshape(tf.transpose(paged, [1, 0, 2]), [heads, -1])
        own = tf.reshape(tf.gather(kept["mass"]["kept"], units), [heads, -1])
        return (tf.concat([own, paged], axis=1),)

    def _choose(
        self,
        entries: _Entries,
        layer: tf.Tensor,
        row: Evicted,
        kept: dict[str, tf.Tensor],
        output: Matrix,
    ) -> tf.Tensor:
        """Entries of each head that survive, ascending, int32 ``[K, most · C]``; S where there
        are fewer."""
        config, codec = self.config, self.geometry.cache.codec.of_layers(layer)
        coded, positions, mass = entries
        heads, group = config.num_key_value_heads, config.query_group_size
        queries = tf.zeros([1, heads, group, 0, config.head_dim])
        asked = tf.zeros([1, 0], tf.int32)
        if self.window:
            asked = tf.gather(kept["asked_at"], row.slot)[tf.newaxis]
            asked = tf.where(asked > row.start, 0, asked)
            queries = tf.gather(kept["queries"], row.slot * config.num_layers + layer)
            queries = tf.reshape(queries, [1, heads, group, self.window, config.head_dim])
        projection = tf.transpose(output.at(layer).floats())
        seen = Seen(
            keys=codec.keys.decode({n: x[tf.newaxis] for n, x in coded["keys"].items()}),
            values=codec.values.decode({n: x[tf.newaxis] for n, x in coded["values"].items()}),
            positions=positions[tf.newaxis],
            filled=row.start[tf.newaxis],
            queries=queries,
            asked_at=asked - 1,
            mass=mass[0][tf.newaxis] if mass else tf.zeros_like(positions[tf.newaxis], tf.float32),
            output_kernel=tf.reshape(projection, [heads, group, config.head_dim, -1]),
            rope=config.rope(0),
            scoring=scoring_of(config, layer),
        )
        worth = self.policy.worth(seen)[0]
        best = tf.math.top_k(worth, self.most * self.size)
        budget = tf.gather(tf.constant(self.budgets, tf.int32), layer)[:, tf.newaxis]
        good = (tf.range(self.most * self.size) < budget) & (best.values > ABSENT)
        return tf.sort(tf.where(good, best.indices, positions.shape[-1]), axis=-1)

    def _move(
        self,
        kept: Parts,
        entries: _Entries,
        chosen: tf.Tensor,
        units: tf.Tensor,
        there: tf.Tensor,
    ) -> Parts:
        """The cache in which the chosen entries are a slot's."""
        coded, positions, mass = entries
        size, most, heads = self.size, self.most, self.config.num_key_value_heads
        last = positions.shape[-1]
        index = tf.minimum(chosen, last - 1)
        rows = tf.reshape(units, [-1, 1])
        at = tf.where(chosen < last, tf.gather(positions, index, batch_dims=1), -1)
        at = tf.where(there[..., tf.newaxis], tf.reshape(at, [heads, most, size]), -1)

        def put(side: str, stored: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
            taken = tf.gather(part, index, batch_dims=1)
            taken = tf.reshape(taken, [heads * most, size, part.shape[2]])
            if side == "keys":
                taken = tf.transpose(taken, [0, 2, 1])
            return tf.tensor_scatter_nd_update(stored, rows, taken)

        moved = {
            own: {name: put(side, kept[own][name], part) for name, part in coded[side].items()}
            for side, own in _SIDES.items()
        }
        state = kept["kept"]
        at = tf.tensor_scatter_nd_update(
            state["positions"], rows, tf.reshape(at, [heads * most, size])
        )
        if mass:
            taken = tf.reshape(tf.gather(mass[0], index, batch_dims=1), [heads * most, size])
            stored = tf.tensor_scatter_nd_update(kept["mass"]["kept"], rows, taken)
            moved["mass"] = {**kept["mass"], "kept": stored}
        return {**kept, **moved, "kept": {**state, "positions": at}}


def budgets_of(
    config: DecoderConfig,
    policy: EvictingPolicy,
    given: tuple[tuple[int, ...], ...],
) -> np.ndarray:
    """Entries of each KV head of each layer, ``[L, K]``.

    Raises:
        ConfigError: The budgets are not of this model, or the policy needs a calibration that
            was not given.
    """
    shape = (config.num_layers, config.num_key_value_heads)
    if given:
        budgets = np.array(given)
        if budgets.shape != shape:
            raise ConfigError(
                f"`head_budgets` must be of {shape[0]} layers and {shape[1]} KV heads. Received: "
                f"shape={budgets.shape}."
            )
        return budgets
    if policy.caps:
        raise ConfigError(
            f"{policy.name!r} shares its budget out by table {policy.caps!r} of a calibration. "
            "Make one with `tfkv calibrate` and pass it, or give caps='' for equal budgets."
        )
    layers = [policy.at_layer(index, *shape, None) for index in range(shape[0])]
    return np.array([[layer.budget] * shape[1] for layer in layers])


def caches_of(
    config: DecoderConfig,
    cache: CacheSpec,
    head_budgets: tuple[tuple[int, ...], ...],
    calibration: CalibrationTables | None = None,
    exceptions: tuple[str, ...] = (),
) -> list[CacheSpec]:
    """The cache of each layer of a Keras model that keeps what an engine keeps."""
    policy, heads = cache.policy, config.num_key_value_heads
    if not (isinstance(policy, EvictingPolicy) and head_budgets):
        return layer_caches(cache, config.num_layers, heads, exceptions, calibration)
    even = dataclasses.replace(cache, policy=dataclasses.replace(policy, caps=""))
    return [
        dataclasses.replace(one, policy=dataclasses.replace(policy, budgets=budgets, caps=""))
        for one, budgets in zip(
            layer_caches(even, config.num_layers, heads, (), calibration), head_budgets, strict=True
        )
    ]


def unit_bytes(geometry: CacheGeometry, head_dim: int) -> int:
    """Bytes of one unit: a page's tokens of one KV head, and their positions."""
    return geometry.page_size * (geometry.cache.codec.bytes_per_token(head_dim) + 4)


def kept_bytes(config: DecoderConfig, geometry: CacheGeometry, engine: EngineConfig) -> int:
    """Bytes that one slot takes beside its pages; exact."""
    policy = geometry.cache.policy
    if not isinstance(policy, EvictingPolicy):
        return 0
    budgets = budgets_of(config, policy, engine.head_budgets)
    units = int((-(-budgets // geometry.page_size)).sum())
    window = policy.observed
    asked = window * (4 + 4 * config.num_layers * config.num_query_heads * config.head_dim)
    heads = config.num_layers * config.num_key_value_heads
    tokens = units * geometry.page_size + heads * geometry.layout.entries
    mass = 4 * tokens if policy.accumulates else 0
    return units * unit_bytes(geometry, config.head_dim) + asked + mass

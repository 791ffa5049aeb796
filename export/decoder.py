"""The decoder as the artifact runs it: loops over stacked layers, reading pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.errors import CacheError
from tfkv.export import page_scan
from tfkv.export.attention_mass import AttentionMass, Questions
from tfkv.export.bounded_pages import write_bounds
from tfkv.export.exact_tail import ExactTail, Tails
from tfkv.export.geometry import CacheGeometry
from tfkv.export.kept_tokens import Evicted, KeptTokens
from tfkv.export.layer_groups import LayerGroups
from tfkv.export.layer_options import Angles, LayerAngles, scoring_of
from tfkv.export.layer_pools import Layer, LayerPools, Run
from tfkv.export.packed_adapters import PackedAdapters
from tfkv.export.packed_blocks import PackedBlocks, Weights, read_weights
from tfkv.export.packed_weights import PackedWeights
from tfkv.export.page_groups import write_key_groups
from tfkv.export.page_pool import Parts
from tfkv.export.page_scan import PageList, PageScan
from tfkv.layers import attention, masks
from tfkv.layers.attention import Partial
from tfkv.layers.codecs import CacheCodec, Coded, FloatCodec
from tfkv.layers.policies import Quest
from tfkv.layers.positions import first_position
from tfkv.layers.rotary import steps_back, turn_grouped
from tfkv.layers.shapes import keep_shape, shape_of

_FRESH = FloatCodec("float32")

#: Block-table rows int32 ``[B, columns]`` of each group of layers.
Tables = tuple[tf.Tensor, ...]

#: ``(layer, grouped queries, keys, values)`` of new tokens to the attention over all they see.
Attend = Callable[[Layer, tf.Tensor, tf.Tensor, tf.Tensor], Partial]


class Fresh(NamedTuple):
    """Of tokens that are not on pages yet.

    Attributes:
        keys: ``[L, B, K, T, H]``.
        values: ``[L, B, K, T, H]``.
        queries: ``[L, B, N, T, H]``, where a policy looks at them; else N is 0. Where it adds up
            attention, their channels are followed by `attention.log_sum` of what they saw.
    """

    keys: tf.Tensor
    values: tf.Tensor
    queries: tf.Tensor


class Looks(NamedTuple):
    """Which of some keys some queries see, as far as the layers of a group agree.

    Attributes:
        queries: int32 ``[A, T]``, their positions; −1 = none.
        keys: int32 ``[A, S]``, likewise.
        mask: bool ``[A, T, S]``.
    """

    queries: tf.Tensor
    keys: tf.Tensor
    mask: tf.Tensor


class Reading(NamedTuple):
    """What the queries of a batch read of the cache.

    Attributes:
        parts: The cache.
        positions: int32 ``[B, T]``, of the queries; −1 = none.
        scans: The pages that the rows read, of each group of layers.
        tails: What is kept exactly of them.
        alone: Whether each query is a token that is read alone, for which a policy may select.
    """

    parts: Parts
    positions: tf.Tensor
    scans: tuple[PageScan, ...]
    tails: Tails
    alone: bool

    def of(self, layer: Layer) -> tuple[Parts, tf.Tensor, PageScan, Tails]:
        """What a layer reads: the cache, positions, its scan, and what is kept exactly."""
        return self.parts, self.positions, self.scans[layer.pool.group], self.tails


class PackedDecoder:
    """Runs a packed decoder over a page pool.

    Args:
        config: Architecture.
        weights: Packed weights.
        pools: Where keys and values lie.
        tail: What the codec keeps exactly beside them.
        kept: What a policy that evicts has kept beside them.
        groups: Which positions lie where, and who sees them.
        scan_pages: Pages read at once; the scan's cost follows live pages in such steps.
        adapters: What rows may add to the weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: PackedWeights,
        pools: LayerPools,
        tail: ExactTail,
        kept: KeptTokens,
        groups: LayerGroups,
        scan_pages: int,
        adapters: PackedAdapters | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.adapters = adapters
        self.blocks = PackedBlocks(config)
        self.turning = LayerAngles(config)
        self.pools = pools
        self.tail = tail
        self.kept = kept
        self.groups = groups
        self.scan_pages = scan_pages
        # Layers are alike where tokens are evicted.
        self.mass = AttentionMass(config, groups.first, pools.pools[0], kept, scan_pages)

    def read_weights(self, chosen: tf.Tensor | None = None) -> Weights:
        """All weights as tensors, for use inside loops; `chosen` as in `Weights`."""
        return read_weights(self.weights, self.adapters, chosen)

    def read_cache(self) -> Parts:
        """The pools, and what is kept beside them, as tensors."""
        exact = {"exact": self.tail.read()} if self.tail.recent else {}
        return {**self.pools.read(), **exact, **self.kept.read()}

    def assign_cache(self, parts: Parts) -> None:
        """Publishes what a computation wrote."""
        self.pools.assign(parts)
        self.tail.assign(parts.get("exact", {}))
        self.kept.assign(parts)

    def geometry_of(self, layer: Layer) -> CacheGeometry:
        """Which positions lie where in a layer, and who sees them."""
        return self.groups.groups[layer.pool.group]

    def scan(
        self, tables: Tables, start: tf.Tensor, floor: tf.Tensor, reads: tf.Tensor
    ) -> tuple[PageScan, ...]:
        """The pages that rows read in each group of layers; see `page_scan.scan`."""
        return tuple(
            page_scan.scan(geometry, table, start, floor, reads, self.scan_pages)
            for geometry, table in zip(self.groups.groups, tables, strict=True)
        )

    def attend_cache(
        self, reading: Reading, layer: Layer, queries: tf.Tensor, fresh: Partial
    ) -> Partial:
        """Attention of grouped ``queries [B, K, Q, H]`` over pages, over what is kept exactly of
        the same rows, and over the tokens that `fresh` has seen already."""
        codec = layer.codec
        if codec.recent:
            fresh = attention.merge(fresh, self._attend_exact(reading, layer, queries))
        if self._furthest(layer) is not None:
            fresh = attention.merge(fresh, self._attend_sinks(reading, layer, queries))
        prepared = codec.prepare(queries)
        # Rotated values are mixed as they are, and what came of them is rotated back once.
        seen = fresh
        if codec.rotate:
            seen = attention.nothing(queries, codec.values.mixed_width(self.config.head_dim))
        if reading.alone and layer.pool.selects:
            seen = self._attend_selected(reading, layer, queries, prepared, seen)
        else:
            seen = self._attend_pages(reading, layer, prepared, seen)
        if self.kept.evicts:
            seen = self._attend_kept(reading, layer, prepared, seen)
        if not codec.rotate:
            return seen
        return attention.merge(fresh, seen._replace(output=codec.finish(seen.output)))

    def _attend_pages(
        self, reading: Reading, layer: Layer, prepared: tf.Tensor, seen: Partial
    ) -> Partial:
        """`seen`, and all pages of the rows; the output unfinished."""
        parts, positions, scan, tails = reading.of(layer)
        geometry, codec = self.geometry_of(layer), layer.codec
        size = geometry.page_size
        scoring = scoring_of(self.config, layer.number)

        def of_several(so_far: Partial, pages: PageList) -> Partial:
            keys = pages.bases[:, tf.newaxis] + tf.range(size)
            column = pages.bases[:, tf.newaxis] // size
            reader = tf.gather(scan.common, tf.maximum(pages.owners, 0)) > column
            reader &= (pages.owners >= 0)[:, tf.newaxis]
            stored = keys[:, tf.newaxis] < scan.start[:, tf.newaxis]
            if self.kept.evicts:
                stored &= keys[:, tf.newaxis] >= scan.floor[:, tf.newaxis]
            visible = geometry.mask(positions, keys[:, tf.newaxis])
            visible &= (stored & reader[..., tf.newaxis])[:, :, tf.newaxis]
            every = tf.broadcast_to(keys[:, tf.newaxis], tf.shape(stored))
            visible &= self._coded(codec, positions, every, scan.start, tails)
            visible &= self._asked_here(layer, every)
            visible = scoring.narrow(visible, positions, keys[:, tf.newaxis])
            apart = scoring.between(positions, keys[:, tf.newaxis])
            coded = layer.pool.gather(parts, pages.pages, layer.row)
            return attention.attend_shared(so_far, prepared, *coded, visible, codec, apart)

        def of_one(so_far: Partial, pages: PageList) -> Partial:
            owned = tf.maximum(pages.owners, 0)
            keys = pages.bases[:, tf.newaxis] + tf.range(size)
            stored = keys < tf.gather(scan.start, owned)[:, tf.newaxis]
            if self.kept.evicts:
                stored &= keys >= tf.gather(scan.floor, owned)[:, tf.newaxis]
            keys = tf.where(stored & (pages.owners >= 0)[:, tf.newaxis], keys, -1)
            asked_at = tf.gather(positions, owned)
            mask = geometry.mask(asked_at, keys)
            of_owners = Tails(*(tf.gather(field, owned) for field in tails))
            mask &= self._coded(codec, asked_at, keys, tf.gather(scan.start, owned), of_owners)
            mask &= self._asked_here(layer, keys)
            mask, apart = scoring.narrow(mask, asked_at, keys), scoring.between(asked_at, keys)
            coded = layer.pool.gather(parts, pages.pages, layer.row)
            asked = tf.gather(prepared, owned)
            return attention.attend_owned(so_far, asked, *coded, mask, codec, pages.owners, apart)

        # One row has nobody to share with: a loop less to compile.
        if prepared.shape[0] != 1:
            seen = self._over(scan.shared, seen, of_several)
        return self._over(scan.own, seen, of_one)

    def _attend_kept(
        self, reading: Reading, layer: Layer, prepared: tf.Tensor, seen: Partial
    ) -> Partial:
        """`seen`, and what a policy kept of the rows; the output unfinished."""
        kept, heads = self.kept, self.config.num_key_value_heads
        step = self.scan_pages * heads
        _, _, scan, tails = reading.of(layer)
        units = kept.units_to_read(layer.number, tails.slot, scan.floor, step)
        return self._over_heads(
            reading,
            layer,
            prepared,
            seen,
            units,
            lambda some: kept.gather(reading.parts, some.pages),
        )

    def _over_heads(
        self,
        reading: Reading,
        layer: Layer,
        prepared: tf.Tensor,
        seen: Partial,
        units: PageList,
        gather: Callable[[PageList], tuple[Coded, Coded, tf.Tensor]],
    ) -> Partial:
        """`seen`, and units of single KV heads; the output unfinished.

        Args:
            reading: What is read.
            layer: Which layer.
            prepared: Queries ``[B, K, Q, H]``, prepared by the codec.
            seen: What the rows have seen so far.
            units: Whose owners are ``row · K + head``.
            gather: Coded keys ``[A, 1, ..., C]`` and values ``[A, 1, C, ...]`` of units, and the
                positions ``[A, C]``, −1 = none.
        """
        _, positions, scan, tails = reading.of(layer)
        geometry, codec = self.geometry_of(layer), layer.pool.codec
        rows, heads, grouped, asked_width = shape_of(prepared)
        asked_of = tf.reshape(prepared, [rows * heads, 1, grouped, asked_width])
        scoring = scoring_of(self.config, layer.number)

        def see(so_far: Partial, some: PageList) -> Partial:
            owned = tf.maximum(some.owners, 0)
            row = owned // heads
            keys, values, held = gather(some)
            asked_at = tf.gather(positions, row)
            mask = geometry.mask(asked_at, held)
            of_owners = Tails(*(tf.gather(field, row) for field in tails))
            mask &= self._coded(codec, asked_at, held, tf.gather(scan.start, row), of_owners)
            mask = scoring.narrow(mask, asked_at, held)
            apart = scoring.of_owners(owned % heads).between(asked_at, held)
            coded, asked = (keys, values), tf.gather(asked_of, owned)
            return attention.attend_owned(so_far, asked, *coded, mask, codec, some.owners, apart)

        lead = [rows * heads, 1, grouped]
        by_head = Partial(
            tf.reshape(seen.peak, lead),
            tf.reshape(seen.mass, lead),
            tf.reshape(seen.output, [*lead, shape_of(seen.output)[-1]]),
        )
        by_head = self._over(units, by_head, see, self.scan_pages * heads)
        return Partial(*(tf.reshape(x, shape_of(y)) for x, y in zip(by_head, seen, strict=True)))

    def choose_pages(
        self, reading: Reading, layer: Layer, queries: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Columns that each KV head of each row reads, int32 ``[B, K, n]``, −1 behind the last,
        and the page that each column holds, ``[B, columns]``; see `Quest.choose`."""
        parts, positions, scan, _ = reading.of(layer)
        geometry, at = self.geometry_of(layer), positions[:, 0]
        policy = geometry.cache.policy
        if not isinstance(policy, Quest):
            raise CacheError(f"Only a policy that selects does this. Received: {str(policy)!r}.")
        numbers = geometry.page_numbers(at)
        bounds = layer.pool.gather_bounds(parts, scan.table, layer.row)
        return policy.choose(queries, bounds, at, numbers), numbers

    def _attend_selected(
        self, reading: Reading, layer: Layer, queries: tf.Tensor, prepared: tf.Tensor, seen: Partial
    ) -> Partial:
        """`seen`, and the pages that the policy selects for each KV head of the rows; the output
        unfinished."""
        parts, _, scan, _ = reading.of(layer)
        pool, size = layer.pool, self.groups.page_size
        rows, heads, _, _ = shape_of(prepared)
        step = self.scan_pages * heads
        chosen, numbers = self.choose_pages(reading, layer, queries)
        columns = tf.maximum(chosen, 0)
        pages = tf.gather(scan.table, columns, batch_dims=1)
        units = (pages * len(pool.layers) + layer.row) * heads + tf.range(heads)[:, tf.newaxis]
        owners = tf.reshape(tf.range(rows * heads), [rows, heads, 1])

        def listed(x: tf.Tensor, nothing: int) -> tf.Tensor:
            """The first of all heads and rows, then their second; and room behind the last."""
            x = tf.where(chosen >= 0, x, nothing)
            flat = tf.reshape(tf.transpose(x, [2, 0, 1]), [-1])
            return tf.pad(flat, [[0, step]], constant_values=nothing)

        most = tf.reduce_max(tf.reduce_sum(tf.cast(chosen >= 0, tf.int32), axis=-1))
        bases = tf.gather(numbers, columns, batch_dims=1) * size
        some = PageList(listed(units, 0), listed(owners, -1), listed(bases, 0), most * rows * heads)

        def coded(pages: PageList) -> tuple[Coded, Coded, tf.Tensor]:
            held = pages.bases[:, tf.newaxis] + tf.range(size)
            start = tf.gather(scan.start, tf.maximum(pages.owners, 0) // heads)
            held = tf.where(held < start[:, tf.newaxis], held, -1)
            return *pool.gather_heads(parts, pages.pages), held

        return self._over_heads(reading, layer, prepared, seen, some, coded)

    def _attend_exact(self, reading: Reading, layer: Layer, queries: tf.Tensor) -> Partial:
        """Attention over the tokens that each query reads exactly."""
        parts, positions, scan, tails = reading.of(layer)
        tail, codec = self.tail, layer.pool.codec
        held = tail.layout.positions_of(scan.start)
        held = tf.where(tail.holds(codec, tails, scan.start, held), held, -1)
        mask = self.geometry_of(layer).mask(positions, held)
        mask &= masks.exact(positions, held, codec.recent, codec.sinks)
        scoring = scoring_of(self.config, layer.number)
        mask, apart = scoring.narrow(mask, positions, held), scoring.between(positions, held)
        found = tail.gather(parts["exact"], tails, layer.number)
        keys, values = ({"codes": side} for side in found)
        here = self._asked_here(layer, held)
        near = attention.attend(queries, keys, values, mask & here, _FRESH, scoring=apart)
        if self._furthest(layer) is None:
            return near
        looking = self.look_at_sinks(queries, positions, layer)
        sinks = attention.attend(looking, keys, values, mask & ~here, _FRESH, scoring=apart)
        return attention.merge(near, sinks)

    def _furthest(self, layer: Layer) -> int | None:
        """See `CachePolicy.furthest`."""
        return self.geometry_of(layer).cache.policy.furthest

    def look_at_sinks(self, queries: tf.Tensor, positions: tf.Tensor, layer: Layer) -> tf.Tensor:
        """Queries of a layer as they look at the sinks, where those are looked at from
        elsewhere."""
        back = steps_back(positions, self._furthest(layer) or 0)
        angles = self.turning.of_layer(self.turning.angles(back, once=True), layer.number)
        return queries if angles is None else turn_grouped(queries, *angles)

    def _asked_here(self, layer: Layer, keys: tf.Tensor) -> tf.Tensor | bool:
        """Whether ``keys [..., S]`` are looked at from the queries' own positions, bool
        ``[..., 1, S]``: all but sinks that are looked at from elsewhere."""
        if self._furthest(layer) is None:
            return True
        return (keys >= self.geometry_of(layer).sinks)[..., tf.newaxis, :]

    def _attend_sinks(self, reading: Reading, layer: Layer, queries: tf.Tensor) -> Partial:
        """Attention over the sinks on pages, looked at from elsewhere."""
        parts, positions, scan, tails = reading.of(layer)
        looking = self.look_at_sinks(queries, positions, layer)
        scoring = scoring_of(self.config, layer.number)
        geometry, codec = self.geometry_of(layer), layer.codec
        size = geometry.page_size
        seen = attention.nothing(queries)
        for index, pages in enumerate(tf.unstack(scan.sinks, axis=1)):
            keys = index * size + tf.range(size)
            keys = tf.where(keys < scan.start[:, tf.newaxis], keys, -1)
            mask = geometry.mask(positions, keys) & ~self._asked_here(layer, keys)
            mask &= self._coded(codec, positions, keys, scan.start, tails)
            mask, apart = scoring.narrow(mask, positions, keys), scoring.between(positions, keys)
            coded = layer.pool.gather(parts, pages, layer.row)
            part = attention.attend(looking, *coded, mask, codec, columns=True, scoring=apart)
            seen = attention.merge(seen, part)
        return seen

    def make_room(
        self,
        weights: Weights,
        parts: Parts,
        rows: Evicted,
        count: tf.Tensor,
        reads_on: bool,
    ) -> tuple[Parts, tf.Tensor]:
        """Evicts from rows that have no room for more, where the policy evicts.

        Args:
            weights: Of `read_weights`.
            parts: The cache.
            rows: Fields ``[B, ...]``.
            count: int32 ``[B]``, tokens to come.
            reads_on: Whether they are a piece of a prompt.

        Returns:
            The cache, and int32 ``[B]`` positions below which nothing is on pages any more.
        """
        if not self.kept.evicts:
            return parts, rows.floor
        due = self.kept.due(rows.floor, rows.start, count, reads_on)
        order = tf.argsort(tf.cast(~due, tf.int32), stable=True)
        output = weights.stacked["attention_output"]
        pool = {side: parts[side] for side in ("keys", "values")}

        def body(index: tf.Tensor, kept: Parts) -> tuple[tf.Tensor, Parts]:
            row = Evicted(*(tf.gather(field, tf.gather(order, index)) for field in rows))
            after = self.kept.evict({**pool, **kept}, row, output)
            return index + 1, {name: after[name] for name in kept}

        kept = {name: parts[name] for name in self.kept.variables}
        times = tf.reduce_sum(tf.cast(due, tf.int32))
        _, kept = tf.while_loop(lambda index, _: index < times, body, (tf.constant(0), kept))
        return {**parts, **kept}, tf.where(due, rows.start, rows.floor)

    def _coded(
        self,
        codec: CacheCodec,
        queries: tf.Tensor,
        keys: tf.Tensor,
        start: tf.Tensor,
        tails: Tails,
    ) -> tf.Tensor | bool:
        """Whether ``queries [..., A, T]`` read ``keys [..., A, C]`` from their codes, bool
        ``[..., A, T, C]``: all that is not read exactly."""
        if not codec.recent:
            return True
        near = masks.exact(queries, keys, codec.recent, codec.sinks)
        return ~(near & self.tail.holds(codec, tails, start, keys)[..., tf.newaxis, :])

    def _over(
        self,
        pages: PageList,
        so_far: Partial,
        see: Callable[[Partial, PageList], Partial],
        step: int = 0,
    ) -> Partial:
        """What rows have seen after all pages of a list, `step` of them at a time; `scan_pages`
        where left out."""
        step, shape = step or self.scan_pages, shape_of(so_far.output)

        def flat(part: Partial) -> tuple[tf.Tensor, ...]:
            """What the loop carries: see `attention.concatenate_heads` for why it is flat."""
            return part.peak, part.mass, tf.reshape(part.output, [shape[0], -1])

        def shaped(peak: tf.Tensor, mass: tf.Tensor, output: tf.Tensor) -> Partial:
            return Partial(peak, mass, tf.reshape(output, shape))

        def body(index: tf.Tensor, *carried: tf.Tensor) -> tuple[tf.Tensor, ...]:
            seen = see(shaped(*carried), pages.part(index, step))
            return (index + 1, *map(keep_shape, flat(seen), carried))

        trips = pages.parts(step)
        state = (tf.constant(0), *flat(so_far))
        state = tf.while_loop(lambda index, *_: index < trips, body, state)
        return shaped(*state[1:])

    def layers(
        self,
        weights: Weights,
        x: tf.Tensor,
        positions: tf.Tensor,
        attend: Attend,
    ) -> tuple[tf.Tensor, Fresh]:
        """All decoder blocks: a loop for each run of layers that share a codec.

        Args:
            weights: Of `read_weights`.
            x: ``[A, T, D]``.
            positions: int32 ``[A, T]``.
            attend: Of the new tokens, keys and values ``[A, K, T, H]``.

        Returns:
            Output ``[A, T, D]`` before the final norm, and the new keys and values.
        """
        angles = self.turning.angles(positions)

        def body(
            run: Run, number: tf.Tensor, x: tf.Tensor, *made: tf.TensorArray
        ) -> tuple[tf.Tensor | tf.TensorArray, ...]:
            after, q, k, v, seen = self.block(weights, run.layer(number), x, angles, attend)
            if self.kept.accumulates:
                q = tf.concat([q, attention.log_sum(seen)[..., tf.newaxis]], axis=-1)
            new = (k, v, tf.reshape(q, [-1, *of_queries[1:]])) if observed else (k, v)
            written = (array.write(number, one) for array, one in zip(made, new, strict=True))
            return (number + 1, keep_shape(after, x), *written)

        rows, width, _ = x.shape
        config, observed = self.config, self.kept.query_channels > 0
        shape = [rows, config.num_key_value_heads, width, config.head_dim]
        of_queries = [rows, config.num_query_heads, width, self.kept.query_channels]
        made = [
            tf.TensorArray(tf.float32, config.num_layers, element_shape=one)
            for one in ((shape, shape, of_queries) if observed else (shape, shape))
        ]
        for run in self.pools.runs:
            _, x, *made = tf.while_loop(
                lambda number, *_, end=run.end: number < end,
                functools.partial(body, run),
                (tf.constant(run.first), x, *made),
            )
        keys, values, *queries = (array.stack() for array in made)
        return x, Fresh(
            keys, values, queries[0] if queries else self._no_queries(shape_of(x)[0], width)
        )

    def block(
        self,
        weights: Weights,
        layer: Layer,
        x: tf.Tensor,
        angles: Angles,
        attend: Attend,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, Partial]:
        """One decoder block; see `layers`.

        Returns:
            Output ``[A, T, D]``, grouped queries, keys and values of the tokens, and what the
            queries saw.
        """
        c, block = self.config, self.blocks
        w = block.weights_of(weights, layer)
        q, k, v = block.project(w, x, self.turning.of_layer(angles, layer.number))
        q = attention.group_queries(q, c.num_key_value_heads, c.query_scale)
        k, v = (tf.transpose(new, [0, 2, 1, 3]) for new in (k, v))
        if not layer.pool.codec.recent:  # else read exactly: tokens of one call are near
            codec = layer.codec
            k, v = codec.keys.round_trip(k), codec.values.round_trip(v)
        seen = attend(layer, q, k, v)
        mixed = attention.concatenate_heads(seen, c.num_query_heads)
        attended = block.attention_output(w, mixed)
        if c.parallel_residual:
            return x + attended + block.feed_forward(w, x, layer.sparse), q, k, v, seen
        after = x + attended
        return after + block.feed_forward(w, after, layer.sparse), q, k, v, seen

    def embed(self, weights: Weights, tokens: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """See `PackedBlocks.embed`."""
        return self.blocks.embed(weights, tokens, positions)

    def logits(self, weights: Weights, x: tf.Tensor) -> tf.Tensor:
        """Logits ``[..., V]`` of block outputs ``[..., D]``."""
        return self.blocks.logits(weights, x)

    def no_fresh(self, rows: int | tf.Tensor, width: int) -> Fresh:
        """Room for `width` tokens of `rows` rows."""
        c = self.config
        zeros = tf.zeros([c.num_layers, rows, c.num_key_value_heads, width, c.head_dim])
        return Fresh(zeros, zeros, self._no_queries(rows, width))

    def _no_queries(self, rows: int | tf.Tensor, width: int) -> tf.Tensor:
        c, channels = self.config, self.kept.query_channels
        heads = c.num_query_heads if channels else 0
        return tf.zeros([c.num_layers, rows, heads, width, channels or c.head_dim])

    def attend_step(
        self,
        fresh: Fresh,
        layer: Layer,
        new: tuple[tf.Tensor, tf.Tensor],
        place: tf.Tensor,
        looks: Sequence[Looks],
        q: tf.Tensor,
    ) -> Partial:
        """Attention of tokens over their own, and over those that went before them in `fresh`.

        Args:
            fresh: Tokens of earlier steps.
            layer: Which layer.
            new: The tokens' keys and values, without the layer axis.
            place: As of `placed`.
            looks: From the tokens to all of `fresh`, of each group of layers.
            q: Grouped queries.
        """
        keys, values = (
            {"codes": placed(tokens, old[layer.number], place)}
            for tokens, old in zip(new, fresh[:2], strict=True)
        )
        return self.attend_fresh(layer, q, keys, values, looks)

    def looks(self, queries: tf.Tensor, keys: tf.Tensor) -> tuple[Looks, ...]:
        """Of queries at positions ``[A, T]`` at keys ``[A, S]``, in each group of layers."""
        return tuple(
            Looks(queries, keys, geometry.mask(queries, keys)) for geometry in self.groups.groups
        )

    def attend_fresh(
        self, layer: Layer, q: tf.Tensor, keys: Coded, values: Coded, looks: Sequence[Looks]
    ) -> Partial:
        """Attention of grouped queries over tokens that are not on pages yet."""
        scoring, (queries_at, keys_at, mask) = (
            scoring_of(self.config, layer.number),
            looks[layer.pool.group],
        )
        mask = scoring.narrow(mask, queries_at, keys_at)
        apart = scoring.between(queries_at, keys_at)
        return attention.attend(q, keys, values, mask, _FRESH, scoring=apart)

    def prefill_piece(
        self,
        weights: Weights,
        parts: Parts,
        tokens: tf.Tensor,
        positions: tf.Tensor,
        tables: Tables,
        start: tf.Tensor,
        filled: tf.Tensor,
        tails: Tails,
        alone: bool = False,
    ) -> tuple[tf.Tensor, Parts]:
        """Fills one piece of one row.

        Args:
            weights: Of `read_weights`.
            parts: The pool.
            tokens: int32 ``[T]``.
            positions: int32 ``[T]``; −1 = not a token.
            tables: int32 ``[columns]`` of each group, the row's pages.
            start: int32, position of the piece's first token.
            filled: int32, positions below it are on pages already.
            tails: Of this row, ``[1]``.
            alone: Whether it is one token, read as a decode step reads it.

        Returns:
            Block outputs ``[T, D]`` and the pool with the piece in it.
        """
        tables = tuple(table[tf.newaxis] for table in tables)
        scans = self.scan(tables, start[tf.newaxis], tails.floor, tf.constant([True]))
        queries_at = positions[tf.newaxis]
        reading = Reading(parts, queries_at, scans, tails, alone)
        looks = self.looks(queries_at, queries_at)

        def attend(layer: Layer, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Partial:
            here = self.attend_fresh(layer, q, {"codes": k}, {"codes": v}, looks)
            return self.attend_cache(reading, layer, q, here)

        x = self.embed(weights, tokens[tf.newaxis], queries_at)
        x, fresh = self.layers(weights, x, queries_at, attend)
        parts = self.commit(parts, fresh, tables, queries_at, filled[tf.newaxis], tails)
        return x[0], parts

    def commit(
        self,
        parts: Parts,
        fresh: Fresh,
        tables: Tables,
        positions: tf.Tensor,
        filled: tf.Tensor,
        tails: Tails,
    ) -> Parts:
        """Writes fresh tokens to pages, and those that are kept exactly.

        Tokens that are there already stay as they are to the last bit, so that reading is
        read-only; tokens that newer ones of the same chunk would overwrite are left out.

        Args:
            parts: The pool.
            fresh: Keys and values.
            tables: int32 ``[B, columns]`` of each group.
            positions: int32 ``[B, T]``; −1 is written nowhere.
            filled: int32 ``[B]``, positions below it are on pages already.
            tails: Fields ``[B]``.
        """
        keys, values = (
            tf.reshape(
                tf.transpose(new, [0, 1, 3, 2, 4]),
                [self.config.num_layers, -1, self.config.num_key_value_heads, self.config.head_dim],
            )
            for new in fresh[:2]
        )
        newest = tf.reduce_max(positions, axis=1, keepdims=True)
        new = tf.where(positions >= filled[:, tf.newaxis], positions, -1)
        kept = [
            tf.where(geometry.layout.keeps(new, newest + 1), new, -1)
            for geometry in self.groups.groups
        ]
        for pool in self.pools.pools:
            where = (pool, self.tail, self.groups.groups[pool.group])
            own = (tables[pool.group], kept[pool.group])
            parts = write_key_groups(*where, parts, fresh.keys, *own, tails)
        if self.tail.recent:
            exact = self.tail.write(parts["exact"], tails.slot, new, keys, values)
            parts = {**parts, "exact": exact}
        parts = self.kept.observe(parts, tails.slot, new, fresh.queries)
        places = [
            geometry.places(*own)
            for geometry, *own in zip(self.groups.groups, tables, kept, strict=True)
        ]
        for pool in self.pools.pools:
            parts = pool.write(parts, *places[pool.group], keys, values)
        for pool in self.pools.pools:
            own = (tables[pool.group], kept[pool.group])
            parts = write_bounds(pool, self.groups.groups[pool.group], parts, *own)
        if self.kept.accumulates:
            first, end = first_position(new), tf.reduce_max(new, axis=1) + 1
            asked = Questions(tails.slot, tables[0], tails.floor, end, first, new, fresh.queries)
            parts = self.mass.add(parts, asked)
        return parts


def placed(new: tf.Tensor, old: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """``old [..., B, K, S, H]`` with tokens of ``new [..., B, K, T, H]``.

    Args:
        new: What is put in.
        old: Where.
        place: int32 ``[B, S]``, number of the token that comes to each place; any other number
            where none does.
    """
    for token in range(new.shape[-2]):
        here = (place == token)[:, tf.newaxis, :, tf.newaxis]
        old = tf.where(here, new[..., token : token + 1, :], old)
    return old

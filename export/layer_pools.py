"""The page pools of all layers: one for each group, codec and way to read, mostly a single one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.export.layer_groups import LayerGroups
from tfkv.export.page_pool import PagePool, Parts
from tfkv.layers.codecs import CacheCodec


class Layer(NamedTuple):
    """One layer, inside a loop over a `Run`.

    Attributes:
        number: int32, which layer of the model.
        row: int32, which layer of its pool.
        pool: Where its keys and values lie.
        feed: int32, which of the layers with a feed-forward layer of its kind.
        sparse: Whether that is a mixture of experts.
    """

    number: tf.Tensor
    row: tf.Tensor
    pool: PagePool
    feed: tf.Tensor
    sparse: bool

    @property
    def codec(self) -> CacheCodec:
        """Of this layer: with its own tables, where a calibration gives it some."""
        return self.pool.codec.of_layers(self.number)


class Run(NamedTuple):
    """Neighbouring layers that share a pool and a kind of feed-forward layer; as many as there are.

    Attributes:
        first: The first of them.
        end: One past the last.
        pool: Where their keys and values lie.
        feed: Which of the layers with its kind of feed-forward layer the first one is.
        sparse: Whether that is a mixture of experts.
    """

    first: int
    end: int
    pool: PagePool
    feed: int
    sparse: bool

    def layer(self, number: tf.Tensor) -> Layer:
        """One of them."""

        def less(skipped: int) -> tf.Tensor:
            return number - skipped if skipped else number

        row = less(self.first - self.pool.layers.index(self.first))
        return Layer(number, row, self.pool, less(self.first - self.feed), self.sparse)


class LayerPools:
    """Keys and values of all sessions and layers, on pages.

    Layers of a group may differ in their codec, and in whether they select pages, so that its
    pools have the same pages and block tables: a page of a session is a page of each.

    Args:
        config: Architecture.
        groups: Which layers share pages, and how each writes and reads them.
        pages: Pages of each group, page 0 included (axis P).

    Attributes:
        pools: One for each group, codec and way to read, in the order of their first layers.
        runs: All layers in order, cut where the pool changes, or the kind of feed-forward layer.
    """

    def __init__(
        self,
        config: DecoderConfig,
        groups: LayerGroups,
        pages: Sequence[int],
    ) -> None:
        self.pages = tuple(pages)
        self.page_size = size = groups.page_size
        kinds = list(zip(groups.group_of, groups.codecs, groups.selects, strict=True))
        layers: dict[tuple[int, CacheCodec, bool], list[int]] = {}
        for layer, kind in enumerate(kinds):
            layers.setdefault(kind, []).append(layer)
        of_kind = {
            kind: PagePool(config, kind[1], own, pages[kind[0]], size, number, kind[2], kind[0])
            for number, (kind, own) in enumerate(layers.items())
        }
        self.pools = tuple(of_kind.values())
        sparse = [config.experts_of(layer) is not None for layer in range(len(kinds))]
        cut_by = list(zip(kinds, sparse, strict=True))
        cuts = [n for n in range(1, len(kinds)) if cut_by[n] != cut_by[n - 1]]
        self.runs = tuple(
            Run(
                first,
                end,
                of_kind[kinds[first]],
                sparse[:first].count(sparse[first]),
                sparse[first],
            )
            for first, end in zip([0, *cuts], [*cuts, len(kinds)], strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers and parts."""
        return sum(self.page_bytes_of_groups)

    @property
    def page_bytes_of_groups(self) -> tuple[int, ...]:
        """Bytes of one page of each group, all its layers and parts."""
        return tuple(
            sum(pool.page_bytes for pool in self.pools if pool.group == group)
            for group in range(len(self.pages))
        )

    def read(self) -> Parts:
        """All parts as tensors."""
        return {side: part for pool in self.pools for side, part in pool.read().items()}

    def assign(self, parts: Parts) -> None:
        """Publishes what a computation wrote."""
        for pool in self.pools:
            pool.assign(parts)

    def copy(
        self, parts: Parts, sources: Sequence[tf.Tensor], targets: Sequence[tf.Tensor]
    ) -> Parts:
        """Copies whole pages of each group; see `PagePool.copy`."""
        for pool in self.pools:
            parts = pool.copy(parts, sources[pool.group], targets[pool.group])
        return parts

    def read_bytes(self, pages: Sequence[tf.Tensor]) -> tf.Tensor:
        """Pages ``[B]`` of each group as they are stored, string ``[B]`` of `page_bytes` bytes
        each: pool after pool, as `PagePool.read_raw` reads them. Page 0 is all zeros; it is that
        of all groups or of none."""
        taken = [part for pool in self.pools for part in pool.read_raw(pages[pool.group])]
        data = tf.where((pages[0] > 0)[:, tf.newaxis], tf.concat(taken, axis=1), 0)

        return as_strings(data, self.page_bytes)

    def write_bytes(self, pages: Sequence[tf.Tensor], data: tf.Tensor) -> None:
        """Puts back what `read_bytes` gave, without touching any other page.

        Args:
            pages: int32 ``[B]`` of each group; 0 = nowhere.
            data: string ``[B]``; what follows a page's bytes does not count.
        """
        numbers = tf.io.decode_raw(data, tf.uint8, fixed_length=self.page_bytes)
        sizes = [pool.page_bytes for pool in self.pools]
        for pool, own in zip(self.pools, tf.split(numbers, sizes, axis=1), strict=True):
            pool.write_raw(pages[pool.group], own)


def as_strings(numbers: tf.Tensor, width: int) -> tf.Tensor:
    """Rows of ``numbers [B, width]``, uint8, as strings ``[B]``."""

    def text(row: tf.Tensor) -> tf.Tensor:
        # The content comes last in a serialized tensor.
        return tf.strings.substr(tf.io.serialize_tensor(row), -width, width)

    return tf.map_fn(text, numbers, fn_output_signature=tf.string)

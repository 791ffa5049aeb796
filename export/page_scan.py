"""Which pages a batch reads, each of them once."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfkv.export.geometry import CacheGeometry
from tfkv.layers.shapes import shape_of


class PageList(NamedTuple):
    """Pages to read, one after another.

    Attributes:
        pages: int32 ``[A]``, physical pages; 0 behind the last.
        owners: int32 ``[A]``, row that reads each; −1 behind the last.
        bases: int32 ``[A]``, position of each page's first token.
        count: int32, how many of the list count.
    """

    pages: tf.Tensor
    owners: tf.Tensor
    bases: tf.Tensor
    count: tf.Tensor

    def part(self, index: tf.Tensor, step: int) -> PageList:
        """Part `index` of the list, `step` pages long."""
        pages, owners, bases = (tf.slice(x, [index * step], [step]) for x in self[:3])
        return PageList(pages, owners, bases, self.count)

    def parts(self, step: int) -> tf.Tensor:
        """How many parts of `step` pages have one that counts, int32."""
        return (self.count + step - 1) // step


class PageScan(NamedTuple):
    """All pages that the rows of a batch read.

    Sessions share pages from their first one on, so what rows have in common is a number.
    A shared page is asked by the queries of all rows, which takes as long as half the rows
    take to read it apart (docs/decisions/0012): where fewer read it, it stays their own.

    Attributes:
        own: Pages read for one row each.
        shared: Pages read once for half of the rows or more, listed for the first of these.
        common: int32 ``[B, B]``, how many pages two rows have in common, from the first.
        start: int32 ``[B]``, positions below it are read from pages,
        floor: int32 ``[B]``, and those below it are not.
        sinks: int32 ``[B, n]``, the pages of the sinks; 0 = none.
        table: int32 ``[B, columns]``, block-table rows.
    """

    own: PageList
    shared: PageList
    common: tf.Tensor
    start: tf.Tensor
    floor: tf.Tensor
    sinks: tf.Tensor
    table: tf.Tensor


def scan(
    geometry: CacheGeometry,
    table: tf.Tensor,
    start: tf.Tensor,
    floor: tf.Tensor,
    reads: tf.Tensor,
    step: int,
) -> PageScan:
    """Lists the pages that rows read.

    Args:
        geometry: Which positions lie where.
        table: int32 ``[B, columns]``, block-table rows.
        start: int32 ``[B]``, first position that is not on pages.
        floor: int32 ``[B]``, positions below it are not on pages any more.
        reads: bool ``[B]``, whether the row reads at all.
        step: Pages read at once: so many past a list's end can be taken.
    """
    span = tf.where(reads[:, tf.newaxis], geometry.page_span(start, floor), 0)
    end = span[:, -1]
    # A ring that went round has other pages in its first columns than other rows.
    whole = tf.where(start <= geometry.layout.entries, end, 0)
    common = _common(table, whole)
    readers = tf.cast(common[:, tf.newaxis] >= common[..., tf.newaxis], tf.int32)
    enough = tf.maximum(tf.size(start) + 1, 4) // 2
    many = tf.reduce_sum(readers, axis=-1) >= enough
    shared = tf.reduce_max(tf.where(many, common, 0), axis=1)
    earlier = tf.linalg.set_diag(common, tf.zeros_like(start))
    led = tf.reduce_max(tf.linalg.band_part(earlier, -1, 0), axis=1)
    earliest = tf.zeros_like(span) + tf.reduce_min(
        tf.where(reads[:, tf.newaxis], span, geometry.columns), axis=0
    )
    return PageScan(
        _list(geometry, table, span, shared, end, step),
        _list(geometry, table, earliest, led, shared, step),
        common,
        start,
        floor,
        table[:, : geometry.layout.sinks // geometry.page_size],
        table,
    )


def pages_of_rows(
    geometry: CacheGeometry,
    table: tf.Tensor,
    start: tf.Tensor,
    floor: tf.Tensor,
    reads: tf.Tensor,
    step: int,
) -> PageList:
    """The pages of each row, those that it shares among them; the arguments are those of
    `scan`."""
    span = tf.where(reads[:, tf.newaxis], geometry.page_span(start, floor), 0)
    return _list(geometry, table, span, tf.zeros_like(start), span[:, -1], step)


def _common(table: tf.Tensor, pages: tf.Tensor) -> tf.Tensor:
    """How many pages each two rows of ``table [B, columns]`` share, of their first
    ``pages [B]``; ``[B, B]``."""
    columns = shape_of(table)[1]
    same = table[:, tf.newaxis] == table[tf.newaxis]
    alike = tf.reduce_min(tf.where(same, columns, tf.range(columns)), axis=-1)
    return tf.minimum(alike, tf.minimum(pages[:, tf.newaxis], pages))


def _list(
    geometry: CacheGeometry,
    table: tf.Tensor,
    span: tf.Tensor,
    low: tf.Tensor,
    high: tf.Tensor,
    step: int,
) -> PageList:
    """Pages `low` to `high` − 1 of each row, without those that ``span [B, 3]`` leaves out."""
    rows, columns = shape_of(table)
    sinks, first, _ = tf.unstack(span, axis=-1)
    own_sinks = tf.maximum(tf.minimum(sinks, high) - low, 0)
    first = tf.maximum(first, low)
    counts = own_sinks + tf.maximum(high - first, 0)
    ends = tf.cumsum(counts)
    item = tf.range(rows * columns + step)
    owner = tf.reduce_sum(tf.cast(item[:, tf.newaxis] >= ends, tf.int32), axis=1)
    live = owner < rows
    owner = tf.minimum(owner, rows - 1)
    nth = item - tf.gather(ends - counts, owner)
    own_sinks = tf.gather(own_sinks, owner)
    page = tf.where(
        nth < own_sinks, tf.gather(low, owner) + nth, tf.gather(first, owner) + nth - own_sinks
    )
    column = tf.where(live, geometry.column_of(page), 0)
    physical = tf.gather(tf.reshape(table, [-1]), owner * columns + column)
    return PageList(
        tf.where(live, physical, 0),
        tf.where(live, owner, -1),
        page * geometry.page_size,
        ends[-1],
    )

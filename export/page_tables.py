"""The page tables of all groups of layers: one for each, and what they decide together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkv.errors import Status
from tfkv.export.layer_groups import LayerGroups
from tfkv.export.page_table import Pages, PageTable, fits
from tfkv.export.plan import Plan, Refusal, Remembered
from tfkv.export.rows import Admission, Request


class Found(NamedTuple):
    """Full pages of a prompt that were found in the index of every group.

    Attributes:
        rows: int32 ``[B, columns]`` of each group, the sessions' table rows with the found pages
            in them.
        filled: int32 ``[B]``, positions that are on pages then.
        looked_up: int32 ``[B]``, full pages looked for.
    """

    rows: tuple[tf.Tensor, ...]
    filled: tf.Tensor
    looked_up: tf.Tensor


class Grant(NamedTuple):
    """Pages given to a batch.

    Attributes:
        pages: The table of each group with them.
        plan: The plan, with the rows refused that did not fit.
        rows: int32 ``[B, columns]`` of each group, the sessions' table rows.
        copy_from: Likewise, page whose content a new page starts with; 0 = none.
        evicted: int32, cached pages that had to go.
    """

    pages: tuple[Pages, ...]
    plan: Plan
    rows: tuple[tf.Tensor, ...]
    copy_from: tuple[tf.Tensor, ...]
    evicted: tf.Tensor


class PageTables:
    """A `PageTable` for each group of layers.

    A row gets its pages in all groups or is refused in all, and what it finds of a prompt is
    what all of them have.

    Args:
        slots: Sessions held at once.
        pages: Pages of each group's pools, page 0 included (axis P).
        groups: Columns of a session, and which position lies where.
        most_tokens: Most tokens that one call adds to a session.
    """

    def __init__(
        self, slots: int, pages: Sequence[int], groups: LayerGroups, most_tokens: int
    ) -> None:
        self.tables = tuple(
            PageTable(slots, count, geometry, most_tokens, groups.entries, number)
            for number, (count, geometry) in enumerate(zip(pages, groups.groups, strict=True))
        )
        self.groups = groups

    def read(self) -> tuple[Pages, ...]:
        """All of them as tensors."""
        return tuple(table.read() for table in self.tables)

    def assign(self, pages: Sequence[Pages]) -> None:
        """Publishes what a computation decided."""
        for table, own in zip(self.tables, pages, strict=True):
            table.assign(own)

    def rows(self, slot: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Table rows ``[B, columns]`` of sessions in each group."""
        return tuple(tf.gather(table.variables.table.read(), slot) for table in self.tables)

    def find(
        self,
        pages: Sequence[Pages],
        request: Request,
        stored: Remembered,
        admission: Admission,
    ) -> Found:
        """Looks for the full pages that each row would have to prefill next; see
        `PageTable.find`."""
        each = [
            table.find(own, request, stored, admission)
            for table, own in zip(self.tables, pages, strict=True)
        ]
        if len(each) == 1:
            return Found((each[0].rows,), each[0].filled, each[0].looked_up)
        filled = tf.reduce_min(tf.stack([one.filled for one in each]), axis=0)
        # What one group lacks is of no use in the others: theirs stay as they were.
        held = (filled // self.groups.page_size)[:, tf.newaxis]
        rows = tuple(
            tf.where(tf.range(table.geometry.columns) < held, one.rows, table.rows(own, admission))
            for table, own, one in zip(self.tables, pages, each, strict=True)
        )
        looked_up = tf.reduce_min(tf.stack([one.looked_up for one in each]), axis=0)
        return Found(rows, filled, looked_up)

    def allocate(
        self, pages: Sequence[Pages], found: Found, plan: Plan, admission: Admission
    ) -> Grant:
        """Gives each row the pages that its plan writes to, or refuses it as FULL; see
        `PageTable.ask`."""
        works = (plan.status == Status.OK) & (admission.first == tf.range(tf.size(plan.status)))
        asked = [
            table.ask(own, rows, works, plan, admission)
            for table, own, rows in zip(self.tables, pages, found.rows, strict=True)
        ]
        fit = fits([one.need for one in asked], [one.free for one in asked])
        refused = works & ~fit
        plan = plan.refuse(refused, Status.FULL, admission.retry_ms)
        given = [
            table.give(own, rows, one, fit, refused)
            for table, own, rows, one in zip(self.tables, pages, found.rows, asked, strict=True)
        ]
        evicted = given[0].evicted
        for one in given[1:]:
            evicted += one.evicted
        return Grant(
            tuple(one.pages for one in given),
            plan,
            tuple(one.rows for one in given),
            tuple(one.copy_from for one in given),
            evicted,
        )

    def settle(
        self,
        grant: Grant,
        filled: tf.Tensor,
        slot: tf.Tensor,
        tenant: tf.Tensor,
        ids: tf.Tensor,
        floor: tf.Tensor,
    ) -> tuple[Pages, ...]:
        """What is true once the computation is over; see `PageTable.settle`."""
        return tuple(
            table.settle(pages, rows, grant.plan, filled, slot, tenant, ids, floor)
            for table, pages, rows in zip(self.tables, grant.pages, grant.rows, strict=True)
        )

    # --- outside XLA ---------------------------------------------------------------------

    def release(self, slots: tf.Tensor) -> None:
        """Gives all pages of sessions back; ``slots [n]``, int32, each named once."""
        for table in self.tables:
            table.release(slots)

    def truncate(self, slots: tf.Tensor, position: tf.Tensor) -> None:
        """Gives back the pages of sessions that lie behind what they go on from.

        A ring that went round and goes on from its first round gives pages back, too: nothing
        that is left is on those. Else a prompt that is found again would be mapped over them.

        Args:
            slots: int32 ``[n]``, each named once.
            position: int32 ``[n]``.
        """
        keep = -tf.math.floordiv(-position, self.groups.page_size)
        for table in self.tables:
            table.release(slots, keep)

    def fork(self, source: tf.Tensor, target: tf.Tensor, filled: tf.Tensor) -> None:
        """Lets new sessions hold the pages of others; see `PageTable.fork`."""
        for table in self.tables:
            table.fork(source, target, filled)

    def append(
        self, wants: tf.Tensor, refusal: Refusal, retry_ms: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], Refusal]:
        """Gives rows a page of each group for what a caller brings; who owns it, `put` says.

        Args:
            wants: bool ``[B]``.
            refusal: Rows that are refused already.
            retry_ms: int32, for those that are refused now, as FULL.

        Returns:
            int32 ``[B]`` of each group, 0 where the row got none; and the refusals.
        """
        need = tf.cast(wants, tf.int32)
        fit = fits([need for _ in self.tables], [table.free() for table in self.tables])
        refusal = refusal.when(wants & ~fit, Status.FULL, retry_ms)
        return tuple(table.append(wants & fit) for table in self.tables), refusal

    def put(self, slots: tf.Tensor, page: tf.Tensor, taken: Sequence[tf.Tensor]) -> None:
        """Lets sessions own the pages of `append`.

        Args:
            slots: int32 ``[B]``, the spare where nothing was given.
            page: int32 ``[B]``, which page of the session.
            taken: int32 ``[B]`` of each group; 0 = none.
        """
        for table, own in zip(self.tables, taken, strict=True):
            table.put(slots, table.geometry.column_of(page), own)

    def usage(self, used: tf.Tensor, page_bytes: Sequence[int]) -> dict[str, tf.Tensor]:
        """Pages of all groups by what they are for, and the bytes of those in use, each int64.

        Args:
            used: bool ``[slots]``, which does not matter here.
            page_bytes: Of a page of each group.
        """
        del used
        totals: dict[str, tf.Tensor] = {}
        for table, size in zip(self.tables, page_bytes, strict=True):
            own = table.usage()
            own["bytes_used"] = own["pages_used"] * size
            totals = {name: totals[name] + n if totals else n for name, n in own.items()}
        return totals

    def check_integrity(self) -> tf.Tensor:
        """How many invariants do not hold in all groups, int64."""
        return sum((table.check_integrity() for table in self.tables), tf.constant(0, tf.int64))

"""Which session owns which page: allocation, sharing, and the prefix index.

A page is *free* when nobody refers to it, and *indexed* when it is full and can be found
again by what it holds. A page that is both is *cached*: it is taken last, the longest
unused first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkv.errors import Status
from tfkv.export.geometry import CacheGeometry
from tfkv.export.plan import Plan, Remembered
from tfkv.export.rows import Admission, Request
from tfkv.export.transient import TransientVariable

#: Parent of a session's first page.
ROOT = 0


class Pages(NamedTuple):
    """The page table as tensors inside a computation.

    Attributes:
        table: int32 ``[slots + 1, columns]``, page of each column; 0 = none.
        references: int32 ``[P]``, sessions that hold the page; page 0 holds itself.
        generation: int32 ``[P]``, how often the page was given out.
        indexed: bool ``[P]``, whether it can be found by what it holds.
        foreign: bool ``[P]``, holds keys that a caller brought, or that other keys than a prompt's
            were made of: it is never indexed.
        digest: int64 ``[P]``, finds candidates; a match is checked token by token.
        tokens: int32 ``[P, C]``.
        parent: int32 ``[P]``, the page before it.
        parent_generation: int32 ``[P]``, of the parent when the page was indexed.
        tenant: int64 ``[P]``, who may find it.
        used: int64 ``[P]``, clock of its last use.
        clock: int64, counts computations.
    """

    table: tf.Tensor
    references: tf.Tensor
    generation: tf.Tensor
    indexed: tf.Tensor
    foreign: tf.Tensor
    digest: tf.Tensor
    tokens: tf.Tensor
    parent: tf.Tensor
    parent_generation: tf.Tensor
    tenant: tf.Tensor
    used: tf.Tensor
    clock: tf.Tensor


class Found(NamedTuple):
    """Full pages of a prompt that were found in the index.

    Attributes:
        rows: int32 ``[B, columns]``, the sessions' table rows with the found pages in them.
        filled: int32 ``[B]``, positions that are on pages then.
        looked_up: int32 ``[B]``, full pages looked for.
    """

    rows: tf.Tensor
    filled: tf.Tensor
    looked_up: tf.Tensor


class Asked(NamedTuple):
    """Pages that a batch needs, before it is known which rows get theirs.

    Attributes:
        mapped: int32 ``[B, columns]``, found pages that the sessions did not hold before.
        references: int32 ``[P]``, with these.
        touched: bool ``[B, columns]``, columns that are written to.
        indexed: bool ``[B, columns]``, pages there that are only kept for others to find.
        fresh: bool ``[B, columns]``, columns that want a new page.
        need: int32 ``[B]``, new pages of each row.
        free: int32, pages there are.
    """

    mapped: tf.Tensor
    references: tf.Tensor
    touched: tf.Tensor
    indexed: tf.Tensor
    fresh: tf.Tensor
    need: tf.Tensor
    free: tf.Tensor


class Given(NamedTuple):
    """Pages given to a batch.

    Attributes:
        pages: The table with them.
        rows: int32 ``[B, columns]``, the sessions' table rows.
        copy_from: int32 ``[B, columns]``, page whose content a new page starts with; 0 = none.
        evicted: int32, cached pages that had to go.
    """

    pages: Pages
    rows: tf.Tensor
    copy_from: tf.Tensor
    evicted: tf.Tensor


class PageTable:
    """Owns the variables behind `Pages`, and all decisions about the pages of one group of
    layers; `PageTables` makes those that concern several.

    Args:
        slots: Sessions held at once; row `slots` is the spare and has no pages.
        pages: Pages of the pool, page 0 included (axis P).
        geometry: Columns of a session, and which position lies where.
        most_tokens: Most tokens that one call adds to a session.
        shared: First tokens of a session that others may find; no more than its entries.
        group: Number of the group.
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        geometry: CacheGeometry,
        most_tokens: int,
        shared: int,
        group: int = 0,
    ) -> None:
        self.slots = slots
        self._shared = shared
        prefix = f"page_{group}_" if group else "page_"
        self._most_pages = most_tokens // geometry.page_size + 2
        self.count = pages
        self.geometry = geometry
        shapes = {
            "table": ((slots + 1, geometry.columns), tf.int32),
            "references": ((pages,), tf.int32),
            "generation": ((pages,), tf.int32),
            "indexed": ((pages,), tf.bool),
            "foreign": ((pages,), tf.bool),
            "digest": ((pages,), tf.int64),
            "tokens": ((pages, geometry.page_size), tf.int32),
            "parent": ((pages,), tf.int32),
            "parent_generation": ((pages,), tf.int32),
            "tenant": ((pages,), tf.int64),
            "used": ((pages,), tf.int64),
            "clock": ((), tf.int64),
        }
        self.variables = Pages(
            **{
                name: TransientVariable(
                    f"{prefix}{name}",
                    shape,
                    dtype,
                    initial=(lambda: tf.one_hot(0, pages, dtype=tf.int32))
                    if name == "references"
                    else None,
                )
                for name, (shape, dtype) in shapes.items()
            }
        )

    def read(self) -> Pages:
        """All of it as tensors."""
        return Pages(*(variable.read() for variable in self.variables))

    def assign(self, pages: Pages) -> None:
        """Publishes what a computation decided."""
        for variable, value in zip(self.variables, pages, strict=True):
            variable.assign(value)

    def rows(self, pages: Pages, admission: Admission) -> tf.Tensor:
        """The table rows of a batch's sessions as they are stored, int32 ``[B, columns]``."""
        rows = tf.gather(pages.table, admission.slot)
        return tf.where(admission.fresh[:, tf.newaxis], 0, rows)

    # --- finding -------------------------------------------------------------------------

    def find(
        self, pages: Pages, request: Request, stored: Remembered, admission: Admission
    ) -> Found:
        """Looks for the full pages that each row would have to prefill next.

        Only a row that goes on at the start of a page, and whose pages so far are indexed,
        can find any.
        """
        size = self.geometry.page_size
        rows = self.rows(pages, admission)
        position = tf.where(request.position < 0, stored.held, request.position)
        end = position + request.length
        first = stored.filled // size
        last = tf.minimum(end, self._shared) // size
        before = _page_at(rows, first - 1)
        parent = tf.where(first == 0, ROOT, before)
        chained = (first == 0) | tf.gather(pages.indexed, before)
        able = (admission.status == Status.OK) & (stored.filled % size == 0) & chained
        able &= stored.filled <= self._shared
        able &= (position <= stored.held) & self.geometry.cache.policy.shareable
        ids = _token_reader(request, stored, position)

        def body(step: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
            parent, rows, found, alive = state
            page = first + step
            tokens = ids(page[:, tf.newaxis] * size + tf.range(size))
            match = self._match(pages, tokens, parent, admission.tenant)
            alive = alive & (page < last) & (match > 0)
            here = (tf.range(self.geometry.columns) == page[:, tf.newaxis]) & alive[:, tf.newaxis]
            return (
                step + 1,
                tf.where(alive, match, parent),
                tf.where(here, match[:, tf.newaxis], rows),
                found + tf.cast(alive, tf.int32),
                alive,
            )

        state = (tf.constant(0), parent, rows, tf.zeros_like(first), able & (first < last))
        _, _, rows, found, _ = tf.while_loop(
            lambda step, parent, rows, found, alive: tf.reduce_any(alive), body, state
        )
        looked_up = tf.where(able, tf.maximum(last - first, 0), 0)
        filled = tf.where(found > 0, (first + found) * size, stored.filled)
        return Found(rows, filled, looked_up)

    def _match(
        self, pages: Pages, tokens: tf.Tensor, parent: tf.Tensor, tenant: tf.Tensor
    ) -> tf.Tensor:
        """Page that holds ``tokens [B, C]`` behind each parent; 0 = none."""
        generation = tf.gather(pages.generation, parent)
        digest = _digest(tokens, parent, generation, tenant)
        candidates = pages.indexed & (pages.digest == digest[:, tf.newaxis])
        page = tf.argmax(tf.cast(candidates, tf.int32), axis=1, output_type=tf.int32)
        same = tf.gather(candidates, page, batch_dims=1)
        same &= tf.reduce_all(tf.gather(pages.tokens, page) == tokens, axis=1)
        same &= tf.gather(pages.parent, page) == parent
        same &= tf.gather(pages.parent_generation, page) == generation
        same &= tf.gather(pages.tenant, page) == tenant
        return tf.where(same, page, 0)

    # --- allocation ----------------------------------------------------------------------

    def ask(
        self,
        pages: Pages,
        rows: tf.Tensor,
        works: tf.Tensor,
        plan: Plan,
        admission: Admission,
    ) -> Asked:
        """Which pages the rows want that their plans write to.

        A page is written only by its one owner, and never while it is indexed: a shared page
        is replaced by a copy first. So is one that is only kept for others to find, as long as
        there are pages; else it is written where it is, and nobody finds it again.

        Args:
            pages: The table.
            rows: int32 ``[B, columns]``, the sessions' table rows with what was found in them.
            works: bool ``[B]``, rows that have work to do.
            plan: What is to be done.
            admission: Whose sessions they are.
        """
        old_rows = tf.gather(pages.table, tf.where(admission.fresh, self.slots, admission.slot))
        mapped = tf.where((rows != old_rows) & works[:, tf.newaxis], rows, 0)
        references = _add(pages.references, mapped, 1)
        touched = self._touched(plan) & works[:, tf.newaxis]
        shared = tf.gather(references, rows) > 1
        indexed = tf.gather(pages.indexed, rows) & ~shared
        fresh = touched & ((rows == 0) | shared | indexed)
        free = tf.reduce_sum(tf.cast(references == 0, tf.int32))
        scarce = tf.reduce_sum(tf.cast(fresh, tf.int32)) > free
        fresh &= ~(indexed & scarce)
        need = tf.reduce_sum(tf.cast(fresh, tf.int32), axis=1)
        return Asked(mapped, references, touched, indexed, fresh, need, free)

    def give(
        self, pages: Pages, rows: tf.Tensor, asked: Asked, fit: tf.Tensor, refused: tf.Tensor
    ) -> Given:
        """Gives the pages of `ask` to the rows whose needs can be met.

        Args:
            pages: The table.
            rows: int32 ``[B, columns]``, as it was asked for them.
            asked: What they need.
            fit: bool ``[B]``, needs that can be met.
            refused: bool ``[B]``, rows whose work is not done, for lack of pages.
        """
        mapped_back = tf.where(refused[:, tf.newaxis], asked.mapped, 0)
        references = _add(asked.references, mapped_back, -1)
        fresh = asked.fresh & fit[:, tf.newaxis]
        taken_now = self._take(pages, references, fresh)
        replaced = tf.where(fresh & (rows > 0), rows, 0)
        after = tf.where(fresh, taken_now, rows)
        taken = tf.where(fresh, taken_now, 0)
        references = _add(_add(references, taken, 1), replaced, -1)
        in_place = asked.touched & asked.indexed & ~fresh & fit[:, tf.newaxis]
        taken = tf.where(in_place, rows, taken)
        before = tf.where(in_place, rows, replaced)
        evicted = tf.reduce_sum(tf.cast(tf.gather(pages.indexed, taken), tf.int32))
        pages = pages._replace(
            references=references,
            generation=_add(pages.generation, taken, 1),
            indexed=_mark(pages.indexed, taken, False),
            foreign=_mark(pages.foreign, taken, tf.gather(pages.foreign, before)),
        )
        return Given(pages, after, replaced, evicted)

    def _touched(self, plan: Plan) -> tf.Tensor:
        """Columns that a plan writes to, bool ``[B, columns]``."""
        size, columns = self.geometry.page_size, self.geometry.columns
        stop = plan.start + plan.fill + plan.steps
        first, end = plan.filled // size, -tf.math.floordiv(-stop, size)
        offsets = tf.range(self._most_pages)
        page = first[:, tf.newaxis] + offsets
        writes = (page < end[:, tf.newaxis]) & (stop > plan.filled)[:, tf.newaxis]
        column = tf.where(writes, self.geometry.column_of(page), columns)
        hits = tf.one_hot(column, columns, on_value=True, off_value=False)
        return tf.reduce_any(hits, axis=1)

    def _take(self, pages: Pages, references: tf.Tensor, fresh: tf.Tensor) -> tf.Tensor:
        """A free page for each place of ``fresh [B, columns]``: lowest number first, cached
        pages last and the longest unused of them first."""

        def take() -> tf.Tensor:
            number = tf.range(self.count, dtype=tf.int64)
            cached = number + self.count * (1 + pages.used)
            order = tf.where(pages.indexed, cached, number)
            order = tf.argsort(tf.where(references == 0, order, tf.int64.max), stable=True)
            rank = tf.cumsum(tf.reshape(tf.cast(fresh, tf.int32), [-1]), exclusive=True)
            rank = tf.minimum(rank, self.count - 1)
            return tf.reshape(tf.gather(order, rank), tf.shape(fresh))

        none = lambda: tf.zeros_like(fresh, tf.int32)  # noqa: E731
        return tf.cond(tf.reduce_any(fresh), take, none)

    # --- releasing, outside XLA ----------------------------------------------------------

    def release(self, slots: tf.Tensor, keep: tf.Tensor | None = None) -> None:
        """Gives pages of sessions back.

        Args:
            slots: int32 ``[n]``, each named once.
            keep: int32 ``[n]``, first columns that stay; none where left out.
        """
        table = self.variables.table.read()
        rows = tf.gather(table, slots)
        keep = tf.zeros_like(slots) if keep is None else keep
        stays = tf.range(self.geometry.columns) < keep[:, tf.newaxis]
        gone = tf.where(stays, 0, rows)
        references = _add(self.variables.references.read(), gone, -1)
        self.variables.references.assign(references)
        rows = tf.where(stays, rows, 0)
        table = tf.tensor_scatter_nd_update(table, slots[:, tf.newaxis], rows)
        self.variables.table.assign(table)

    def fork(self, source: tf.Tensor, target: tf.Tensor, filled: tf.Tensor) -> None:
        """Lets new sessions hold the pages of others; whoever writes first copies.

        Args:
            source: int32 ``[n]``, slots; the spare one shares nothing.
            target: int32 ``[n]``, slots without pages.
            filled: int32 ``[n]``, positions that the new sessions have on pages.
        """
        table = self.variables.table.read()
        rows = tf.gather(table, source)
        whole = filled <= self.geometry.layout.entries
        needed = -tf.math.floordiv(-filled, self.geometry.page_size)
        beyond = tf.range(self.geometry.columns) >= needed[:, tf.newaxis]
        rows = tf.where(beyond & whole[:, tf.newaxis], 0, rows)
        self.variables.references.assign(_add(self.variables.references.read(), rows, 1))
        self.variables.table.assign(tf.tensor_scatter_nd_update(table, target[:, tf.newaxis], rows))

    def free(self) -> tf.Tensor:
        """Pages that nobody refers to, int32."""
        return tf.reduce_sum(tf.cast(self.variables.references.read() == 0, tf.int32))

    def append(self, wants: tf.Tensor) -> tf.Tensor:
        """A page for each row of ``wants [B]``, of which there must be enough; int32 ``[B]``,
        0 where the row wants none. Who owns it, `put` says."""
        pages = self.read()
        taken = self._take(pages, pages.references, wants[:, tf.newaxis])[:, 0]
        return tf.where(wants, taken, 0)

    def put(self, slots: tf.Tensor, columns: tf.Tensor, taken: tf.Tensor) -> None:
        """Lets sessions own the pages of `append`.

        Args:
            slots: int32 ``[B]``, the spare where nothing was given.
            columns: int32 ``[B]``.
            taken: int32 ``[B]``; 0 = none.
        """
        pages = self.read()
        where = tf.stack([tf.where(taken > 0, slots, self.slots), columns], axis=1)
        where = tf.where((taken > 0)[:, tf.newaxis], where, [[self.slots, 0]])
        self.assign(
            pages._replace(
                table=tf.tensor_scatter_nd_update(pages.table, where, taken),
                references=_add(pages.references, taken, 1),
                generation=_add(pages.generation, taken, 1),
                indexed=_mark(pages.indexed, taken, False),
                foreign=_mark(pages.foreign, taken, True),
            )
        )

    def usage(self) -> dict[str, tf.Tensor]:
        """Pages by what they are for, each int64."""
        references = self.variables.references.read()[1:]
        indexed = self.variables.indexed.read()[1:]

        def count(pages: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(tf.cast(pages, tf.int64))

        return {
            "pages_used": count(references > 0),
            "pages_shared": count(references > 1),
            "pages_cached": count((references == 0) & indexed),
            "pages_free": count((references == 0) & ~indexed),
        }

    def check_integrity(self) -> tf.Tensor:
        """How many invariants do not hold, int64: every page is referred to by as many
        table entries as it counts, and the spare slot has none."""
        table = self.variables.table.read()
        flat = tf.reshape(table, [-1])
        counted = tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, self.count)
        references = self.variables.references.read()
        wrong = [
            tf.reduce_any(counted[1:] != references[1:]),
            references[0] != 1,
            tf.reduce_any(table[self.slots] != 0),
        ]
        return tf.reduce_sum(tf.cast(tf.stack(wrong), tf.int64))

    # --- publishing ----------------------------------------------------------------------

    def settle(
        self,
        pages: Pages,
        rows: tf.Tensor,
        plan: Plan,
        filled: tf.Tensor,
        slot: tf.Tensor,
        tenant: tf.Tensor,
        ids: tf.Tensor,
        floor: tf.Tensor,
    ) -> Pages:
        """What is true once the computation is over.

        Pages that nothing was written to go back, full pages are indexed, and the sessions'
        rows are put into the table.

        Args:
            pages: The table, with what was given.
            rows: int32 ``[B, columns]``, the sessions' rows with it.
            plan: What was done.
            filled: int32 ``[B]``, positions on pages now.
            slot: int32 ``[B]``, the spare for rows that change nothing.
            tenant: int64 ``[B]``.
            ids: int32 ``[B, history]``, what the sessions say.
            floor: int32 ``[B]``, positions below it are not on pages any more.
        """
        works = (slot < self.slots)[:, tf.newaxis]
        size, columns = self.geometry.page_size, self.geometry.columns
        whole = filled <= self.geometry.layout.entries
        beyond = tf.range(columns) >= -tf.math.floordiv(-filled, size)[:, tf.newaxis]
        unused = beyond & whole[:, tf.newaxis] & works
        if self.geometry.cache.policy.evicts:
            unused = ~self._live(floor, filled) & works
        references = _add(pages.references, tf.where(unused, rows, 0), -1)
        rows = tf.where(unused | ~works, 0, rows)
        pages = pages._replace(
            references=references,
            table=tf.tensor_scatter_nd_update(pages.table, slot[:, tf.newaxis], rows),
            foreign=self._foreign(pages.foreign, plan, rows, filled),
            clock=pages.clock + 1,
            used=_touch(pages.used, rows, pages.clock + 1),
        )
        if not self.geometry.cache.policy.shareable:
            return pages
        first = plan.filled // size
        most = filled
        if self._shared < self.geometry.layout.entries:
            most = tf.minimum(filled, self._shared)
        last = tf.where(works[:, 0] & whole, most // size, first)
        return self._index(pages, rows, first, last, tenant, ids)

    def _foreign(
        self, foreign: tf.Tensor, plan: Plan, rows: tf.Tensor, filled: tf.Tensor
    ) -> tf.Tensor:
        """`foreign` with the pages in it that a policy which selects wrote to token by token."""
        if not self.geometry.cache.policy.selects:
            return foreign
        size = self.geometry.page_size
        read = plan.start + plan.fill
        page = (read // size)[:, tf.newaxis] + tf.range(self._most_pages)
        made = (page * size < filled[:, tf.newaxis]) & (filled > read)[:, tf.newaxis]
        column = self.geometry.column_of(page)
        column = tf.where(made, tf.minimum(column, self.geometry.columns - 1), 0)
        pages = tf.where(made, tf.gather(rows, column, batch_dims=1), 0)
        return _mark(foreign, pages, True)

    def _live(self, floor: tf.Tensor, filled: tf.Tensor) -> tf.Tensor:
        """Columns that hold positions `floor` to `filled` − 1, bool ``[B, columns]``."""
        size, columns = self.geometry.page_size, self.geometry.columns
        page = (floor // size)[:, tf.newaxis] + tf.range(columns)
        here = page < -tf.math.floordiv(-filled, size)[:, tf.newaxis]
        column = tf.where(here, self.geometry.column_of(page), columns)
        return tf.reduce_any(tf.one_hot(column, columns, on_value=True, off_value=False), axis=1)

    def _index(
        self,
        pages: Pages,
        rows: tf.Tensor,
        first: tf.Tensor,
        last: tf.Tensor,
        tenant: tf.Tensor,
        ids: tf.Tensor,
    ) -> Pages:
        """Makes the pages `first` to `last` − 1 of each row findable, one after another: a
        page's digest needs its parent's generation."""
        size = self.geometry.page_size
        steps = tf.reduce_max(last - first)

        def body(step: tf.Tensor, *state: tf.Tensor) -> tuple[tf.Tensor, ...]:
            indexed, digest, tokens, parents, generations, tenants = state
            at = first + step
            live = at < last
            page = tf.where(live, _page_at(rows, at), 0)
            parent = tf.where((at == 0) | ~live, ROOT, _page_at(rows, at - 1))
            live &= (at == 0) | tf.gather(indexed, parent)
            live &= ~tf.gather(indexed, page) & ~tf.gather(pages.foreign, page)
            page = tf.where(live, page, 0)
            generation = tf.gather(pages.generation, parent)
            places = (at[:, tf.newaxis] * size + tf.range(size)) % ids.shape[1]
            said = tf.gather(ids, places, batch_dims=1)
            where = page[:, tf.newaxis]
            return (
                step + 1,
                tf.tensor_scatter_nd_update(indexed, where, page > 0),
                tf.tensor_scatter_nd_update(
                    digest, where, _digest(said, parent, generation, tenant)
                ),
                tf.tensor_scatter_nd_update(tokens, where, said),
                tf.tensor_scatter_nd_update(parents, where, parent),
                tf.tensor_scatter_nd_update(generations, where, generation),
                tf.tensor_scatter_nd_update(tenants, where, tenant),
            )

        names = ("indexed", "digest", "tokens", "parent", "parent_generation", "tenant")
        state = (tf.constant(0), *(getattr(pages, name) for name in names))
        state = tf.while_loop(lambda step, *_: step < steps, body, state)
        return pages._replace(**dict(zip(names, state[1:], strict=True)))


def _token_reader(request: Request, stored: Remembered, position: tf.Tensor):  # type: ignore[no-untyped-def]
    """Tokens that the session will hold, by absolute position ``[B, n]``."""
    history, width = stored.tokens.shape[1], request.tokens.shape[1]

    def read(places: tf.Tensor) -> tf.Tensor:
        old = tf.gather(stored.tokens, places % history, batch_dims=1)
        offset = tf.clip_by_value(places - position[:, tf.newaxis], 0, width - 1)
        new = tf.gather(request.tokens, offset, batch_dims=1)
        return tf.where(places < stored.held[:, tf.newaxis], old, new)

    return read


def _digest(
    tokens: tf.Tensor, parent: tf.Tensor, generation: tf.Tensor, tenant: tf.Tensor
) -> tf.Tensor:
    """int64 ``[B]`` of a page's tokens and of what stands before them."""
    multiplier = 6364136223846793005
    powers, power = [], 1
    for _ in range(tokens.shape[1] + 3):
        powers.append(power - 2**64 if power >= 2**63 else power)
        power = power * multiplier % 2**64
    head = tf.stack([tf.cast(parent, tf.int64), tf.cast(generation, tf.int64), tenant], axis=1)
    whole = tf.concat([head, tf.cast(tokens, tf.int64)], axis=1) + 1
    return tf.reduce_sum(whole * tf.constant(powers, tf.int64), axis=1)


def _page_at(rows: tf.Tensor, column: tf.Tensor) -> tf.Tensor:
    """Page in one column of each row ``[B, columns]``; columns out of range count as the
    nearest, for callers that mask them."""
    column = tf.clip_by_value(column, 0, rows.shape[1] - 1)
    return tf.gather(rows, column, batch_dims=1)


def _add(counts: tf.Tensor, pages: tf.Tensor, amount: int) -> tf.Tensor:
    """Adds to each named page, as often as it is named; page 0 stays as it is."""
    flat = tf.reshape(pages, [-1])
    amounts = tf.where(flat > 0, amount, 0)
    return tf.tensor_scatter_nd_add(counts, flat[:, tf.newaxis], amounts)


def _mark(flags: tf.Tensor, pages: tf.Tensor, value: bool | tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(pages, [-1])
    value = tf.reshape(tf.broadcast_to(value, tf.shape(pages)), [-1])
    values = tf.where(flat > 0, value, tf.gather(flags, flat))
    return tf.tensor_scatter_nd_update(flags, flat[:, tf.newaxis], values)


def _touch(used: tf.Tensor, pages: tf.Tensor, clock: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(pages, [-1])
    return tf.tensor_scatter_nd_update(
        used, flat[:, tf.newaxis], tf.where(flat > 0, clock, tf.zeros_like(clock))
    )


def fits(needs: Sequence[tf.Tensor], free: Sequence[tf.Tensor]) -> tf.Tensor:
    """Rows whose needs can be met, in order; a row that does not fit takes nothing.

    Args:
        needs: int32 ``[B]``, pages of each table.
        free: int32, how many it has.
    """

    def body(row: tf.Tensor, fit: tf.Tensor, *left: tf.Tensor) -> tuple[tf.Tensor, ...]:
        wanted = [tf.gather(need, row) for need in needs]
        enough = [some <= there for some, there in zip(wanted, left, strict=True)]
        ok = functools.reduce(tf.logical_and, enough)
        pairs = zip(wanted, left, strict=True)
        after = [tf.where(ok, there - some, there) for some, there in pairs]
        return row + 1, tf.tensor_scatter_nd_update(fit, [[row]], [ok]), *after

    rows = tf.size(needs[0])
    state = (tf.constant(0), tf.ones_like(needs[0], tf.bool), *free)
    return tf.while_loop(lambda row, *_: row < rows, body, state)[1]

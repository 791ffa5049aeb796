"""Sessions out of and into the graph, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfkv.errors import INPUT_NUMBERS, Status
from tfkv.export.exact_tail import ExactTail
from tfkv.export.history import History
from tfkv.export.kept_tokens import KeptTokens
from tfkv.export.layer_groups import LayerGroups
from tfkv.export.layer_pools import LayerPools
from tfkv.export.page_tables import PageTables
from tfkv.export.plan import Refusal, Remembered
from tfkv.export.rows import NO_LOGPROB, STOPPED
from tfkv.export.session_table import Names, SessionTable, first_of_session


class Piece(NamedTuple):
    """One page of a session, each ``[B, ...]``.

    Attributes:
        page: int32, which page of the session, from 0.
        held: int32, tokens that the whole session holds.
        filled: int32, positions of it that are on pages.
        tokens: int32 ``[B, C]``.
        kinds: int32 ``[B, C]``.
        logprobs: float32 ``[B, C]``.
        page_bytes: string ``[B]``, keys and values of all layers as they are stored, and behind
            them what attention they got, where a policy adds it up. Not
            uint8: TensorFlow Serving answers numbers one varint each, 20 times as slow.
    """

    page: tf.Tensor
    held: tf.Tensor
    filled: tf.Tensor
    tokens: tf.Tensor
    kinds: tf.Tensor
    logprobs: tf.Tensor
    page_bytes: tf.Tensor


class PageCopies:
    """Reads pages of sessions, and makes sessions of them again.

    Every piece leaves a valid session: the first pages of the one that was read. A session
    that has overwritten its oldest tokens, or forgotten them, cannot be read.

    Args:
        sessions: The session table.
        history: What sessions said.
        tables: Whose pages are whose.
        pools: The pages.
        tail: What is kept exactly beside them, which is not copied.
        kept: What attention their tokens got.
        groups: Where tokens lie.
        vocabulary: Token ids are below it.
    """

    def __init__(
        self,
        sessions: SessionTable,
        history: History,
        tables: PageTables,
        pools: LayerPools,
        tail: ExactTail,
        kept: KeptTokens,
        groups: LayerGroups,
        vocabulary: int,
    ) -> None:
        self._sessions = sessions
        self._history = history
        self._tables = tables
        self._pools = pools
        self._tail = tail
        self._kept = kept
        #: Bytes of one page of a session.
        self.page_bytes = pools.page_bytes + kept.page_bytes
        self._groups = groups
        self._size = groups.page_size
        self._vocabulary = vocabulary
        #: Most tokens a session can have to be copied.
        self.limit = min(groups.entries, groups.positions, history.size)

    def read(self, names: Names, page: tf.Tensor) -> tuple[Piece, Refusal, tf.Tensor]:
        """A page of each session, under the lock, and the number of its adapter; a refused row
        gets zeros and no bytes."""
        zeros = tf.zeros_like(page)
        refusal = Refusal(zeros, zeros).when(names.probes(), Status.INVALID, 1)
        refusal = refusal.when(page < 0, Status.INVALID, INPUT_NUMBERS["page"])
        self._sessions.reap()
        found = tf.cast(self._sessions.find(names), tf.int32)
        slot = tf.where(found < 0, self._sessions.slots, found)
        stored = self._history.recall(slot, found < 0)
        refusal = refusal.when(found < 0, Status.UNKNOWN, 0)
        refusal = refusal.when(stored.held == 0, Status.EMPTY, 0)
        refusal = refusal.when(stored.reached > self.limit, Status.NOT_REVERSIBLE, self.limit)
        # What was evicted by score is not on pages.
        refusal = refusal.when(stored.floor > 0, Status.NOT_REVERSIBLE, self.limit)
        refusal = refusal.when(page >= self._pages(stored.held), Status.GAP, stored.held)
        ok = refusal.status == Status.OK
        page = tf.where(ok, page, 0)
        physical = tuple(
            tf.where(ok, tf.gather(row, geometry.column_of(page), batch_dims=1), 0)
            for row, geometry in zip(self._tables.rows(slot), self._groups.groups, strict=True)
        )
        places = page[:, tf.newaxis] * self._size + tf.range(self._size)
        live = ok[:, tf.newaxis] & (places < stored.held[:, tf.newaxis])
        at = places % self._history.size

        def said(values: tf.Tensor, nothing: float) -> tf.Tensor:
            return tf.where(
                live, tf.gather(values, at, batch_dims=1), tf.cast(nothing, values.dtype)
            )

        piece = Piece(
            page,
            stored.held,
            stored.filled,
            said(stored.tokens, 0),
            said(stored.kinds, 0),
            said(stored.logprobs, NO_LOGPROB),
            tf.where(ok, self._bytes_of(slot, page, physical), ""),
        )
        return piece, refusal, tf.where(ok, self._sessions.adapters.read(slot), 0)

    def write(
        self,
        names: Names,
        piece: Piece,
        adapter: tf.Tensor,
        refusal: Refusal,
        ttl_ms: tf.Tensor,
        pin: tf.Tensor,
    ) -> tuple[tf.Tensor, Refusal, tf.Tensor]:
        """Adds a page to each session, under the lock.

        Args:
            names: The sessions; page 0 makes them.
            piece: What to add.
            adapter: int32 ``[B]``, which the sessions have.
            refusal: Rows that are refused already.
            ttl_ms: int64 ``[B]``.
            pin: int32 ``[B]``.

        Returns:
            Tokens the session holds, who was refused, and which rows made a session.
        """
        now = self._sessions.reap()
        spare = self._sessions.slots
        refusal = self._check(names, piece, refusal)
        begin = piece.page * self._size
        end = tf.minimum(begin + self._size, piece.held)
        found = tf.cast(self._sessions.find(names), tf.int32)
        stored = self._history.recall(tf.where(found < 0, spare, found), found < 0)
        refusal = refusal.when((found < 0) & (piece.page > 0), Status.UNKNOWN, 0)
        refusal = self._sessions.refuse_other(adapter, found, refusal)
        refusal = self._compare(piece, stored, begin, end, refusal)
        first = first_of_session(names.keys(), refusal.status == Status.OK)
        refusal = refusal.when(first != tf.range(tf.size(first)), Status.BUSY, first)
        filled = tf.minimum(end, piece.filled)
        adds = (refusal.status == Status.OK) & (stored.held <= begin)
        pages, refusal = self._tables.append(
            adds & (filled > begin), refusal, self._sessions.retry_after(now)
        )
        opens = (refusal.status == Status.OK) & (found < 0)
        made, _, refusal = self._sessions.open(names, opens, refusal, now, adapter)
        served = refusal.status == Status.OK
        adds &= served
        slot = tf.where(found < 0, made, found)
        target = tf.where(adds, slot, spare)
        pages = tuple(tf.where(adds, page, 0) for page in pages)
        self._tables.put(target, piece.page, pages)
        self._put(target, piece, pages)
        places = begin[:, tf.newaxis] + tf.range(self._size)
        places = tf.where(adds[:, tf.newaxis] & (places < end[:, tf.newaxis]), places, -1)
        self._history.write(target, places, piece.tokens, piece.kinds, piece.logprobs)
        self._tail.begin(target, filled)
        self._history.publish(target, end, filled, tf.maximum(stored.reached, end), stored.floor)
        self._sessions.renew(tf.where(served, slot, spare), served, now, ttl_ms, pin)
        held = tf.where(adds, end, stored.held)
        return held, refusal, made >= 0

    def _bytes_of(
        self, slot: tf.Tensor, page: tf.Tensor, physical: Sequence[tf.Tensor]
    ) -> tf.Tensor:
        """What is stored of logical pages of slots that lie on physical ones, string ``[B]``."""
        codes = self._pools.read_bytes(physical)
        if not self._kept.page_bytes:
            return codes
        return tf.strings.join([codes, self._kept.read_bytes(slot, page)])

    def _put(self, slot: tf.Tensor, piece: Piece, physical: Sequence[tf.Tensor]) -> None:
        """Puts back what `_bytes_of` gave; physical page 0 and the spare slot are nobody's."""
        self._pools.write_bytes(physical, piece.page_bytes)
        if self._kept.page_bytes:
            page = tf.maximum(piece.page, 0)
            self._kept.write_bytes(slot, page, piece.page_bytes, self._pools.page_bytes)

    def _check(self, names: Names, piece: Piece, refusal: Refusal) -> Refusal:
        """Refuses pieces that no session can have."""
        places = piece.page[:, tf.newaxis] * self._size + tf.range(self._size)
        live = places < piece.held[:, tf.newaxis]
        odd_token = (piece.tokens < 0) | (piece.tokens >= self._vocabulary)
        odd_kind = (piece.kinds < 0) | (piece.kinds > STOPPED)
        # Not `~(x <= 1)`: the graph optimiser makes that `x > 1`, which NaN passes.
        odd_logprob = tf.math.is_nan(piece.logprobs) | (piece.logprobs > NO_LOGPROB)
        behind = piece.held - piece.filled
        wrong = {
            "session_id": names.probes(),
            "page": (piece.page < 0) | (piece.page >= self._pages(piece.held)),
            "held": piece.held < 1,
            "filled": (behind < 0) | (behind > 1),
            "tokens": tf.reduce_any(live & odd_token, axis=1),
            "kinds": tf.reduce_any(live & odd_kind, axis=1),
            "logprobs": tf.reduce_any(live & odd_logprob, axis=1),
            "page_bytes": tf.strings.length(piece.page_bytes) != self.page_bytes,
        }
        for name, holds in wrong.items():
            refusal = refusal.when(holds, Status.INVALID, INPUT_NUMBERS[name])
        return refusal.when(piece.held > self.limit, Status.OVERFLOW, self.limit)

    def _compare(
        self,
        piece: Piece,
        stored: Remembered,
        begin: tf.Tensor,
        end: tf.Tensor,
        refusal: Refusal,
    ) -> Refusal:
        """A piece goes on where the session ends, or says what it holds already."""
        refusal = refusal.when(begin > stored.held, Status.GAP, stored.held)
        places = begin[:, tf.newaxis] + tf.range(self._size)
        known = tf.gather(stored.tokens, places % self._history.size, batch_dims=1)
        shared = tf.minimum(end, stored.held)[:, tf.newaxis]
        differs = (places < shared) & (known != piece.tokens)
        first = tf.reduce_min(tf.where(differs, places, 2**31 - 1), axis=1)
        refusal = refusal.when(tf.reduce_any(differs, axis=1), Status.CONFLICT, first)
        # Half of a page, or a last token without keys, is another conversation's state.
        partly = (stored.held < end) & ((stored.held > begin) | (stored.filled < begin))
        return refusal.when(partly, Status.CONFLICT, stored.held)

    def _pages(self, held: tf.Tensor) -> tf.Tensor:
        """Pages that tokens lie on."""
        return -tf.math.floordiv(-held, self._size)

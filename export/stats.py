"""Counters of an artifact, published after each computation."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfkv.errors import Status
from tfkv.export.advance import Work
from tfkv.export.history import History
from tfkv.export.layer_pools import LayerPools
from tfkv.export.page_tables import PageTables
from tfkv.export.rows import Admission, Answer
from tfkv.export.session_slots import SessionSlots
from tfkv.export.session_table import SessionTable
from tfkv.export.transient import TransientVariable
from tfkv.manifest import STATS

_REJECTED = {
    "rejected_invalid": (Status.INVALID, Status.EMPTY),
    "rejected_unknown": (Status.UNKNOWN,),
    "rejected_conflict": (Status.CONFLICT, Status.GAP, Status.FORGOTTEN),
    "rejected_full": (Status.FULL, Status.OVERFLOW),
    "rejected_busy": (Status.BUSY,),
    "rejected_other": (Status.NOT_REVERSIBLE, Status.QUOTA, Status.ADAPTER),
}


#: Buckets of the batch size: most rows of each, None for any number.
_BATCHES = {
    "batches_to_1": 1,
    "batches_to_2": 2,
    "batches_to_4": 4,
    "batches_to_8": 8,
    "batches_to_more": None,
}


class Stats:
    """What ``stats`` answers with.

    Readers look at a vector that is published under the lock once a computation is over:
    reading the variables themselves would wait for whatever is running.

    Args:
        sessions: The session table.
        history: The sessions' memory.
        pools: The page pools, or the slots that stand for them.
        tables: Whose pages are whose, likewise.
    """

    def __init__(
        self,
        sessions: SessionTable,
        history: History,
        pools: LayerPools | SessionSlots,
        tables: PageTables | SessionSlots,
    ) -> None:
        self._sessions = sessions
        self._history = history
        self._pools = pools
        self._tables = tables
        self.counters = TransientVariable("counters", (len(STATS),), tf.int64)
        self.published = TransientVariable("published_stats", (len(STATS),), tf.int64)
        self.loaded_ms = TransientVariable("loaded_ms", (), tf.int64, initial=_now_ms)
        self.epoch = TransientVariable("epoch", (), tf.int64, initial=draw_numbers)

    def tally(
        self, work: Work, answer: Answer, admission: Admission, probes: tf.Tensor, score: tf.Tensor
    ) -> tf.Tensor:
        """What a batch adds to the counters; probes count for nothing. int64 vector."""
        plan = work.plan
        rows = tf.range(tf.size(plan.status))
        # Padding repeats rows, so a copy is a row whose first is another one.
        counted = ~probes & (admission.first == rows)
        ok = counted & (plan.status == Status.OK)
        idle = ok & (plan.fill == 0) & (plan.steps == 0)

        def total(rows: tf.Tensor, amount: tf.Tensor | int = 1) -> tf.Tensor:
            return tf.reduce_sum(tf.cast(tf.where(rows, amount, 0), tf.int64))

        added = {
            "calls": tf.cast(tf.reduce_any(counted), tf.int64),
            "rows": total(counted),
            "rows_padded": total(~probes & ~counted),
            "prefix_lookups": total(ok, work.found.looked_up),
            "prefix_hits": total(ok, work.reused // self._pools.page_size),
            "tokens_reused": total(ok, work.reused),
            "evictions": tf.cast(work.evicted, tf.int64),
            "tokens_prefilled": total(ok, plan.fill),
            "tokens_decoded": total(ok, tf.maximum(answer.count - plan.replayed, 0)),
            "tokens_guessed": total(ok, work.made.guessed),
            "tokens_accepted": total(ok, work.made.accepted),
            "tokens_scored": total(ok & score, answer.taken),
            "replays": total(idle & (plan.replayed > 0)),
            "sessions_opened": total(ok & admission.fresh),
        }
        for name, statuses in _REJECTED.items():
            refused = [plan.status == int(status) for status in statuses]
            added[name] = total(counted & tf.reduce_any(tf.stack(refused), axis=0))
        # Padding and probes are no rows: a warm-up leaves the histogram empty.
        size, below = added["rows"], 0
        for name, most in _BATCHES.items():
            fits = (size > below) if most is None else (size > below) & (size <= most)
            added[name] = tf.cast(fits, tf.int64)
            below = most or below
        zero = tf.constant(0, tf.int64)
        return tf.stack([added.get(name, zero) for name in STATS])

    def add(self, added: tf.Tensor, names: tf.Tensor | None = None) -> None:
        """Adds to the counters, and publishes them with what the sessions hold now.

        Args:
            added: int64 vector, as of `tally`.
            names: `SessionTable.sizes` where it cannot be asked: tables stay outside XLA.
        """
        names = self._sessions.sizes() if names is None else names
        counters = self.counters.read() + added
        self.counters.assign(counters)
        used = self._sessions.expiry.read()[:-1] > 1
        held, filled = self._history.held.read()[:-1], self._history.filled.read()[:-1]
        now = {
            "slots_used": tf.reduce_sum(tf.cast(used, tf.int32)),
            **self._tables.usage(used, self._pools.page_bytes_of_groups),
            "sessions_reaped": self._sessions.reaped.read(),
            "integrity": self._broken(names, used, held, filled),
        }
        vector = tf.unstack(counters)
        for index, name in enumerate(STATS):
            if name in now:
                vector[index] = tf.cast(now[name], tf.int64)
        self.published.assign(tf.stack(vector))

    def add_one(self, name: str, rows: tf.Tensor) -> None:
        """Adds to one counter as many as there are true ``rows``, and publishes."""
        index = list(STATS).index(name)
        amount = tf.reduce_sum(tf.cast(rows, tf.int64))
        self.add(tf.one_hot(index, len(STATS), dtype=tf.int64) * amount)

    def _broken(
        self, names: tf.Tensor, used: tf.Tensor, held: tf.Tensor, filled: tf.Tensor
    ) -> tf.Tensor:
        """How many invariants do not hold: 0 in a sound artifact."""
        alive = tf.reduce_sum(tf.cast(self._sessions.expiry.read()[:-1] > 0, tf.int64))
        rows = tf.reduce_any(used & ((filled > held) | (filled < held - 1)))
        broken = [*tf.unstack(names != alive), rows]
        return tf.reduce_sum(tf.cast(tf.stack(broken), tf.int64)) + self._tables.check_integrity()

    def read(self, rows: tf.Tensor) -> dict[str, tf.Tensor]:
        """The published values, each int64 ``[rows]``."""
        values = dict(zip(STATS, tf.unstack(self.published.read()), strict=True))
        values["slots"] = tf.constant(self._sessions.slots, tf.int64)
        values["pages"] = tf.constant(sum(self._pools.pages) - len(self._pools.pages), tf.int64)
        values["bytes_pool"] = tf.constant(self._pools.nbytes, tf.int64)
        values["uptime_ms"] = _now_ms() - self.loaded_ms.read()
        values["epoch"] = self.epoch.read()
        return {name: tf.fill([rows], value) for name, value in values.items()}


def _now_ms() -> tf.Tensor:
    return tf.cast(tf.timestamp() * 1000.0, tf.int64)


def draw_numbers(shape: tf.Tensor | Sequence[int] = ()) -> tf.Tensor:
    """Numbers that nobody else has drawn, int64: random bits, and the clock in case a seed fixes
    those."""
    clock = tf.cast(tf.timestamp() * 1e6, tf.int64)
    drawn = tf.random.uniform(shape, maxval=2**62, dtype=tf.int64)
    return tf.bitwise.bitwise_xor(clock, drawn)

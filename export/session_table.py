"""Which conversation owns which slot: names, lifetimes, and the lock over all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import tensorflow as tf

from tfkv.errors import INPUT_NUMBERS, Status
from tfkv.export.adapter_table import ANOTHER, NO_SUCH, AdapterTable
from tfkv.export.page_tables import PageTables
from tfkv.export.plan import Refusal
from tfkv.export.rows import Admission, Request
from tfkv.export.session_slots import SessionSlots
from tfkv.export.transient import TransientVariable, unique_name

T = TypeVar("T")

#: Expiry of a pinned session.
NEVER = 2**63 - 1

#: Expiry of a slot whose first call is not over: free again, should it never be served.
UNSERVED = 1


class Names(NamedTuple):
    """String inputs, each ``[B]``."""

    session_id: tf.Tensor
    tenant: tf.Tensor
    adapter: tf.Tensor

    def keys(self) -> tf.Tensor:
        """Unambiguous keys: the tenant's length stands before it."""
        length = tf.strings.as_string(tf.strings.length(self.tenant))
        return tf.strings.join([length, ":", self.tenant, self.session_id])

    def probes(self) -> tf.Tensor:
        """Rows without a session id: they warm the graph up, and are neither served nor counted."""
        return tf.strings.length(self.session_id) == 0


class _Mutex(tf.saved_model.experimental.TrackableResource):
    """The one lock of an artifact."""

    def __init__(self) -> None:
        super().__init__()
        self._name = unique_name("mutex")
        self._resource_handle = self._create_resource()

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.MutexV2(container="tfkv", shared_name=self._name)

    def _initialize(self) -> None:
        pass


class SessionTable(tf.Module):
    """Maps session names to slots and reaps what has expired.

    A slot is free when its expiry is 0. Strings and the clock cannot enter XLA, so all of
    this runs outside, under the lock that the batched bodies take.

    Args:
        slots: Sessions held at once; row `slots` of every per-slot variable is a spare that
            refused rows write to.
        ttl_ms: Lifetime where the caller does not say.
        pages: Whose pages go back when a session ends.
        quota: Most sessions a tenant may hold; 0 = any number.
        adapters: Which session has which.
    """

    def __init__(
        self,
        slots: int,
        ttl_ms: int,
        pages: PageTables | SessionSlots,
        quota: int,
        adapters: AdapterTable,
    ) -> None:
        super().__init__(name="sessions")
        self.slots = slots
        self.ttl_ms = ttl_ms
        self.quota = quota
        self.adapters = adapters
        self._pages = pages
        self.slot_of = tf.lookup.experimental.MutableHashTable(
            tf.string, tf.int64, default_value=-1, name="slot_of"
        )
        self.key_of = tf.lookup.experimental.MutableHashTable(
            tf.int64, tf.string, default_value="", name="key_of"
        )
        self.expiry = TransientVariable("session_expiry", (slots + 1,), tf.int64)
        self.reaped = TransientVariable("sessions_reaped", (), tf.int64)
        self.tenant_numbers = tf.lookup.experimental.MutableHashTable(
            tf.string, tf.int64, default_value=-1, name="tenant_numbers"
        )
        self.tenant_of_slot = TransientVariable("session_tenant", (slots + 1,), tf.int64)
        self._mutex = _Mutex()

    def locked(self, body: Callable[[], T]) -> T:
        """Runs `body` while no other call of the artifact runs one.

        The body becomes one call in the graph: the lock is given back only once all its
        effects are done, not just those that its results depend on.
        """
        lock = tf.raw_ops.MutexLock(mutex=self._mutex.resource_handle)
        with tf.control_dependencies([lock]):
            results = tf.function(body, autograph=False)()
        with tf.control_dependencies(tf.nest.flatten(results)):
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        return results

    def reap(self) -> tf.Tensor:
        """Frees the slots of expired sessions, and their pages. Returns the time, int64 ms."""
        now_ms = tf.cast(tf.timestamp() * 1000.0, tf.int64)
        expiry = self.expiry.read()
        dead = (expiry > 0) & (expiry <= now_ms)

        def bury() -> tf.Tensor:
            slots = tf.where(dead)[:, 0]
            self._forget(slots, self.key_of.lookup(slots))
            self._pages.release(tf.cast(slots, tf.int32))
            self.expiry.assign(tf.where(dead, tf.zeros_like(expiry), expiry))
            lived = tf.reduce_sum(tf.cast(dead & (expiry > UNSERVED), tf.int64))
            self.reaped.assign(self.reaped.read() + lived)
            return now_ms

        return tf.cond(tf.reduce_any(dead), bury, lambda: now_ms)

    def find(self, names: Names) -> tf.Tensor:
        """Slot of each row, int64; −1 = no such session."""
        return _vector(self.slot_of.lookup(names.keys()))

    def close(self, names: Names) -> tf.Tensor:
        """Frees the rows' slots. Returns them, −1 where there was none."""
        keys = names.keys()
        slots = _vector(self.slot_of.lookup(keys))
        found = slots >= 0
        # Two rows may close the same session: its pages are given back once.
        gone, _ = tf.unique(tf.boolean_mask(slots, found))
        self._forget(tf.boolean_mask(slots, found), tf.boolean_mask(keys, found))
        self._pages.release(tf.cast(gone, tf.int32))
        spare = tf.where(found, slots, self.slots)
        zeros = tf.zeros_like(spare)
        self.expiry.assign(
            tf.tensor_scatter_nd_update(self.expiry.read(), spare[:, tf.newaxis], zeros)
        )
        return slots

    def admit(self, names: Names, request: Request, refusal: Refusal) -> Admission:
        """Finds or makes each row's session.

        Args:
            names: Who calls.
            request: What they ask for.
            refusal: Rows that are refused already.
        """
        now = self.reap()
        keys = names.keys()
        slot = tf.cast(_vector(self.slot_of.lookup(keys)), tf.int32)
        rows = tf.range(tf.size(slot))
        absent = slot < 0
        refusal = refusal.when(absent & (request.position > 0), Status.UNKNOWN, 0)
        refusal = refusal.when(absent & (request.length == 0), Status.EMPTY, 0)
        adapter = self.adapters.number(names.adapter)
        refusal = self.refuse_other(adapter, slot, refusal)
        first = first_of_session(keys, refusal.status == Status.OK)
        needs = absent & (first == rows) & (refusal.status == Status.OK)
        given, tenant, refusal = self.open(names, needs, refusal, now, adapter)
        same = _copies(names, request, first)
        refusal = refusal.when(~same, Status.BUSY, first)
        # Copies of a row share what it got, and its refusal; a row that differs stands alone.
        first = tf.where(same, first, rows)
        status, detail = (tf.gather(value, first) for value in refusal)
        slot = tf.gather(tf.where(absent, given, slot), first)
        slot = tf.where((slot < 0) | (status != Status.OK), self.slots, slot)
        return Admission(
            slot=slot,
            fresh=tf.gather(given >= 0, first),
            first=first,
            status=status,
            detail=detail,
            tenant=self.adapters.owner(tenant, adapter),
            retry_ms=self.retry_after(now)[tf.newaxis],
            now_ms=now[tf.newaxis],
        )

    def refuse_other(self, adapter: tf.Tensor, slot: tf.Tensor, refusal: Refusal) -> Refusal:
        """Refuses rows whose session, if there is one, has another adapter.

        Args:
            adapter: int32 ``[B]``, the one it should have.
            slot: int32 ``[B]``; −1 = there is none.
            refusal: What was refused already.
        """
        other = (slot >= 0) & (self.adapters.read(tf.maximum(slot, 0)) != adapter)
        return refusal.when(other, Status.ADAPTER, ANOTHER)

    def open(
        self,
        names: Names,
        needs: tf.Tensor,
        refusal: Refusal,
        now: tf.Tensor,
        adapter: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, Refusal]:
        """Makes sessions.

        Args:
            names: Who calls.
            needs: bool ``[B]``, rows that need a session, each of another name.
            refusal: What was refused already.
            now: int64 milliseconds.
            adapter: int32 ``[B]``, which each session shall have.

        Returns:
            Slot of each row, int32, −1 where it got none; its tenant's number; what is
            refused now: `QUOTA` or `FULL`.
        """
        tenant = self._tenant(names.tenant, needs)
        crowded = needs & self._over_quota(tenant, needs)
        refusal = refusal.when(crowded, Status.QUOTA, self.quota)
        needs &= ~crowded
        nowhere = tf.zeros_like(refusal.status) - 1
        slot, full = tf.cond(
            tf.reduce_any(needs),
            lambda: self._allocate(names.keys(), needs, tenant, adapter),
            lambda: (nowhere, needs),
        )
        slot, full = _vector(slot), _vector(full)
        return slot, tenant, refusal.when(full, Status.FULL, self.retry_after(now))

    def sizes(self) -> tf.Tensor:
        """Entries of both name tables, int64 ``[2]``: each has one for each session."""
        return tf.stack([self.slot_of.size(), self.key_of.size()])

    def renew(
        self, slot: tf.Tensor, served: tf.Tensor, now: tf.Tensor, ttl_ms: tf.Tensor, pin: tf.Tensor
    ) -> None:
        """Lets the sessions of served rows live on."""
        expiry = self.expiry_after(now, ttl_ms, pin)
        rows = tf.where(served, slot, self.slots)[:, tf.newaxis]
        expiry = tf.where(served, expiry, tf.zeros_like(expiry))
        self.expiry.assign(tf.tensor_scatter_nd_update(self.expiry.read(), rows, expiry))

    def _tenant(self, names: tf.Tensor, needs: tf.Tensor) -> tf.Tensor:
        """A number for each tenant, int64 ``[B]``; one is made when a session is."""

        def number() -> tf.Tensor:
            fresh, _ = tf.unique(tf.boolean_mask(names, _vector(needs)))
            known = _vector(self.tenant_numbers.lookup(fresh))
            made = tf.range(tf.size(fresh, tf.int64)) + self.tenant_numbers.size()
            self.tenant_numbers.insert(fresh, tf.where(known < 0, made, known))
            return self.tenant_numbers.lookup(names)

        numbers = tf.cond(tf.reduce_any(needs), number, lambda: self.tenant_numbers.lookup(names))
        return _vector(numbers)

    def _over_quota(self, tenant: tf.Tensor, needs: tf.Tensor) -> tf.Tensor:
        """Rows whose tenant holds all the sessions it may, bool ``[B]``."""
        if not self.quota:
            return tf.zeros_like(needs)
        used = self.expiry.read()[: self.slots] > 0
        mine = tf.equal(self.tenant_of_slot.read()[: self.slots], tenant[:, tf.newaxis])
        holds = tf.reduce_sum(tf.cast(used & mine, tf.int32), axis=1)
        same = tf.equal(tenant[:, tf.newaxis], tenant) & needs
        earlier = tf.linalg.band_part(tf.cast(same, tf.int32), -1, 0)
        return holds + tf.reduce_sum(earlier, axis=1) > self.quota

    def _allocate(
        self, keys: tf.Tensor, needs: tf.Tensor, tenant: tf.Tensor, adapter: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Lowest free slots for the rows that need one: slot or −1, and whether none was left."""
        free = tf.cast(tf.where(self.expiry.read()[: self.slots] == 0)[:, 0], tf.int32)
        rank = tf.cumsum(tf.cast(needs, tf.int32)) - 1
        granted = _vector(needs & (rank < tf.size(free)))
        padded = tf.concat([free, tf.fill([tf.size(rank)], -1)], axis=0)
        slot = tf.where(granted, tf.gather(padded, tf.maximum(rank, 0)), -1)
        new_slots = tf.cast(tf.boolean_mask(slot, granted), tf.int64)
        new_keys = tf.boolean_mask(keys, granted)
        self.slot_of.insert(new_keys, new_slots)
        self.key_of.insert(new_slots, new_keys)
        where = new_slots[:, tf.newaxis]
        owners = tf.boolean_mask(tenant, granted)
        self.tenant_of_slot.assign(
            tf.tensor_scatter_nd_update(self.tenant_of_slot.read(), where, owners)
        )
        self.adapters.write(new_slots, tf.boolean_mask(adapter, granted))
        # Expired at once, were the call to end before it publishes.
        once = tf.fill(tf.shape(new_slots), tf.constant(UNSERVED, tf.int64))
        self.expiry.assign(tf.tensor_scatter_nd_update(self.expiry.read(), where, once))
        return slot, needs & ~granted

    def retry_after(self, now: tf.Tensor) -> tf.Tensor:
        """Milliseconds until the earliest session expires, int32."""
        expiry = self.expiry.read()[: self.slots]
        expiry = tf.where(expiry == UNSERVED, now + self.ttl_ms, expiry)  # taken by a batch mate
        earliest = tf.reduce_min(tf.where(expiry > 0, expiry, NEVER))
        return tf.cast(tf.minimum(earliest - now, 2**31 - 1), tf.int32)

    def _forget(self, slots: tf.Tensor, keys: tf.Tensor) -> None:
        self.slot_of.remove(keys)
        self.key_of.remove(slots)

    def expiry_after(self, now_ms: tf.Tensor, ttl_ms: tf.Tensor, pin: tf.Tensor) -> tf.Tensor:
        """When sessions used now expire, int64 ``[B]``."""
        ttl = tf.where(ttl_ms > 0, ttl_ms, self.ttl_ms)
        never = tf.zeros_like(ttl) + NEVER
        return tf.where(pin == 1, never, now_ms + tf.minimum(ttl, NEVER // 4))


def check_request(
    names: Names,
    request: Request,
    adapters: AdapterTable,
    vocabulary: int,
    decode_chunk: int,
    width: tf.Tensor,
) -> Refusal:
    """Refuses rows with a value out of range; ``detail`` is the input's number.

    Args:
        names: Who calls.
        request: What they ask for, padded.
        adapters: Which there are.
        vocabulary: Token ids are below it.
        decode_chunk: Most tokens one call samples.
        width: int32, width of `tokens` as it came, before it was padded.
    """
    r = request
    given = tf.range(r.tokens.shape[1]) < r.length[:, tf.newaxis]
    bad_token = given & ((r.tokens < 0) | (r.tokens >= vocabulary))
    bad_stop = (r.stop_tokens < -1) | (r.stop_tokens >= vocabulary)
    at_least_0 = (r.temperature >= 0.0) & (r.temperature < float("inf"))
    wrong = {
        "session_id": names.probes(),
        "length": (r.length < 0) | (r.length > width),
        "tokens": tf.reduce_any(bad_token, axis=1),
        "position": r.position < -1,
        "max_new_tokens": (r.max_new_tokens < 0) | (r.max_new_tokens > decode_chunk),
        "temperature": ~at_least_0,
        "top_p": ~((r.top_p > 0) & (r.top_p <= 1)),
        "min_p": ~((r.min_p >= 0) & (r.min_p <= 1)),
        "repetition_penalty": ~((r.repetition_penalty > 0) & (r.repetition_penalty < float("inf"))),
        "top_k": r.top_k < 0,
        "overflow": (r.overflow < 0) | (r.overflow > 2),
        "pin": (r.pin < 0) | (r.pin > 1),
        "ttl_ms": r.ttl_ms < 0,
        "stop_tokens": tf.reduce_any(bad_stop, axis=1),
    }
    holds = tf.stack(list(wrong.values()), axis=1)
    numbers = tf.constant([INPUT_NUMBERS[name] for name in wrong])
    which = tf.gather(numbers, tf.argmax(tf.cast(holds, tf.int32), axis=1))
    none = tf.zeros_like(r.length)
    refusal = Refusal(none, none).when(tf.reduce_any(holds, axis=1), Status.INVALID, which)
    return refusal.when(adapters.number(names.adapter) < 0, Status.ADAPTER, NO_SUCH)


def _vector(x: tf.Tensor) -> tf.Tensor:
    """The same tensor with its rank known: table lookups and string joins lose it."""
    return tf.ensure_shape(x, [None])


def first_of_session(keys: tf.Tensor, accepted: tf.Tensor) -> tf.Tensor:
    """First accepted row with the same key, else the first with it; int32 ``[B]``.

    A refused row is nobody's first as long as another can be served.
    """
    equal = keys[:, tf.newaxis] == keys[tf.newaxis, :]
    rank = tf.cast(equal, tf.int32) + tf.cast(equal & accepted[tf.newaxis, :], tf.int32)
    return tf.argmax(rank, axis=1, output_type=tf.int32)


def _copies(names: Names, request: Request, first: tf.Tensor) -> tf.Tensor:
    """Whether each row asks for just what the first row of its session asks for."""
    words = tf.concat([_words(value) for value in request], axis=1)
    same = tf.reduce_all(tf.gather(words, first) == words, axis=1)
    return same & (tf.gather(names.adapter, first) == names.adapter)


def _words(x: tf.Tensor) -> tf.Tensor:
    """The bits of ``x [B]`` or ``[B, n]`` as int32 ``[B, m]``."""
    if x.dtype != tf.int32:
        x = tf.bitcast(x, tf.int32)
    return x if x.shape.rank == 2 else x[:, tf.newaxis]

"""The stateful engine: everything of an artifact that lives in its graph."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import INPUT_NUMBERS, ConfigError, Status
from tfkv.export.adapter_table import AdapterTable, check_name
from tfkv.export.advance import Advance
from tfkv.export.attention_probe import AttentionProbe
from tfkv.export.decoder import PackedDecoder
from tfkv.export.exact_tail import ExactTail
from tfkv.export.history import History
from tfkv.export.kept_tokens import KeptTokens
from tfkv.export.layer_groups import LayerGroups
from tfkv.export.layer_pools import LayerPools
from tfkv.export.lora_adapter import LoraAdapter
from tfkv.export.packed_adapters import PackedAdapters
from tfkv.export.packed_weights import PackedWeights
from tfkv.export.page_copies import PageCopies, Piece
from tfkv.export.page_tables import PageTables
from tfkv.export.plan import Refusal
from tfkv.export.prompt_lookup import PromptLookup
from tfkv.export.replay import Replay
from tfkv.export.rows import Admission, Answer, Request
from tfkv.export.session_table import Names, SessionTable, check_request, first_of_session
from tfkv.export.stats import Stats
from tfkv.export.transient import TransientVariable
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs import CacheCodec, CodecTables
from tfkv.manifest import MAX_STOP_TOKENS

#: Tokens of a row prefilled at once: a product with the weights costs the same for fewer.
PREFILL_PIECE = 64


class Engine(tf.Module):
    """Weights, pool, sessions and the functions over them.

    Args:
        config: Architecture.
        weights: Canonical weights, see `tfkv.export.importers`.
        engine: What to compile for.
        fingerprint: Of weights and configuration; `restore` takes no other's pages.
        calibration: Of the same weights, for a codec that needs one.
        adapters: By name, checked against the weights.

    Raises:
        ConfigError: Model and engine do not fit together, or the codec needs a calibration that
            was not given; or the policy and an adapter do not.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, np.ndarray],
        engine: EngineConfig,
        fingerprint: str = "",
        calibration: CodecTables | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
    ) -> None:
        super().__init__(name="tfkv")
        self.fingerprint = fingerprint
        self.config = config
        self.engine = engine
        groups = LayerGroups.of(config, engine, PREFILL_PIECE)
        speculation = PromptLookup.parse(engine.speculation)
        if speculation is not None:
            speculation.check_fit(groups, engine)
        codec = _with_tables(groups.first.cache.codec, calibration)
        self._codec_tables = codec.tables  # as attributes they are saved
        self.groups = groups.with_codec(codec)
        self.weights = PackedWeights(config, weights, engine.weights)
        adapters = adapters or {}
        _check_adapters(adapters, self.groups.first.cache)
        self.adapter_weights = PackedAdapters(config, tuple(adapters.values()))
        self.adapters = AdapterTable(
            {name: adapter.fingerprint for name, adapter in adapters.items()}, engine.slots
        )
        pages = pool_pages(config, engine)
        self.pools = LayerPools(config, self.groups, pages)
        self.tables = PageTables(
            engine.slots, pages, self.groups, engine.prefill_tokens + engine.decode_chunk
        )
        self.sessions = SessionTable(
            engine.slots, engine.ttl_ms, self.tables, engine.tenant_sessions, self.adapters
        )
        self.history = History(engine.slots, engine.history or config.context_length)
        self.stats = Stats(self.sessions, self.history, self.pools, self.tables)
        self.tail = ExactTail(config, self.groups.codecs, engine.slots)
        self.kept = KeptTokens(config, self.groups.first, engine)
        self.decoder = PackedDecoder(
            config,
            self.weights,
            self.pools,
            self.tail,
            self.kept,
            self.groups,
            engine.scan_pages,
            self.adapter_weights,
        )
        self.replay = Replay(self.decoder, engine.repeat, PREFILL_PIECE, self.history.size)
        self._advance = Advance(
            self.decoder,
            self.replay,
            self.history,
            self.tables,
            self.adapters,
            engine,
            PREFILL_PIECE,
        )
        self._probe = AttentionProbe(self.decoder)
        self._copies = PageCopies(
            self.sessions,
            self.history,
            self.tables,
            self.pools,
            self.tail,
            self.kept,
            self.groups,
            config.vocabulary_size,
        )
        self._resources = _resources(self)
        self.compute = self._compile()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache a token takes, scales included, where all layers store it."""
        return sum(self.groups.bytes_per_token(self.config).values())

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of a session as it is copied; see `PageCopies`."""
        return self._copies.page_bytes

    @property
    def beside_bytes(self) -> int:
        """Bytes of a session beside its pages: what its codecs keep exactly, and what a policy
        that evicts has kept."""
        return (self.tail.nbytes + self.kept.nbytes) // (self.engine.slots + 1)

    def _compile(self) -> Callable[..., Answer]:
        """The whole computation; XLA compiles it once for each batch size it meets."""

        def compute(
            request: Request, admission: Admission, probes: tf.Tensor, names: tf.Tensor
        ) -> Answer:
            answer, work = self._advance(request, admission)
            self._renew(request, admission, answer)
            added = self.stats.tally(work, answer, admission, probes, request.wants_scores)
            self.stats.add(added, names)
            return Answer(*(tf.gather(value, admission.first) for value in answer))

        return tf.function(
            compute,
            input_signature=self._compute_signature(),
            jit_compile=self.engine.xla or None,
            autograph=False,
        )

    def _compute_signature(self) -> tuple[object, ...]:
        def row(dtype: tf.DType, *shape: int) -> tf.TensorSpec:
            return tf.TensorSpec([None, *shape], dtype)

        integer, real, flag = row(tf.int32), row(tf.float32), row(tf.bool)
        request = Request(
            mode=integer,
            tokens=row(tf.int32, self.engine.prefill_tokens),
            length=integer,
            position=integer,
            max_new_tokens=integer,
            temperature=real,
            top_p=real,
            min_p=real,
            repetition_penalty=real,
            top_k=integer,
            seed=row(tf.int64),
            stop_tokens=row(tf.int32, MAX_STOP_TOKENS),
            overflow=integer,
            pin=integer,
            ttl_ms=row(tf.int64),
        )
        admission = Admission(
            slot=integer,
            fresh=flag,
            first=integer,
            status=integer,
            detail=integer,
            tenant=row(tf.int64),
            retry_ms=tf.TensorSpec([1], tf.int32),
            now_ms=tf.TensorSpec([1], tf.int64),
        )
        return (request, admission, flag, tf.TensorSpec([2], tf.int64))

    def advance(self, names: Names, request: Request, width: tf.Tensor) -> Answer:
        """Serves a batch: reserve under the lock, compute, publish.

        Args:
            names: Who calls.
            request: What they ask for; the batch size is any.
            width: int32 ``[B]``, width of the tokens before they were padded.
        """
        refusal = check_request(
            names,
            request,
            self.adapters,
            self.config.vocabulary_size,
            self.engine.decode_chunk,
            width,
        )

        def serve() -> Answer:
            admission = self.sessions.admit(names, request, refusal)
            return self.compute(request, admission, names.probes(), self.sessions.sizes())

        return self.sessions.locked(serve)

    def _renew(self, request: Request, admission: Admission, answer: Answer) -> None:
        """Renews the lifetimes of the sessions that were served."""
        rows = tf.range(tf.size(admission.slot))
        served = (answer.status == Status.OK) & (admission.first == rows)
        self.sessions.renew(admission.slot, served, admission.now_ms, request.ttl_ms, request.pin)

    def held(self, names: Names) -> tf.Tensor:
        """Tokens that sessions hold, int32 ``[B]``; 0 where there is none."""

        def look() -> tf.Tensor:
            self.sessions.reap()
            found = tf.cast(self.sessions.find(names), tf.int32)
            held = tf.gather(self.history.held.read(), tf.maximum(found, 0))
            return tf.where(found < 0, 0, held)

        return self.sessions.locked(look)

    def truncate(self, names: Names, position: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Rolls sessions back. Returns tokens held, status and detail, int32 ``[B]`` each."""
        zeros = tf.zeros_like(position)
        refusal = Refusal(zeros, zeros)
        refusal = refusal.when(names.probes(), Status.INVALID, 1)
        refusal = refusal.when(position < 0, Status.INVALID, 4)
        return self.sessions.locked(lambda: self._roll_back(names, position, refusal))

    def _roll_back(
        self, names: Names, position: tf.Tensor, refusal: Refusal
    ) -> tuple[tf.Tensor, ...]:
        """`truncate` under the lock."""
        self.sessions.reap()
        found = tf.cast(self.sessions.find(names), tf.int32)
        slot = tf.where(found < 0, self.engine.slots, found)
        held = tf.where(found < 0, 0, tf.gather(self.history.held.read(), slot))
        filled = tf.gather(self.history.filled.read(), slot)
        reached = tf.gather(self.history.reached.read(), slot)
        floor = tf.gather(self.history.floor.read(), slot)
        refusal = refusal.when((found < 0) & (position > 0), Status.UNKNOWN, 0)
        refusal = refusal.when(position > held, Status.GAP, held)
        earliest = self._earliest(reached, floor)
        lost = (position > 0) & (position < earliest)
        refusal = refusal.when(lost, Status.NOT_REVERSIBLE, earliest)
        first = first_of_session(names.keys(), refusal.status == Status.OK)
        refusal = refusal.when(tf.gather(position, first) != position, Status.BUSY, first)
        ok = (refusal.status == Status.OK) & (found >= 0)
        # From nothing, a session starts anew: nothing it overwrote can be missed.
        reached, floor = (tf.where(position == 0, 0, least) for least in (reached, floor))
        alone = ok & (first == tf.range(tf.size(first)))  # an equal row gives nothing back twice
        self.tables.truncate(tf.boolean_mask(slot, alone), tf.boolean_mask(position, alone))
        slot = tf.where(ok, slot, self.engine.slots)
        self.history.publish(slot, position, tf.minimum(filled, position), reached, floor)
        self.stats.add(tf.zeros_like(self.stats.counters.read()))
        return tf.where(ok, position, held), refusal.status, refusal.detail

    def fork(
        self,
        names: Names,
        target: tf.Tensor,
        position: tf.Tensor,
        ttl_ms: tf.Tensor,
        pin: tf.Tensor,
    ) -> tuple[tf.Tensor, ...]:
        """Branches sessions without copying a page.

        Args:
            names: The sessions to branch.
            target: string ``[B]``, names of the branches.
            position: int32 ``[B]``, tokens that a branch begins with; −1 = all.
            ttl_ms: int64 ``[B]``.
            pin: int32 ``[B]``.

        Returns:
            Tokens that the branch holds, status and detail, int32 ``[B]`` each.
        """
        branch = names._replace(session_id=target)
        zeros = tf.zeros_like(position)
        refusal = Refusal(zeros, zeros)
        refusal = refusal.when(names.probes() | branch.probes(), Status.INVALID, 1)
        refusal = refusal.when(position < -1, Status.INVALID, 4)
        refusal = refusal.when((pin < 0) | (pin > 1), Status.INVALID, 12)
        refusal = refusal.when(ttl_ms < 0, Status.INVALID, 13)
        return self.sessions.locked(
            lambda: self._branch(names, branch, position, refusal, ttl_ms, pin)
        )

    def _branch(
        self,
        names: Names,
        branch: Names,
        position: tf.Tensor,
        refusal: Refusal,
        ttl_ms: tf.Tensor,
        pin: tf.Tensor,
    ) -> tuple[tf.Tensor, ...]:
        """`fork` under the lock."""
        now = self.sessions.reap()
        spare = self.engine.slots
        found = tf.cast(self.sessions.find(names), tf.int32)
        exists = tf.cast(self.sessions.find(branch), tf.int32)
        refusal = refusal.when(found < 0, Status.UNKNOWN, 0)
        source = self.history.recall(tf.where(found < 0, spare, found), found < 0)
        old = self.history.recall(tf.where(exists < 0, spare, exists), exists < 0)
        position = tf.where(position < 0, source.held, position)
        refusal = refusal.when(position > source.held, Status.GAP, source.held)
        refusal = refusal.when(position == 0, Status.EMPTY, 0)
        earliest = self._earliest(source.reached, source.floor)
        refusal = refusal.when(position < earliest, Status.NOT_REVERSIBLE, earliest)
        # Made already? Then it must begin with the same tokens, and have the same adapter.
        adapter = self.adapters.read(tf.where(found < 0, spare, found))
        refusal = self.sessions.refuse_other(adapter, exists, refusal)
        differs = self.history.first_difference(source, old, position)
        clash = (exists >= 0) & (differs < position)
        refusal = refusal.when(clash, Status.CONFLICT, differs)
        ok = refusal.status == Status.OK
        first = first_of_session(branch.keys(), ok)
        refusal = refusal.when(first != tf.range(tf.size(first)), Status.BUSY, first)
        needs = (refusal.status == Status.OK) & (exists < 0)
        made, _, refusal = self.sessions.open(branch, needs, refusal, now, adapter)
        slot = tf.where(made < 0, spare, made)
        origin = tf.where(made < 0, spare, found)
        filled = tf.minimum(source.filled, position)
        self.history.copy(origin, slot)
        self.history.publish(slot, position, filled, source.reached, source.floor)
        self.kept.copy(origin, slot)
        self.tables.fork(origin, slot, filled)
        self.tail.begin(slot, filled)
        served = refusal.status == Status.OK
        target = tf.where(exists < 0, slot, exists)
        self.sessions.renew(target, served, now, ttl_ms, pin)
        self.stats.add_one("sessions_opened", made >= 0)
        held = tf.where(exists < 0, position, old.held)
        return tf.where(served, held, 0), refusal.status, refusal.detail

    def attention(
        self, names: Names, layer: tf.Tensor, position: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Attention weights of one held token of each session; changes nothing.

        Args:
            names: Who calls.
            layer: int32 ``[B]``.
            position: int32 ``[B]``; −1 = the last held token.

        Returns:
            Weights float32 ``[B, N, S]``, positions of the entries int32 ``[B, S]``, tokens
            held, status and detail.
        """
        zeros = tf.zeros_like(position)
        refusal = Refusal(zeros, zeros)
        refusal = refusal.when(names.probes(), Status.INVALID, 1)
        refusal = refusal.when(position < -1, Status.INVALID, 4)
        refusal = refusal.when(
            (layer < 0) | (layer >= self.config.num_layers), Status.INVALID, INPUT_NUMBERS["layer"]
        )
        return self.sessions.locked(lambda: self._look(names, layer, position, refusal))

    def _look(
        self, names: Names, layer: tf.Tensor, position: tf.Tensor, refusal: Refusal
    ) -> tuple[tf.Tensor, ...]:
        """`attention` under the lock."""
        self.sessions.reap()
        found = tf.cast(self.sessions.find(names), tf.int32)
        slot = tf.where(found < 0, self.engine.slots, found)
        stored = self.history.recall(slot, found < 0)
        refusal = refusal.when(found < 0, Status.UNKNOWN, 0)
        refusal = refusal.when(stored.held == 0, Status.EMPTY, 0)
        position = tf.where(position < 0, stored.held - 1, position)
        refusal = refusal.when(position >= stored.held, Status.GAP, stored.held)
        oldest = tf.maximum(stored.reached - self.history.size, 0)
        refusal = refusal.when(position < oldest, Status.FORGOTTEN, oldest)
        lost = ~self.groups.reversible(stored.reached, stored.floor, position)
        earliest = self.groups.earliest_reversible(stored.reached, stored.floor)
        refusal = refusal.when(lost, Status.NOT_REVERSIBLE, earliest)
        # What was kept by score lies at other positions in each head: there is no one axis.
        refusal = refusal.when(stored.floor > 0, Status.NOT_REVERSIBLE, stored.floor)
        ok = refusal.status == Status.OK
        position = tf.where(ok, position, -1)
        tables = tuple(tf.where(ok[:, tf.newaxis], row, 0) for row in self.tables.rows(slot))
        # A ring that was longer once still holds what it held then.
        wrapped = stored.reached > self.groups.entries
        written = tf.where(wrapped, tf.maximum(stored.reached - 1, stored.filled), stored.filled)
        token = self.history.reader()(slot, tf.maximum(position, 0)[:, tf.newaxis])[:, 0]
        weights, entries = self._probe(
            tf.where(ok, token, 0),
            position,
            tf.where(ok, layer, 0),
            tables,
            tf.where(ok, written, 0),
            self.tail.tails(
                slot, tf.zeros_like(ok), tf.zeros_like(slot), stored.reached, stored.floor
            ),
            self.adapters.read(slot),
        )
        weights = tf.where(ok[:, tf.newaxis, tf.newaxis], weights, 0.0)
        entries = tf.where(entries < stored.held[:, tf.newaxis], entries, -1)
        return weights, entries, stored.held, refusal.status, refusal.detail

    def snapshot(
        self, names: Names, page: tf.Tensor
    ) -> tuple[Piece, tf.Tensor, tuple[tf.Tensor, ...]]:
        """One page of each session.

        Args:
            names: Who calls.
            page: int32 ``[B]``, which page, from 0.

        Returns:
            The piece; string ``[B]``, of which artifact and adapter it is; tokens held, status
            and detail, int32 ``[B]`` each.
        """
        piece, refusal, adapter = self.sessions.locked(lambda: self._copies.read(names, page))
        marks = tf.gather(self.adapters.marks(self.fingerprint), adapter)
        return piece, marks, (piece.held, refusal.status, refusal.detail)

    def restore(
        self,
        names: Names,
        piece: Piece,
        fingerprint: tf.Tensor,
        ttl_ms: tf.Tensor,
        pin: tf.Tensor,
    ) -> tuple[tf.Tensor, ...]:
        """Makes sessions of what `snapshot` read, page after page.

        Args:
            names: Who calls.
            piece: What to add.
            fingerprint: string ``[B]``, what `snapshot` said of artifact and adapter.
            ttl_ms: int64 ``[B]``.
            pin: int32 ``[B]``.

        Returns:
            Tokens held, status and detail, int32 ``[B]`` each.
        """
        zeros = tf.zeros_like(piece.page)
        refusal = Refusal(zeros, zeros)
        adapter = self.adapters.of_mark(fingerprint, self.fingerprint)
        wrong = {
            "fingerprint": adapter < 0,
            "pin": (pin < 0) | (pin > 1),
            "ttl_ms": ttl_ms < 0,
        }
        for name, holds in wrong.items():
            refusal = refusal.when(holds, Status.INVALID, INPUT_NUMBERS[name])

        def bring() -> tuple[tf.Tensor, Refusal]:
            held, refused, made = self._copies.write(names, piece, adapter, refusal, ttl_ms, pin)
            self.stats.add_one("sessions_opened", made)
            return held, refused

        held, refused = self.sessions.locked(bring)
        return held, refused.status, refused.detail

    def _earliest(self, reached: tf.Tensor, floor: tf.Tensor) -> tf.Tensor:
        """Least tokens that a session can be rolled back to, apart from none."""
        earliest = self.groups.earliest_reversible(reached, floor) + 1
        return tf.maximum(earliest, self.history.oldest(reached))

    def close(self, names: Names) -> tuple[tf.Tensor, ...]:
        """Frees sessions. Returns tokens held (0), status and detail (1 = there was one)."""

        def free() -> tf.Tensor:
            self.sessions.reap()
            slots = self.sessions.close(names)
            gone = tf.unique(tf.boolean_mask(slots, slots >= 0))[0]
            self.stats.add_one("sessions_closed", gone >= 0)
            return tf.cast(slots >= 0, tf.int32)

        found = self.sessions.locked(free)
        none = tf.zeros_like(found)
        refusal = Refusal(none, found).when(names.probes(), Status.INVALID, 1)
        return none, refusal.status, refusal.detail


def _resources(engine: Engine) -> list[tf.saved_model.experimental.TrackableResource]:
    """Every resource of the graph, tracked so that an export finds it."""
    sides = [side for pool in engine.pools.pools for side in pool.variables.values()]
    pools = [variable for side in sides for variable in side.values()]
    owners = (engine.history, engine.stats, engine.tail, engine.adapters)
    parts = [part for owner in owners for part in vars(owner).values()]
    parts += [variable for table in engine.tables.tables for variable in table.variables]
    parts += [*engine.tail.variables.values()]
    parts += [variable for inner in engine.kept.variables.values() for variable in inner.values()]
    return pools + [part for part in parts if isinstance(part, TransientVariable)]


def _check_adapters(adapters: Mapping[str, LoraAdapter], cache: CacheSpec) -> None:
    """Raises `ConfigError` where an adapter has no name to call it by, or the policy would judge
    its tokens by other weights than they were made with."""
    for name, adapter in adapters.items():
        check_name(name)
        if cache.policy.evicts and "attention_output" in adapter.targets:
            raise ConfigError(
                f"Policies that evict score values by the base's output projection, and adapter "
                f"{name!r} adds to it. Received: cache={str(cache)!r}. Choose a policy "
                "that does not evict, or merge the adapter."
            )


def pool_pages(config: DecoderConfig, engine: EngineConfig) -> tuple[int, ...]:
    """Pages of the pools of each group of layers that an engine will hold, page 0 included.

    Raises:
        ConfigError: The pools are too small for a single session.
    """
    groups = LayerGroups.of(config, engine, PREFILL_PIECE)
    columns = [group.columns for group in groups.groups]
    if not engine.pool_bytes:
        return tuple(engine.slots * most + 1 for most in columns)
    sizes = [
        engine.page_size * sum(group.bytes_per_token(config).values()) for group in groups.groups
    ]
    least = sum(page * (most + 1) for page, most in zip(sizes, columns, strict=True))
    if engine.pool_bytes < least:
        raise ConfigError(
            f"`pool_bytes` must hold one session of {' and '.join(map(str, columns))} pages and a "
            f"spare one, {least} bytes. Received: pool_bytes={engine.pool_bytes}."
        )
    return _share_out(engine.pool_bytes, engine.slots, columns, sizes)


def _share_out(
    pool_bytes: int, slots: int, columns: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...]:
    """Pages of each group, page 0 included, such that all slots can have equally many tokens, and
    one of them all that a session may have.

    Args:
        pool_bytes: Of all groups together.
        slots: Sessions.
        columns: Most pages of a session in each group.
        sizes: Bytes of a page.
    """

    def pages(each: int) -> list[int]:
        return [max(most, slots * min(each, most)) + 1 for most in columns]

    def fit(each: int) -> bool:
        return sum(n * page for n, page in zip(pages(each), sizes, strict=True)) <= pool_bytes

    each = bisect.bisect_left(range(1, max(columns) + 1), True, key=lambda n: not fit(n))
    found = pages(each)
    # What is left over goes where sessions grow longest.
    longest = columns.index(max(columns))
    rest = pool_bytes - sum(n * page for n, page in zip(found, sizes, strict=True))
    found[longest] += rest // sizes[longest]
    return tuple(found)


def _with_tables(codec: CacheCodec, calibration: CodecTables | None) -> CacheCodec:
    """The codec with its tables of all layers, where it has some, as variables: as constants each
    loop that reads them would hold a copy."""
    if codec.needs_calibration and calibration is not None:
        codec = codec.bind(calibration, None)
    codec.check_bound()
    variables = {
        name: tf.Variable(tf.convert_to_tensor(table), trainable=False, name=f"codec_{name}")
        for name, table in codec.tables.items()
    }
    return codec.with_tables(variables)

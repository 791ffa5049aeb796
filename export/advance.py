"""One computation for a batch: plan, prefill, decode, publish."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfkv import samplers
from tfkv.config import EngineConfig
from tfkv.errors import Finish, Status
from tfkv.export.adapter_table import AdapterTable
from tfkv.export.decoder import Fresh, PackedDecoder, Reading, Tables
from tfkv.export.exact_tail import Tails
from tfkv.export.history import History
from tfkv.export.kept_tokens import Evicted
from tfkv.export.layer_pools import Layer
from tfkv.export.packed_blocks import Weights
from tfkv.export.page_pool import Parts
from tfkv.export.page_tables import Found, PageTables
from tfkv.export.plan import Plan, PrefillBudget, Remembered, make_plan
from tfkv.export.replay import Replay, TokensAt
from tfkv.export.rows import NO_LOGPROB, SAMPLED, STOPPED, Admission, Answer, Request
from tfkv.layers.attention import Partial
from tfkv.layers.shapes import keep_shape, shape_of


class Sampled(NamedTuple):
    """What a decode loop made, each ``[B, ...]``.

    Attributes:
        tokens: int32 ``[B, N]``, −1 after the last.
        logprobs: float32 ``[B, N]``.
        fed: int32, tokens whose keys were made.
        logits: float32 ``[B, V]`` of the last step.
        stopped: bool.
    """

    tokens: tf.Tensor
    logprobs: tf.Tensor
    fed: tf.Tensor
    logits: tf.Tensor
    stopped: tf.Tensor


class Work(NamedTuple):
    """What a batch did, for the counters.

    Attributes:
        plan: What was planned for each row.
        found: Which pages were looked for in the prefix index.
        reused: int32 ``[B]``, tokens whose keys were found there.
        evicted: int32, cached pages that had to go.
    """

    plan: Plan
    found: Found
    reused: tf.Tensor
    evicted: tf.Tensor


class _Loop(NamedTuple):
    """State of the decode loop; one structure in, one out. What is fresh the model knows."""

    step: tf.Tensor
    token: tf.Tensor
    alive: tf.Tensor
    fresh: Any
    seen: tf.Tensor
    made: Sampled


class Advance:
    """Moves the sessions of a batch forward.

    Everything numeric happens here, in one computation that XLA can compile whole: it reads
    the pool as tensors, and publishes held, filled and history last.

    Args:
        decoder: The model over its pool.
        replay: Of texts that are judged by their repetition.
        history: What sessions said.
        tables: Whose pages are whose.
        adapters: Which row has which.
        engine: Limits of the artifact.
        prefill_piece: Tokens of a row prefilled at once.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        replay: Replay,
        history: History,
        tables: PageTables,
        adapters: AdapterTable,
        engine: EngineConfig,
        prefill_piece: int,
    ) -> None:
        self.decoder = decoder
        self.replay = replay
        self.vocabulary_size = decoder.config.vocabulary_size
        self.history = history
        self.tables = tables
        self.adapters = adapters
        self.engine = engine
        self.prefill_piece = prefill_piece

    def __call__(self, request: Request, admission: Admission) -> tuple[Answer, Work]:
        """Answers a batch; see `Request`, `Admission` and `Answer`."""
        stored = self.history.recall(admission.slot, admission.fresh)
        before = stored.filled
        pages = self.tables.read()
        found = self.tables.find(pages, request, stored, admission)
        stored = stored._replace(filled=found.filled)
        plan = make_plan(
            request,
            admission,
            stored,
            self.decoder.groups,
            PrefillBudget(
                self.engine.prefill_tokens, self.engine.shared_prefill_tokens, self.prefill_piece
            ),
            self.engine.decode_chunk,
        )
        grant = self.tables.allocate(pages, found, plan, admission)
        plan = grant.plan
        works = self._works(plan, admission)
        slot = tf.where(works, admission.slot, self.history.slots)
        places, given = self._new_tokens(request, plan, stored.held, works)
        self.history.write(
            slot, places, given, tf.zeros_like(given), tf.fill(tf.shape(given), NO_LOGPROB)
        )
        tokens_at = self.history.reader()
        weights = self.decoder.read_weights(self.adapters.of_owner(admission.tenant))
        shared = tf.where(found.filled > before, found.filled, 0)
        tails = self.decoder.tail.tails(slot, admission.fresh, shared, stored.reached, stored.floor)
        self.decoder.tail.begin(slot, tails.since)
        tables = tuple(tf.where(works[:, tf.newaxis], rows, 0) for rows in grant.rows)
        parts = self.decoder.pools.copy(self.decoder.read_cache(), grant.copy_from, tables)
        parts = self.decoder.kept.begin(parts, slot, admission.fresh)
        parts, scores, tails = self._prefill(
            weights, parts, request, plan, tails, tables, tokens_at
        )
        parts, made, tails = self._decode(weights, parts, request, plan, tails, tables, tokens_at)
        self.decoder.assign_cache(parts)
        answer = self._answer(request, plan, stored, made, scores)
        filled = self._publish(plan, slot, stored, made, answer, scores, tails.floor)
        said = tf.gather(self.history.tokens.read(), slot)
        self.tables.assign(
            self.tables.settle(grant, filled, slot, admission.tenant, said, tails.floor)
        )
        return answer, Work(plan, found, tf.where(works, found.filled - before, 0), grant.evicted)

    @staticmethod
    def _works(plan: Plan, admission: Admission) -> tf.Tensor:
        """Rows that change their session: served, and not a copy of another row."""
        rows = tf.range(tf.size(plan.status))
        return (plan.status == Status.OK) & (admission.first == rows)

    def _new_tokens(
        self, request: Request, plan: Plan, held: tf.Tensor, works: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Positions of the given tokens that the session does not hold yet, −1 = not one."""
        offsets = tf.range(request.tokens.shape[1])
        places = plan.position[:, tf.newaxis] + offsets
        new = (offsets < request.length[:, tf.newaxis]) & works[:, tf.newaxis]
        new &= (places >= held[:, tf.newaxis]) & (places < plan.held[:, tf.newaxis])
        return tf.where(new, places, -1), request.tokens

    def _prefill(
        self,
        weights: Weights,
        parts: Parts,
        request: Request,
        plan: Plan,
        tails: Tails,
        tables: Tables,
        tokens_at: TokensAt,
    ) -> tuple[Parts, tf.Tensor, Tails]:
        """Fills keys, one piece of one row at a time; also logprobs where rows want them."""
        slot = tails.slot
        piece = self.prefill_piece
        rows, width = shape_of(request.tokens)
        pieces = (plan.fill + piece - 1) // piece
        ends = tf.cumsum(pieces)
        scores = tf.fill([rows, width + 1], NO_LOGPROB)

        def body(index: tf.Tensor, parts: Parts, scores: tf.Tensor, floor: tf.Tensor) -> tuple:
            row = tf.reduce_sum(tf.cast(index >= ends, tf.int32))
            done = (index - tf.gather(ends - pieces, row)) * piece
            start = tf.gather(plan.start, row) + done
            places = start + tf.range(piece)
            live = places < tf.gather(plan.start + plan.fill, row)
            tokens = tokens_at(tf.gather(slot, row), places)
            mine = tails._replace(floor=floor)
            mine = Tails(*(tf.gather(field, row)[tf.newaxis] for field in mine))
            count = tf.reduce_sum(tf.cast(live, tf.int32))[tf.newaxis]
            own = tuple(tf.gather(table, row) for table in tables)
            asks = Evicted(mine.slot, own[0][tf.newaxis], mine.floor, start[tf.newaxis])
            parts, low = self.decoder.make_room(weights, parts, asks, count, reads_on=True)
            hidden, parts = self.decoder.prefill_piece(
                weights.of_row(row),
                parts,
                tf.where(live, tokens, 0),
                tf.where(live, places, -1),
                own,
                start,
                tf.gather(plan.filled, row),
                mine._replace(floor=low),
            )
            follow = tokens_at(tf.gather(slot, row), places + 1)
            logprobs = tf.cond(
                tf.gather(request.wants_scores, row),
                lambda: samplers.log_probability(
                    self.decoder.logits(weights, hidden), tf.where(live, follow, 0)
                ),
                lambda: tf.zeros([piece]),
            )
            column = places + 1 - tf.gather(plan.position, row)
            fits = live & (column >= 0) & (column < width) & tf.gather(request.wants_scores, row)
            column = tf.where(fits, column, width)
            where = tf.stack([tf.fill([piece], row), column], axis=1)
            marked = tf.tensor_scatter_nd_update(scores, where, logprobs)
            floor = tf.where(tf.range(rows) == row, low, floor)
            return index + 1, parts, keep_shape(marked, scores), floor

        state = (tf.constant(0), parts, scores, tails.floor)
        _, parts, scores, floor = tf.while_loop(lambda index, *_: index < ends[-1], body, state)
        return parts, scores[:, :width], tails._replace(floor=floor)

    def _decode(
        self,
        weights: Weights,
        parts: Parts,
        request: Request,
        plan: Plan,
        tails: Tails,
        tables: Tables,
        tokens_at: TokensAt,
    ) -> tuple[Parts, Sampled, Tails]:
        """Feeds the last held token, then each sampled one; writes their keys at the end."""
        decoder, chunk = self.decoder, self.engine.decode_chunk
        rows = shape_of(request.length)[0]
        start = plan.start + plan.fill
        busy = plan.steps > 0
        asks = Evicted(tails.slot, tables[0], tails.floor, start)
        if decoder.kept.repeats:
            due = decoder.kept.due(tails.floor, start, plan.steps, reads_on=False)
            parts = self.replay(weights, parts, asks, tails, tokens_at, due)
        parts, floor = decoder.make_room(weights, parts, asks, plan.steps, reads_on=False)
        tails = tails._replace(floor=floor)
        scans = decoder.scan(tables, start, floor, busy)
        params = samplers.SamplingParams(*(getattr(request, f) for f in _SAMPLING_FIELDS))
        columns = tf.range(chunk)

        def body(loop: _Loop) -> tuple[_Loop]:
            at = start + loop.step
            queries_at = tf.where(loop.alive, at, -1)[:, tf.newaxis]
            keys_at = tf.where(columns <= loop.step, start[:, tf.newaxis] + columns, -1)
            looks = decoder.looks(queries_at, keys_at)
            here = (columns == loop.step)[:, tf.newaxis]
            reading = Reading(parts, queries_at, scans, tails, alone=True)

            def attend(layer: Layer, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Partial:
                fresh = decoder.attend_step(loop.fresh, layer, (k, v), here, looks, q)
                return decoder.attend_cache(reading, layer, q, fresh)

            x = decoder.embed(weights, loop.token[:, tf.newaxis], queries_at)
            x, new = decoder.layers(weights, x, queries_at, attend)
            fresh = Fresh(
                *(tf.where(here, token, old) for token, old in zip(new, loop.fresh, strict=True))
            )
            logits = decoder.logits(weights, x[:, 0])
            chosen = samplers.penalize(logits, loop.seen, request.repetition_penalty)
            token = samplers.sample(chosen, params, tf.maximum(at + 1, 0))
            return (self._after_step(loop, fresh, logits, token, request, plan),)

        first = tokens_at(tails.slot, start[:, tf.newaxis])[:, 0]
        fresh = decoder.no_fresh(rows, chunk)
        loop = self._first_step(request, plan, tails.slot, first, fresh)
        (loop,) = tf.while_loop(lambda loop: tf.reduce_any(loop.alive), body, (loop,))
        written = columns < loop.made.fed[:, tf.newaxis]
        places = tf.where(written, start[:, tf.newaxis] + columns, -1)
        parts = decoder.commit(parts, loop.fresh, tables, places, plan.filled, tails)
        tokens = tf.where(request.wants_logits[:, tf.newaxis], -1, loop.made.tokens)
        return parts, loop.made._replace(tokens=tokens), tails

    def _first_step(
        self, request: Request, plan: Plan, slot: tf.Tensor, first: tf.Tensor, fresh: Any
    ) -> _Loop:
        """The loop's state before a token was sampled; rows with steps to do feed ``first [B]``."""
        rows, busy = shape_of(request.length)[0], plan.steps > 0
        nothing = Sampled(
            tf.fill([rows, self.engine.decode_chunk], -1),
            tf.zeros([rows, self.engine.decode_chunk]),
            tf.zeros([rows], tf.int32),
            tf.zeros([rows, self.vocabulary_size]),
            tf.zeros([rows], tf.bool),
        )
        token = tf.where(busy, first, 0)
        seen = self._seen(request, plan, slot)
        return _Loop(tf.constant(0), token, busy, fresh, seen, nothing)

    @staticmethod
    def _after_step(
        loop: _Loop,
        fresh: Any,
        logits: tf.Tensor,
        token: tf.Tensor,
        request: Request,
        plan: Plan,
    ) -> _Loop:
        """The loop's state after a token was sampled for each row that is alive."""
        made = loop.made
        columns = tf.range(made.tokens.shape[1])
        here = (columns == loop.step) & loop.alive[:, tf.newaxis]
        logprob = samplers.log_probability(logits, token)[:, tf.newaxis]
        stopped = tf.reduce_any(token[:, tf.newaxis] == request.stop_tokens, axis=1) & loop.alive
        rows = tf.range(shape_of(made.tokens)[0])
        where = tf.stack([rows, token], axis=1)
        state = _Loop(
            loop.step + 1,
            token,
            loop.alive & ~stopped & (loop.step + 1 < plan.steps),
            fresh,
            tf.tensor_scatter_nd_update(loop.seen, where, tf.ones_like(rows, tf.bool)),
            Sampled(
                tf.where(here, token[:, tf.newaxis], made.tokens),
                tf.where(here, logprob, made.logprobs),
                made.fed + tf.cast(loop.alive, tf.int32),
                logits,
                made.stopped | stopped,
            ),
        )
        return tf.nest.map_structure(keep_shape, state, loop)

    def _seen(self, request: Request, plan: Plan, slot: tf.Tensor) -> tf.Tensor:
        """Tokens that the sessions hold, bool ``[B, V]``; only if a row has a penalty."""
        rows = shape_of(request.length)[0]
        size = self.vocabulary_size
        none = tf.zeros([rows, size], tf.bool)

        def collect() -> tf.Tensor:
            tokens, held = self.history.tokens_of(slot, plan.held)
            row = tf.broadcast_to(tf.range(rows)[:, tf.newaxis], tf.shape(tokens))
            flat = tf.where(held, row * size + tokens, rows * size)
            marks = tf.zeros([rows * size + 1], tf.bool)
            flat = tf.reshape(flat, [-1, 1])
            marks = tf.tensor_scatter_nd_update(marks, flat, tf.ones_like(flat[:, 0], tf.bool))
            return tf.reshape(marks[:-1], [rows, size])

        return tf.cond(tf.reduce_any(request.repetition_penalty != 1.0), collect, lambda: none)

    def _answer(
        self,
        request: Request,
        plan: Plan,
        stored: Remembered,
        made: Sampled,
        scores: tf.Tensor,
    ) -> Answer:
        """Puts what was replayed before what was sampled."""
        chunk = self.engine.decode_chunk
        ok = plan.status == Status.OK
        columns = tf.range(chunk)
        end = plan.position + request.length
        old_tokens, old_logprobs = self.history.look(stored, end[:, tf.newaxis] + columns)
        is_old = columns < plan.replayed[:, tf.newaxis]
        new = tf.maximum(columns - plan.replayed[:, tf.newaxis], 0)
        sampled = tf.where(request.wants_logits, 0, made.fed)
        count = tf.where(ok, plan.replayed + sampled, 0)
        used = columns < count[:, tf.newaxis]
        tokens = tf.where(is_old, old_tokens, tf.gather(made.tokens, new, batch_dims=1))
        logprobs = tf.where(is_old, old_logprobs, tf.gather(made.logprobs, new, batch_dims=1))
        finish = tf.where(count == request.max_new_tokens, int(Finish.LENGTH), int(Finish.NONE))
        finish = tf.where(
            plan.capped & (count < request.max_new_tokens), int(Finish.CAPACITY), finish
        )
        finish = tf.where(made.stopped | plan.stopped, int(Finish.STOP), finish)
        taken = tf.where(
            plan.unfinished, plan.start + plan.fill + 1 - plan.position, request.length
        )
        taken = tf.where(ok, tf.clip_by_value(taken, 0, request.length), 0)
        spots = tf.range(request.tokens.shape[1])
        known = self.history.look(stored, plan.position[:, tf.newaxis] + spots)[1]
        scores = tf.where(scores <= 0, scores, known)
        return Answer(
            tokens=tf.where(used, tokens, -1),
            count=count,
            logprobs=tf.where(used, logprobs, 0.0),
            finish=tf.where((count > 0) | (ok & plan.capped), finish, int(Finish.NONE)),
            logits=made.logits,
            scores=tf.where(spots < taken[:, tf.newaxis], scores, 0.0),
            taken=taken,
            position=tf.where(ok, plan.held + sampled, stored.held),
            status=plan.status,
            detail=plan.detail,
        )

    def _publish(
        self,
        plan: Plan,
        slot: tf.Tensor,
        stored: Remembered,
        made: Sampled,
        answer: Answer,
        scores: tf.Tensor,
        floor: tf.Tensor,
    ) -> tf.Tensor:
        """Makes the computed tokens part of their sessions; rows of no session go to the spare.

        Returns:
            int32 ``[B]``, positions that are on pages now.
        """
        columns = tf.range(self.engine.decode_chunk)
        new = columns < (answer.position - plan.held)[:, tf.newaxis]
        new &= made.tokens >= 0
        places = tf.where(new, plan.held[:, tf.newaxis] + columns, -1)
        last = (columns == made.fed[:, tf.newaxis] - 1) & made.stopped[:, tf.newaxis]
        kinds = tf.where(last, STOPPED, SAMPLED)
        self.history.write(slot, places, made.tokens, kinds, made.logprobs)
        spots = tf.range(scores.shape[1])
        scored = tf.where(scores <= 0, plan.position[:, tf.newaxis] + spots, -1)
        self.history.write_logprobs(slot, scored, scores)
        filled = tf.maximum(stored.filled, plan.start + plan.fill + made.fed)
        held = answer.position
        filled = tf.minimum(filled, held)
        self.history.publish(slot, held, filled, tf.maximum(stored.reached, held), floor)
        return filled


_SAMPLING_FIELDS = samplers.SamplingParams._fields

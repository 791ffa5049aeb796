"""One computation for a batch: plan, prefill, decode, publish."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfkv import samplers
from tfkv.config import EngineConfig
from tfkv.errors import Finish, Status
from tfkv.export.adapter_table import AdapterTable
from tfkv.export.decode_loop import DecodeLoop, Sampled
from tfkv.export.decoder import Fresh, PackedDecoder, Reading, Tables, placed
from tfkv.export.exact_tail import Tails
from tfkv.export.history import History
from tfkv.export.kept_tokens import Evicted
from tfkv.export.layer_pools import Layer
from tfkv.export.packed_blocks import Weights
from tfkv.export.page_pool import Parts
from tfkv.export.page_tables import Found, PageTables
from tfkv.export.plan import Plan, PrefillBudget, Remembered, make_plan
from tfkv.export.prompt_lookup import PromptLookup
from tfkv.export.replay import Replay, TokensAt
from tfkv.export.rows import NO_LOGPROB, SAMPLED, STOPPED, Admission, Answer, Request
from tfkv.layers.attention import Partial
from tfkv.layers.shapes import keep_shape, shape_of


class Work(NamedTuple):
    """What a batch did, for the counters.

    Attributes:
        plan: What was planned for each row.
        found: Which pages were looked for in the prefix index.
        reused: int32 ``[B]``, tokens whose keys were found there.
        evicted: int32, cached pages that had to go.
        made: What was sampled.
    """

    plan: Plan
    found: Found
    reused: tf.Tensor
    evicted: tf.Tensor
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
        lookup = PromptLookup.parse(engine.speculation)
        self._loop = DecodeLoop(history, engine.decode_chunk, self.vocabulary_size, lookup)

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
        reused = tf.where(works, found.filled - before, 0)
        return answer, Work(plan, found, reused, grant.evicted, made)

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
        columns = tf.range(chunk)

        def feed(fresh: Fresh, tokens: tf.Tensor, at: tf.Tensor) -> tuple[tf.Tensor, Fresh]:
            alone = tokens.shape[1] == 1
            first = at[:, :1]
            place = tf.where(first >= 0, columns - (first - start[:, tf.newaxis]), -1)
            last = tf.reduce_max(at, axis=1, keepdims=True)
            keys_at = start[:, tf.newaxis] + columns
            looks = decoder.looks(at, tf.where(keys_at <= last, keys_at, -1))
            reading = Reading(parts, at, scans, tails, alone)

            def attend(layer: Layer, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Partial:
                here = decoder.attend_step(fresh, layer, (k, v), place, looks, q)
                return decoder.attend_cache(reading, layer, q, here)

            x = decoder.embed(weights, tf.where(at >= 0, tokens, 0), at)
            x, new = decoder.layers(weights, x, at, attend)
            after = Fresh(*(placed(one, old, place) for one, old in zip(new, fresh, strict=True)))
            return decoder.logits(weights, x), after

        made, fresh = self._loop(request, plan, tails.slot, decoder.no_fresh(rows, chunk), feed)
        written = columns < made.fed[:, tf.newaxis]
        places = tf.where(written, start[:, tf.newaxis] + columns, -1)
        parts = decoder.commit(parts, fresh, tables, places, plan.filled, tails)
        return parts, made, tails

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

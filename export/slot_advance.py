"""One computation for a batch of sessions in one piece: plan, prefill, decode, publish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfkv.config import EngineConfig
from tfkv.export.advance import Advance, Work
from tfkv.export.decode_loop import DecodeLoop
from tfkv.export.history import History
from tfkv.export.page_tables import Found
from tfkv.export.plan import Plan, PrefillBudget, make_plan
from tfkv.export.rows import NO_LOGPROB, Admission, Answer, Request
from tfkv.export.session_slots import SessionSlots
from tfkv.export.slot_geometry import SlotGeometry
from tfkv.generation import Decoder
from tfkv.layers.shapes import keep_shape, shape_of

_TokensAt = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class SlotAdvance(Advance):
    """As `Advance`, for a model that is called as a whole: plans, answers and histories are the
    same, and the caches of a batch are taken out of their slots and put back.

    Args:
        decoder: The model.
        history: What sessions said.
        slots: Their caches.
        geometry: What of them can be read again.
        engine: Limits of the artifact.
        prefill_piece: Tokens of each row prefilled at once.
    """

    def __init__(
        self,
        decoder: Decoder,
        history: History,
        slots: SessionSlots,
        geometry: SlotGeometry,
        engine: EngineConfig,
        prefill_piece: int,
    ) -> None:
        self.model = decoder
        self.vocabulary_size = decoder.vocabulary_size
        self.history = history
        self.slots = slots
        self.geometry = geometry
        self.engine = engine
        self.prefill_piece = prefill_piece
        self._loop = DecodeLoop(history, engine.decode_chunk, self.vocabulary_size)

    def __call__(self, request: Request, admission: Admission) -> tuple[Answer, Work]:
        """Answers a batch; see `Request`, `Admission` and `Answer`."""
        stored = self.history.recall(admission.slot, admission.fresh)
        budget = PrefillBudget(
            self.engine.prefill_tokens, self.engine.shared_prefill_tokens, self.prefill_piece
        )
        chunk = self.engine.decode_chunk
        plan = make_plan(request, admission, stored, self.geometry, budget, chunk)
        works = self._works(plan, admission)
        slot = tf.where(works, admission.slot, self.history.slots)
        places, given = self._new_tokens(request, plan, stored.held, works)
        unknown = tf.fill(tf.shape(given), NO_LOGPROB)
        self.history.write(slot, places, given, tf.zeros_like(given), unknown)
        tokens_at = self.history.reader()
        state = self.slots.read(slot, admission.fresh | ~works)
        state = self._fill(plan, slot, state, tokens_at)
        made, state = self._loop(request, plan, slot, state, self._feed)
        self.slots.write(slot, state)
        none = tf.zeros_like(slot)
        scores = tf.fill(shape_of(request.tokens), NO_LOGPROB)
        answer = self._answer(request, plan, stored, made, scores)
        self._publish(plan, slot, stored, made, answer, scores, none)
        found = Found(rows=(none[:, tf.newaxis],), filled=stored.filled, looked_up=none)
        return answer, Work(plan, found, none, tf.constant(0), made)

    def _fill(self, plan: Plan, slot: tf.Tensor, state: Any, tokens_at: _TokensAt) -> Any:
        """Fills keys, a piece of all rows at a time."""
        piece = self.prefill_piece

        def body(done: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
            offsets = done + tf.range(piece)
            places = plan.start[:, tf.newaxis] + offsets
            live = offsets < plan.fill[:, tf.newaxis]
            tokens = tf.where(live, tokens_at(slot, places), -1)
            _, after = self.model.hidden_states(tokens, tf.where(live, places, -1), state)
            return done + piece, tf.nest.map_structure(keep_shape, after, state)

        most = tf.reduce_max(plan.fill)
        return tf.while_loop(lambda done, _: done < most, body, (tf.constant(0), state))[1]

    def _feed(self, state: Any, tokens: tf.Tensor, at: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The logits of tokens, and the state with them in it; see `Feed`."""
        hidden, after = self.model.hidden_states(tf.where(at >= 0, tokens, -1), at, state)
        return self.model.logits(hidden), after

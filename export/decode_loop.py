"""The loop that samples: one token a step, or a run of tokens that were guessed and turned out
right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfkv import samplers
from tfkv.export.history import History
from tfkv.export.plan import Plan
from tfkv.export.prompt_lookup import PromptLookup
from tfkv.export.rows import Request
from tfkv.layers.shapes import keep_shape, shape_of

#: ``(fresh, tokens, positions)``, both int32 ``[B, T]``, −1 = not a token, to logits
#: ``[B, T, V]`` and what is fresh then. A row's tokens may be fed again: the last ones count.
Feed = Callable[[Any, tf.Tensor, tf.Tensor], tuple[tf.Tensor, Any]]


class Sampled(NamedTuple):
    """What a decode loop made, each ``[B, ...]``.

    Attributes:
        tokens: int32 ``[B, N]``, −1 after the last.
        logprobs: float32 ``[B, N]``.
        fed: int32, tokens whose keys were made, those of wrong guesses apart.
        logits: float32 ``[B, V]`` of the last step.
        stopped: bool.
        guessed: int32, tokens that were guessed.
        accepted: int32, guesses among the sampled tokens.
    """

    tokens: tf.Tensor
    logprobs: tf.Tensor
    fed: tf.Tensor
    logits: tf.Tensor
    stopped: tf.Tensor
    guessed: tf.Tensor
    accepted: tf.Tensor


class Ahead(NamedTuple):
    """What is guessed of rows.

    Attributes:
        text: int32 ``[B, S]``, what they hold and what was sampled, placed as in `History`.
        tokens: int32 ``[B, G]``.
        count: int32 ``[B]``, how many of them are to be tried.
    """

    text: tf.Tensor
    tokens: tf.Tensor
    count: tf.Tensor


class Loop(NamedTuple):
    """State of the loop; one structure in, one out. What is fresh the model knows.

    Attributes:
        token: int32 ``[B]``, what is fed next.
        alive: bool ``[B]``, rows that want another token.
        fresh: Of the tokens that were fed.
        seen: bool ``[B, V]``, tokens that a repetition penalty counts.
        made: What was sampled.
        ahead: What is guessed; without an S and a G where nobody guesses.
    """

    token: tf.Tensor
    alive: tf.Tensor
    fresh: Any
    seen: tf.Tensor
    made: Sampled
    ahead: Ahead


class DecodeLoop:
    """Samples tokens of all rows of a batch.

    Guesses change nothing but the time it takes. The model reads a row's last token and its
    guesses at once, a token is sampled behind each of them as it would be without guesses, and
    they stand as far as they are what was sampled; so a guess ``x`` is accepted with the
    probability p(x) that the model gives it, and else the token comes from p without ``x``, the
    exact rule of speculative sampling for guesses without chance
    (https://arxiv.org/abs/2302.01318). Each position has its own random number, so the tokens
    are the very ones, and a call may be cut anywhere.

    Args:
        history: What sessions said.
        chunk: Most tokens that a call samples (axis N).
        vocabulary_size: Tokens that there are (axis V).
        lookup: Who guesses; nobody where left out.
    """

    def __init__(
        self,
        history: History,
        chunk: int,
        vocabulary_size: int,
        lookup: PromptLookup | None = None,
    ) -> None:
        self._history = history
        self._chunk = chunk
        self._vocabulary_size = vocabulary_size
        self._lookup = lookup

    def __call__(
        self, request: Request, plan: Plan, slot: tf.Tensor, fresh: Any, feed: Feed
    ) -> tuple[Sampled, Any]:
        """Feeds the last held token of rows that have steps to do, then what is sampled.

        Args:
            request: How to sample.
            plan: How much.
            slot: int32 ``[B]``, whose sessions.
            fresh: What `feed` takes first.
            feed: The model.

        Returns:
            What was sampled, and what is fresh.
        """
        loop = self._begin(request, plan, slot, fresh)

        def steps(width: int, goes_on: Callable[[Loop], tf.Tensor], loop: Loop) -> Loop:
            def body(loop: Loop) -> tuple[Loop]:
                return (self._step(width, request, plan, feed, loop),)

            return tf.while_loop(goes_on, body, (loop,))[0]

        def alive(loop: Loop) -> tf.Tensor:
            return tf.reduce_any(loop.alive)

        def guesses(loop: Loop) -> tf.Tensor:
            return tf.reduce_any(loop.ahead.count > 0)

        if self._lookup is None:
            loop = steps(1, alive, loop)
        else:
            width = self._lookup.tokens + 1

            def turn(loop: Loop) -> tuple[Loop]:
                # Loops that may run no time at all: a branch would copy what it is handed.
                loop = steps(1, lambda loop: alive(loop) & ~guesses(loop), loop)
                return (steps(width, guesses, loop),)

            (loop,) = tf.while_loop(alive, turn, (loop,))
        tokens = tf.where(request.wants_logits[:, tf.newaxis], -1, loop.made.tokens)
        return loop.made._replace(tokens=tokens), loop.fresh

    def _begin(self, request: Request, plan: Plan, slot: tf.Tensor, fresh: Any) -> Loop:
        """The state before a token was sampled."""
        rows, busy = shape_of(request.length)[0], plan.steps > 0
        start = plan.start + plan.fill
        first = self._history.reader()(slot, start[:, tf.newaxis])[:, 0]
        zeros = tf.zeros([rows], tf.int32)
        nothing = Sampled(
            tf.fill([rows, self._chunk], -1),
            tf.zeros([rows, self._chunk]),
            zeros,
            tf.zeros([rows, self._vocabulary_size]),
            tf.zeros([rows], tf.bool),
            zeros,
            zeros,
        )
        seen = self._seen(request, plan, slot)
        none = tf.zeros([rows, 0], tf.int32)
        loop = Loop(tf.where(busy, first, 0), busy, fresh, seen, nothing, Ahead(none, none, zeros))
        if self._lookup is None:
            return loop
        text, _ = self._history.tokens_of(slot, plan.held)
        return self._look_ahead(self._lookup, text, loop, plan)

    def _seen(self, request: Request, plan: Plan, slot: tf.Tensor) -> tf.Tensor:
        """Tokens that the sessions hold, bool ``[B, V]``; only if a row has a penalty."""
        rows = shape_of(request.length)[0]
        size = self._vocabulary_size
        none = tf.zeros([rows, size], tf.bool)

        def collect() -> tf.Tensor:
            tokens, held = self._history.tokens_of(slot, plan.held)
            row = tf.broadcast_to(tf.range(rows)[:, tf.newaxis], tf.shape(tokens))
            flat = tf.where(held, row * size + tokens, rows * size)
            marks = tf.zeros([rows * size + 1], tf.bool)
            flat = tf.reshape(flat, [-1, 1])
            marks = tf.tensor_scatter_nd_update(marks, flat, tf.ones_like(flat[:, 0], tf.bool))
            return tf.reshape(marks[:-1], [rows, size])

        return tf.cond(tf.reduce_any(request.repetition_penalty != 1.0), collect, lambda: none)

    @staticmethod
    def _look_ahead(lookup: PromptLookup, text: tf.Tensor, loop: Loop, plan: Plan) -> Loop:
        """The state with guesses of rows that are alive: one less than they may sample, since a
        token follows them."""
        tokens, found = lookup.guess(text, plan.start + plan.fill + loop.made.fed + 1)
        most = tf.clip_by_value(plan.steps - loop.made.fed - 1, 0, lookup.tokens)
        return loop._replace(ahead=Ahead(text, tokens, tf.where(found & loop.alive, most, 0)))

    def _step(self, width: int, request: Request, plan: Plan, feed: Feed, loop: Loop) -> Loop:
        """Feeds a token of each row that is alive, and its guesses where `width` leaves room."""
        offsets = tf.range(width)
        fed, count = loop.token[:, tf.newaxis], tf.ones_like(loop.token)
        if width > 1:
            fed, count = tf.concat([fed, loop.ahead.tokens], axis=1), 1 + loop.ahead.count
        at = (plan.start + plan.fill + loop.made.fed)[:, tf.newaxis] + offsets
        live = loop.alive[:, tf.newaxis] & (offsets < count[:, tf.newaxis])
        logits, fresh = feed(loop.fresh, fed, tf.where(live, at, -1))
        flat = tf.reshape(logits, [-1, self._vocabulary_size])
        params, penalty = (
            tf.nest.map_structure(lambda x: _each(x, width), x)
            for x in (_sampling(request), request.repetition_penalty)
        )
        seen = self._seen_with(loop.seen, fed, penalty)
        chosen = samplers.penalize(flat, seen, penalty)
        sampled = samplers.sample(chosen, params, tf.reshape(tf.maximum(at + 1, 0), [-1]))
        logprobs = samplers.log_probability(flat, sampled)
        sampled, logprobs = (tf.reshape(x, [-1, width]) for x in (sampled, logprobs))
        kept, stops = _stand(sampled, fed, count, request.stop_tokens)
        return self._after(loop, plan, fresh, logits, (sampled, logprobs, kept, stops))

    def _seen_with(self, seen: tf.Tensor, fed: tf.Tensor, penalty: tf.Tensor) -> tf.Tensor:
        """Tokens that were seen when each of ``fed [B, T]`` was there, bool ``[B·T, V]``; only if
        a row has a penalty."""
        rows, width = shape_of(fed)
        if width == 1:
            return seen
        each = _each(seen, width)

        def mark() -> tf.Tensor:
            offsets = tf.range(width)
            # The first was seen in any case: it stands for those that are not there yet.
            there = tf.where(offsets <= offsets[:, tf.newaxis], offsets, 0)
            tokens = tf.reshape(tf.gather(fed, there, axis=1), [-1])
            row = tf.repeat(tf.range(rows * width), width)
            where = tf.stack([row, tokens], axis=1)
            return tf.tensor_scatter_nd_update(each, where, tf.ones_like(row, tf.bool))

        return tf.cond(tf.reduce_any(penalty != 1.0), mark, lambda: each)

    def _after(
        self,
        loop: Loop,
        plan: Plan,
        fresh: Any,
        logits: tf.Tensor,
        found: tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor],
    ) -> Loop:
        """The state after a step that sampled tokens ``[B, T]`` with logprobs, of which so many
        stand, the last of them perhaps a stop token."""
        sampled, logprobs, kept, stops = found
        made, (rows, width) = loop.made, shape_of(sampled)
        place = tf.range(self._chunk) - made.fed[:, tf.newaxis]
        here = (place >= 0) & (place < kept[:, tf.newaxis]) & loop.alive[:, tf.newaxis]
        place = tf.clip_by_value(place, 0, width - 1)
        stopped = loop.alive & stops
        # Behind the last that stands it is written again.
        upto = tf.minimum(tf.range(width), kept[:, tf.newaxis] - 1)
        tokens = tf.gather(sampled, upto, batch_dims=1)
        row = tf.repeat(tf.range(rows), width) if width > 1 else tf.range(rows)
        where = tf.stack([row, tf.reshape(tokens, [-1])], axis=1)
        added = tf.where(loop.alive, kept, 0)
        fed = made.fed + added
        state = Loop(
            tokens[:, -1],
            loop.alive & ~stopped & (fed < plan.steps),
            fresh,
            tf.tensor_scatter_nd_update(loop.seen, where, tf.ones_like(row, tf.bool)),
            Sampled(
                tf.where(here, tf.gather(sampled, place, batch_dims=1), made.tokens),
                tf.where(here, tf.gather(logprobs, place, batch_dims=1), made.logprobs),
                fed,
                tf.gather(logits, kept - 1, batch_dims=1) if width > 1 else logits[:, 0],
                made.stopped | stopped,
                made.guessed,
                made.accepted,
            ),
            loop.ahead,
        )
        if self._lookup is not None:
            state = self._guess_on(self._lookup, state, loop, plan, (tokens, upto, added))
        return tf.nest.map_structure(keep_shape, state, loop)

    def _guess_on(
        self,
        lookup: PromptLookup,
        state: Loop,
        before: Loop,
        plan: Plan,
        found: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
    ) -> Loop:
        """The state with guesses that follow what a step sampled: tokens ``[B, T]``, which of
        them stands at each place, and how many stand."""
        tokens, upto, added = found
        text, width = before.ahead.text, shape_of(tokens)[1]
        rows, size = shape_of(text)
        at = (plan.start + plan.fill + before.made.fed + 1)[:, tf.newaxis] + upto
        row = tf.broadcast_to(tf.range(rows)[:, tf.newaxis], [rows, width])
        text = tf.tensor_scatter_nd_update(text, tf.stack([row, at % size], axis=-1), tokens)
        made = state.made
        if width > 1:
            made = made._replace(
                guessed=made.guessed + before.ahead.count,
                accepted=made.accepted + tf.maximum(added - 1, 0),
            )
        return self._look_ahead(lookup, text, state._replace(made=made), plan)


def _sampling(request: Request) -> samplers.SamplingParams:
    fields = samplers.SamplingParams._fields
    return samplers.SamplingParams(*(getattr(request, field) for field in fields))


def _each(x: tf.Tensor, width: int) -> tf.Tensor:
    """Rows of a batch, each as often as it has tokens."""
    return tf.repeat(x, width, axis=0) if width > 1 else x


def _stand(
    sampled: tf.Tensor, fed: tf.Tensor, count: tf.Tensor, stop_tokens: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """How many sampled tokens stand, int32 ``[B]``, and whether the last of them is a stop token.

    Args:
        sampled: int32 ``[B, T]``, behind each of what was fed.
        fed: int32 ``[B, T]``, a token that stands, and guesses.
        count: int32 ``[B]``, how many of them count.
        stop_tokens: int32 ``[B, stops]``.
    """
    width = shape_of(fed)[1]
    stops = tf.reduce_any(sampled[..., tf.newaxis] == stop_tokens[:, tf.newaxis], axis=-1)
    if width == 1:
        return tf.ones_like(count), stops[:, 0]
    right = (sampled[:, :-1] == fed[:, 1:]) & ~stops[:, :-1]
    right &= tf.range(1, width) < count[:, tf.newaxis]
    kept = 1 + tf.reduce_sum(tf.math.cumprod(tf.cast(right, tf.int32), axis=1), axis=1)
    return kept, tf.gather(stops, kept - 1, batch_dims=1)

"""``generate_text``: strings in and out, for callers without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfkv.errors import INPUT_NUMBERS, Finish, ModelSourceError, Status
from tfkv.export.chat_turns import ChatTurns, Turn, turns_of
from tfkv.export.engine import Engine
from tfkv.export.graph_tokenizer import GraphTokenizer
from tfkv.export.importers import ModelSource
from tfkv.export.session_table import Names
from tfkv.export.stats import draw_numbers
from tfkv.manifest import OVERFLOW_POLICIES, padded_stops

Tensors = dict[str, tf.Tensor]

#: What a text is: the first of a session, the first behind a system message, or a later one.
_OPENING, _WITH_SYSTEM, _FOLLOWING = range(3)


class TextFace:
    """A model's tokenizer and chat template as operations of a graph.

    Args:
        model: Its tokenizer is byte-level BPE.

    Raises:
        ModelSourceError: There is no tokenizer, or it or the template cannot be put into a graph.
    """

    def __init__(self, model: ModelSource) -> None:
        if model.tokenizer_json is None:
            raise ModelSourceError("The model has no tokenizer, so it cannot take text.")
        self.tokenizer = GraphTokenizer.from_json(model.tokenizer_json)
        self.stops = padded_stops(model.stop_tokens)
        self.chat: ChatTurns | None = None
        # Without a template, text is read as it is.
        plain = Turn((), None, (), ("", ""), ())
        turns = [plain._replace(first=_beginning(model.tokenizer_json)), plain, plain]
        if model.chat_template:
            self.chat = turns_of(
                model.chat_template, model.special_tokens, model.tokenizer_json, model.stop_tokens
            )
            opening = self.chat.opening
            turns = [opening, self.chat.with_system or opening, self.chat.following]
        self._ids = {
            name: tf.ragged.constant(
                [list(getattr(turn, name)) for turn in turns], dtype=tf.int32, ragged_rank=1
            )
            for name in ("first", "then", "last")
        }
        self._around = {
            name: tf.constant([getattr(turn, name) or ("", "") for turn in turns])
            for name in ("system", "user")
        }

    def encode(self, texts: Tensors, held: tf.Tensor) -> tf.RaggedTensor:
        """What a session of ``held [B]`` tokens is given next, ids int32 ``[B, None]``.

        Args:
            texts: ``text`` and ``system`` of the signature.
            held: int32 ``[B]``.
        """
        text, system = texts["text"], texts["system"]
        kind = tf.where(system != "", _WITH_SYSTEM, _OPENING)
        kind = tf.where(held == 0, kind, _FOLLOWING)
        if self.chat is not None and self.chat.trims:
            text, system = tf.strings.strip(text), tf.strings.strip(system)
        first, then, last = (tf.gather(ids, kind) for ids in self._ids.values())
        encode = self.tokenizer.encode
        before = encode(self._between("system", kind, system))
        message = encode(self._between("user", kind, text))
        return tf.concat([first, before, then, message, last], axis=1)

    def _between(self, name: str, kind: tf.Tensor, text: tf.Tensor) -> tf.Tensor:
        around = tf.gather(self._around[name], kind)
        return tf.strings.join([around[:, 0], text, around[:, 1]])

    def refused(self, texts: Tensors, held: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Status and detail ``[B]``, of rows that ask for what cannot be, and of the others."""
        out_of_place = held > 0
        if self.chat is None or self.chat.with_system is None:
            out_of_place = tf.ones_like(out_of_place)
        wrong = {
            "max_new_tokens": texts["max_new_tokens"] < 0,
            "system": (texts["system"] != "") & out_of_place,
        }
        status = tf.where(texts["text"] == "", int(Status.EMPTY), int(Status.OK))
        detail = tf.zeros_like(status)
        for name, holds in wrong.items():
            fresh = holds & (status == Status.OK)
            status = tf.where(fresh, int(Status.INVALID), status)
            detail = tf.where(fresh, INPUT_NUMBERS[name], detail)
        return status, detail


class _Rows(NamedTuple):
    """Rows on their way, ``[B]`` each.

    Attributes:
        position: Tokens that the session holds of what was asked for.
        count: Tokens sampled.
        finish: `Finish`.
        status: `Status`; beyond OK a row takes no further part.
        detail: By status.
        ended: Whether an answer that was cut short has been given its end.
    """

    position: tf.Tensor
    count: tf.Tensor
    finish: tf.Tensor
    status: tf.Tensor
    detail: tf.Tensor
    ended: tf.Tensor


class _Asked(NamedTuple):
    """What the rows of a call ask for, ``[B]`` each unless it says otherwise.

    Attributes:
        names: Whose sessions.
        held: Tokens that they held before.
        ids: Tokens to send, ``[B, W]``.
        given: How many.
        wanted: Tokens to sample.
        ends: Whether an answer that is cut short is ended all the same, so that the next turn
            finds one that has ended.
        others: What ``generate`` wants besides.
    """

    names: Names
    held: tf.Tensor
    ids: tf.Tensor
    given: tf.Tensor
    wanted: tf.Tensor
    ends: tf.Tensor
    others: Tensors

    def unsent(self, rows: _Rows) -> tf.Tensor:
        """Which rows have tokens to send."""
        return rows.position < self.held + self.given

    def ending(self, rows: _Rows) -> tf.Tensor:
        """Which rows have only to be given the end of an answer."""
        done = ~self.unsent(rows) & (rows.count >= self.wanted)
        return self._on(rows) & done & self.ends & ~rows.ended

    def working(self, rows: _Rows) -> tf.Tensor:
        """Which rows have something to do."""
        more = self.unsent(rows) | (rows.count < self.wanted)
        return (self._on(rows) & more) | self.ending(rows)

    def _on(self, rows: _Rows) -> tf.Tensor:
        over = (rows.finish == Finish.STOP) | (rows.finish == Finish.CAPACITY)
        return (rows.status == Status.OK) & ~over


def text_body(
    engine: Engine, face: TextFace, generate: Callable[[Tensors], Tensors]
) -> Callable[[Tensors], Tensors]:
    """The body of ``generate_text``: as many calls of ``generate`` as a text takes.

    Sessions are looked at first, so that each call says where its tokens belong: where another
    caller got in between, the row is refused, and nothing is written into the middle.

    Args:
        engine: What holds the sessions.
        face: Text to tokens and back.
        generate: The body of ``generate``.
    """
    chunk, width = engine.engine.decode_chunk, engine.engine.prefill_tokens
    end = face.chat.end if face.chat is not None else 0

    def step(asked: _Asked, rows: _Rows) -> tuple[_Rows, tf.Tensor]:
        """One call of ``generate``, and what it sampled, ``[B, N]``."""
        works, ending = asked.working(rows), asked.ending(rows)
        sent = tf.minimum(rows.position - asked.held, asked.given)
        size = tf.minimum(asked.given - sent, width)
        tokens = tf.gather(asked.ids, sent[:, tf.newaxis] + tf.range(width), batch_dims=1)
        left = tf.minimum(asked.wanted - rows.count, chunk)
        answer = generate(
            {
                # A row without a name takes no part.
                "session_id": tf.where(works, asked.names.session_id, ""),
                "tenant": asked.names.tenant,
                "adapter": asked.names.adapter,
                "tokens": tf.where(ending[:, tf.newaxis], end, tokens),
                "length": tf.where(ending, 1, size),
                "position": rows.position,
                "max_new_tokens": tf.where(sent + size == asked.given, left, 0),
                **asked.others,
            }
        )
        ok = works & (answer["status"] == Status.OK)
        # Where the end itself does not fit, the answer stands.
        says = works & ~ending
        after = _Rows(
            position=tf.where(ok, answer["position"], rows.position),
            count=rows.count + tf.where(ok, answer["count"], 0),
            finish=tf.where(ok & says, answer["finish"], rows.finish),
            status=tf.where(says, answer["status"], rows.status),
            detail=tf.where(says, answer["detail"], rows.detail),
            ended=rows.ended | ending,
        )
        return after, tf.where(ok[:, tf.newaxis], answer["tokens"], -1)

    def body(inputs: Tensors) -> Tensors:
        alone = inputs["session_id"] == ""
        named = tf.where(alone, _names_of_nobody(alone), inputs["session_id"])
        names = Names(named, inputs["tenant"], inputs["adapter"])
        held = engine.held(names)
        ids = face.encode(inputs, held)
        asked = _Asked(
            names,
            held,
            tf.pad(ids.to_tensor(), [[0, 0], [0, width]]),
            tf.cast(ids.row_lengths(), tf.int32),
            inputs["max_new_tokens"],
            tf.fill(tf.shape(held), face.chat is not None) & ~alone,
            {**{name: inputs[name] for name in _PASSED}, **_neutral(face, tf.size(held))},
        )
        zeros = tf.zeros_like(held)
        rows = _Rows(held, zeros, zeros, *face.refused(inputs, held), tf.zeros_like(alone))

        def advance(rows: _Rows, sampled: tf.Tensor) -> tuple[_Rows, tf.Tensor]:
            rows, new = step(asked, rows)
            return rows, tf.concat([sampled, new], axis=1)

        column = tf.TensorShape([None])
        rows, sampled = tf.while_loop(
            lambda rows, _: tf.reduce_any(asked.working(rows)),
            advance,
            (rows, tf.fill([tf.size(held), 0], -1)),
            shape_invariants=(_Rows(*[column] * len(rows)), tf.TensorShape([None, None])),
        )
        rows = _clean_up(engine, names, rows, alone, held)
        return {
            "text": face.tokenizer.decode(sampled),
            **{name: value for name, value in rows._asdict().items() if name != "ended"},
            "epoch": tf.fill([tf.size(held)], engine.stats.epoch.read()),
        }

    return body


#: Inputs that every call of ``generate`` gets as they came.
_PASSED = ("temperature", "top_p", "seed")


def _neutral(face: TextFace, rows: tf.Tensor) -> Tensors:
    """Inputs of ``generate`` that a text has no say in, once for each row."""
    values = {
        "min_p": tf.constant(0.0),
        "repetition_penalty": tf.constant(1.0),
        "top_k": tf.constant(0),
        "stop_tokens": tf.constant(face.stops),
        "overflow": tf.constant(OVERFLOW_POLICIES["stop"]),
        "pin": tf.constant(0),
        "ttl_ms": tf.constant(0, tf.int64),
    }
    return {name: tf.repeat(value[tf.newaxis], rows, axis=0) for name, value in values.items()}


def _clean_up(
    engine: Engine, names: Names, rows: _Rows, alone: tf.Tensor, held: tf.Tensor
) -> _Rows:
    """Closes sessions that had no name, and takes back what a refused row had sent."""
    failed = (rows.status != Status.OK) & (rows.position > held)
    shut = alone | (failed & (held == 0))
    back = failed & ~shut

    def only(chosen: tf.Tensor) -> Names:
        return names._replace(session_id=tf.where(chosen, names.session_id, ""))

    with tf.control_dependencies(rows):
        closed = engine.close(only(shut))[0]
        with tf.control_dependencies([closed]):
            taken = engine.truncate(only(back), held)[0]
    with tf.control_dependencies([closed, taken]):
        position = tf.where(back, taken, tf.where(shut, 0, rows.position))
        return rows._replace(position=position)


def _names_of_nobody(rows: tf.Tensor) -> tf.Tensor:
    """Names that no caller has thought of, string ``[B]``."""
    return tf.strings.join(["text", tf.strings.as_string(draw_numbers(tf.shape(rows)))])


def _beginning(tokenizer_json: str) -> tuple[int, ...]:
    """Ids that the tokenizer puts in front of a text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    with_it, plain = (tokenizer.encode("a", add_special_tokens=own).ids for own in (True, False))
    return tuple(with_it[: len(with_it) - len(plain)])

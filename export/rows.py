"""The tensors that travel through a call, one row per caller."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

#: Kinds of a remembered token.
GIVEN, SAMPLED, STOPPED = 0, 1, 2

#: What a row asks for besides having its tokens appended.
GENERATE, DECODE, SCORE = 0, 1, 2

#: Stands in for a logprob that nobody computed: a logprob is never positive.
NO_LOGPROB = 1.0


class Request(NamedTuple):
    """Numeric inputs of ``generate``, ``decode`` or ``score``, each ``[B, ...]``.

    Attributes:
        mode: int32, `GENERATE`, `DECODE` or `SCORE`.
        tokens: int32 ``[B, T]``.
        length: int32, how many of the tokens count.
        position: int32, −1 = at the end.
        max_new_tokens: int32.
        temperature: float32.
        top_p: float32.
        min_p: float32.
        repetition_penalty: float32.
        top_k: int32.
        seed: int64.
        stop_tokens: int32 ``[B, stops]``.
        overflow: int32.
        pin: int32.
        ttl_ms: int64.
    """

    mode: tf.Tensor
    tokens: tf.Tensor
    length: tf.Tensor
    position: tf.Tensor
    max_new_tokens: tf.Tensor
    temperature: tf.Tensor
    top_p: tf.Tensor
    min_p: tf.Tensor
    repetition_penalty: tf.Tensor
    top_k: tf.Tensor
    seed: tf.Tensor
    stop_tokens: tf.Tensor
    overflow: tf.Tensor
    pin: tf.Tensor
    ttl_ms: tf.Tensor

    @property
    def wants_logits(self) -> tf.Tensor:
        """Rows that ask for the logits after their tokens, bool ``[B]``."""
        return self.mode == DECODE

    @property
    def wants_scores(self) -> tf.Tensor:
        """Rows that ask for the logprobs of their tokens, bool ``[B]``."""
        return self.mode == SCORE


class Admission(NamedTuple):
    """What the session table says of a batch.

    Attributes:
        slot: int32 ``[B]``; the spare slot where a row has none.
        fresh: bool ``[B]``, the session is new.
        first: int32 ``[B]``, first row of the same session; it counts, the others copy it.
        status: int32 ``[B]``, OK or why the row goes no further.
        detail: int32 ``[B]``.
        tenant: int64 ``[B]``, number of the caller's tenant, and of its adapter: see
            `AdapterTable.owner`.
        retry_ms: int32 ``[1]``, until the earliest session expires.
        now_ms: int64 ``[1]``.
    """

    slot: tf.Tensor
    fresh: tf.Tensor
    first: tf.Tensor
    status: tf.Tensor
    detail: tf.Tensor
    tenant: tf.Tensor
    retry_ms: tf.Tensor
    now_ms: tf.Tensor


class Answer(NamedTuple):
    """What a row gets back, each ``[B, ...]``; which of it is sent depends on the signature."""

    tokens: tf.Tensor
    count: tf.Tensor
    logprobs: tf.Tensor
    finish: tf.Tensor
    logits: tf.Tensor
    scores: tf.Tensor
    taken: tf.Tensor
    position: tf.Tensor
    status: tf.Tensor
    detail: tf.Tensor

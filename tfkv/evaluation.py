"""How far a cache moves the model's next-token distributions, measured on a given text.

Text is read teacher-forced and in pieces, so that all but the newest piece is read back
from the cache under test: a one-pass perplexity would never touch it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfkv.causal_lm import CausalLM
from tfkv.errors import ConfigError
from tfkv.pieces import padded_pieces


class Reader(Protocol):
    """Reads one text through a cache, piece by piece."""

    def start(self) -> None:
        """Forgets what was read."""

    def read(self, tokens: np.ndarray, position: int) -> tf.Tensor:
        """Reads on.

        Args:
            tokens: int32 ``[T]``, always as many as at first.
            position: Of the first of them.

        Returns:
            float32 logits ``[T, V]`` after each.
        """


class SessionReader(Reader, Protocol):
    """A `Reader` as a server reads: prompts and answers, from states that can be returned to."""

    def read(self, tokens: np.ndarray, position: int, prompt: bool = False) -> tf.Tensor:
        """Reads on.

        Args:
            tokens: int32 ``[T]``; −1 behind the last one = no token.
            position: Of the first of them.
            prompt: Whether they are a piece of a prompt, which a policy may want whole before
                it judges.

        Returns:
            float32 logits ``[T, V]`` after each.
        """

    def save(self) -> Any:
        """What it holds now, for `resume`."""

    def resume(self, saved: Any) -> None:
        """Goes back to what it held, any number of times."""

    def compress(self, position: int) -> None:
        """Evicts down to the policy's budget after tokens up to `position` were read; caches
        that do not evict by score stay as they are."""


class ModelReader:
    """Reads through the cache of a Keras model: any policy, codec and capacity it has.

    Args:
        model: Decoder.
        xla: Whether to compile with XLA.
    """

    def __init__(self, model: CausalLM, xla: bool = True) -> None:
        self._model = model
        self._state: Any = None
        self._step = tf.function(self._run, jit_compile=xla)

    def start(self) -> None:
        """Forgets what was read."""
        self._state = self._model.init_state(1)

    def read(self, tokens: np.ndarray, position: int) -> tf.Tensor:
        """See `Reader.read`."""
        ids = tf.constant(tokens[np.newaxis], tf.int32)
        logits, self._state = self._step(ids, tf.constant(position), self._state)
        return logits

    def state_after(self, tokens: np.ndarray, piece: int = 64) -> Any:
        """The state of one session that has read ``tokens [S]``, in pieces."""
        self.start()
        for first, row in padded_pieces(tokens, piece):
            self.read(row, first)
        return self._state

    def read_on(self, state: Any, tokens: np.ndarray, position: int, piece: int = 64) -> np.ndarray:
        """Logits ``[T, V]`` after each of ``tokens [T]``, read from a state on, in pieces."""
        self._state = state
        pieces = padded_pieces(tokens, piece)
        logits = [self.read(row, position + first).numpy() for first, row in pieces]
        return np.concatenate(logits)[: len(tokens)]

    def evicted(self, state: Any) -> Any:
        """A state as after a prompt: no more entries than the budgets of layers that evict."""
        return self._model.evict(state)

    def _run(self, ids: tf.Tensor, position: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        positions = (position + tf.range(ids.shape[1]))[tf.newaxis]
        logits, state = self._model(ids, positions=positions, state=state)
        return logits[0], state


def read_on(
    reader: SessionReader,
    tokens: Sequence[int] | np.ndarray,
    position: int,
    prompt: bool = False,
    piece: int = 64,
) -> np.ndarray:
    """Reads ``tokens [T]`` in pieces, and gives the likeliest next token after each, int64 ``[T]``;
    see `SessionReader.read`."""
    found = [
        tf.argmax(reader.read(row, position + first, prompt), axis=-1).numpy()
        for first, row in padded_pieces(tokens, piece)
    ]
    return np.concatenate([np.zeros([0], np.int64), *found])[: len(tokens)]


def continuation(
    reader: SessionReader, prompt: Sequence[int] | np.ndarray, count: int
) -> list[int]:
    """The `count` tokens that follow a prompt greedily, one at a time.

    Args:
        reader: Reads all of the prompt but the last token as a prompt, the rest as a server
            decodes.
        prompt: Token ids, one at least.
        count: Tokens to give.
    """
    reader.start()
    read_on(reader, prompt[:-1], 0, prompt=True)
    made = [int(prompt[-1])]
    for step in range(count):
        made.append(int(read_on(reader, made[-1:], len(prompt) - 1 + step, piece=1)[0]))
    return made[1:]


def teacher_forced_logits(
    reader: Reader, tokens: Sequence[int] | np.ndarray, piece: int = 64
) -> Iterator[tf.Tensor]:
    """Logits after each token of a text.

    Args:
        reader: What reads it.
        tokens: The text; what does not fill the last piece is left out.
        piece: Tokens read at once.

    Yields:
        float32 ``[piece, V]``, piece by piece.

    Raises:
        ConfigError: The text does not fill one piece.
    """
    ids = np.asarray(tokens, np.int32)
    if not 1 <= piece <= ids.size:
        raise ConfigError(
            f"`tokens` must fill a piece of at least 1. Received: {ids.size} tokens and "
            f"piece={piece}."
        )
    reader.start()
    for first in range(0, ids.size - piece + 1, piece):
        yield reader.read(ids[first : first + piece], first)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two caches on one text, token by token.

    Args:
        kl: KL divergence of the candidate's next-token distribution from the reference's
            after each token, in nats; float ``[M]``.
        same_top: Whether both find the same token most likely; bool ``[M]``.
        gap: Largest difference of two logits after each token; float ``[M]``.
        reference_nll: What the token that followed was worth to the reference, −log p in nats;
            float ``[M]``, NaN where none followed.
        candidate_nll: Likewise, to the candidate.
    """

    kl: np.ndarray
    same_top: np.ndarray
    gap: np.ndarray
    reference_nll: np.ndarray
    candidate_nll: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens compared."""
        return self.kl.size

    @property
    def mean_kl(self) -> float:
        """Mean over tokens, in nats."""
        return float(np.mean(self.kl))

    @property
    def top1_percent(self) -> float:
        """Tokens after which both find the same one most likely, in percent."""
        return 100.0 * float(np.mean(self.same_top))


def perplexity(nll: np.ndarray) -> float:
    """exp of the mean of −log p in nats, NaN left out."""
    return float(np.exp(np.nanmean(nll)))


def compare_caches(
    reference: Reader,
    candidate: Reader,
    texts: Sequence[Sequence[int] | np.ndarray],
    piece: int = 64,
) -> Comparison:
    """Reads texts through two caches and compares the distributions after each token.

    Args:
        reference: Usually the full float32 cache.
        candidate: The cache in question.
        texts: Token ids; each text begins an empty cache.
        piece: Tokens read at once; smaller ones read the cache more often.

    Returns:
        One entry for each token compared.

    Raises:
        ConfigError: There is no text, or one does not fill a piece.
    """
    if not texts:
        raise ConfigError("`texts` must hold at least one text. Received: none.")
    found = []
    for text in texts:
        both = zip(
            teacher_forced_logits(reference, text, piece),
            teacher_forced_logits(candidate, text, piece),
            strict=True,
        )
        follow = np.append(np.asarray(text, np.int32)[1:], -1)
        for index, (expected, given) in enumerate(both):
            next_ids = follow[index * piece : (index + 1) * piece]
            found.append([part.numpy() for part in compare_logits(expected, given, next_ids)])
    return Comparison(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


@tf.function(jit_compile=True, reduce_retracing=True)
def compare_logits(
    expected: tf.Tensor, given: tf.Tensor, follow: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """Fields of `Comparison` for each row of logits ``[T, V]``; ``follow [T]`` is −1 where no
    token followed."""

    def nll(log_probabilities: tf.Tensor) -> tf.Tensor:
        chosen = tf.gather(log_probabilities, tf.maximum(follow, 0), batch_dims=1)
        return tf.where(follow < 0, float("nan"), -chosen)

    p, q = tf.nn.log_softmax(expected), tf.nn.log_softmax(given)
    # Summed as p (log p − log q) − p + q, no term of which is negative: what rounding leaves
    # of two equal distributions does not drown the small figures sought here.
    terms = tf.exp(p) * (p - q) - tf.exp(p) + tf.exp(q)
    same = tf.argmax(expected, axis=-1) == tf.argmax(given, axis=-1)
    gap = tf.reduce_max(tf.abs(expected - given), axis=-1)
    return tf.reduce_sum(terms, axis=-1), same, gap, nll(p), nll(q)

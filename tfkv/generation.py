"""Generation inside this process, for notebooks, evaluation and parity checks.

A server is not involved: it runs an exported artifact. Both call the same attention,
codecs, policies and sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfkv.causal_lm import CausalLM
from tfkv.errors import ConfigError
from tfkv.samplers import SamplingParams, sample

#: Stop tokens that one call may name.
_MAX_STOP_TOKENS = 8


class Decoder(Protocol):
    """What generation asks of a model: `CausalLM` and `CachedModel` are such."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def most_tokens(self) -> int: ...

    def init_state(self, batch_size: int) -> Any: ...

    def no_hidden(self, batch_size: int) -> tf.Tensor: ...

    def hidden_states(
        self, token_ids: tf.Tensor, positions: tf.Tensor | None = None, state: Any = None
    ) -> tuple[tf.Tensor, Any]: ...

    def logits(self, hidden: tf.Tensor) -> tf.Tensor: ...


class _Loop(NamedTuple):
    """All that a decode loop carries from step to step.

    Attributes:
        step: int32, steps done.
        hidden: ``[B, D]``, of the last token of each row.
        position: int32 ``[B]``, where the next token stands.
        done: bool ``[B]``, whether a stop token was sampled.
        tokens: int32 ``[B, steps]``, sampled so far; −1 after the end.
        state: Caches, as the model has them.
    """

    step: tf.Tensor
    hidden: tf.Tensor
    position: tf.Tensor
    done: tf.Tensor
    tokens: tf.Tensor
    state: Any


class Generator:
    """Compiled prefill and decode of one model.

    Prompts are cut into chunks of one size and decode steps run in one loop of one size,
    so a batch size is compiled once, whatever the lengths are. The weights are read anew
    at each call: training in between is seen.

    Args:
        model: Decoder; its caches are what is used.
        prefill_chunk: Prompt tokens of one compiled call.
        decode_chunk: Most steps of one compiled call.
        xla: Whether calls are compiled with XLA.

    Example:
        >>> Generator(model).generate([[1, 2, 3], [4]], max_new_tokens=8)
    """

    def __init__(
        self, model: Decoder, prefill_chunk: int = 64, decode_chunk: int = 16, xla: bool = True
    ) -> None:
        for name, value in (("prefill_chunk", prefill_chunk), ("decode_chunk", decode_chunk)):
            if value < 1:
                raise ConfigError(f"`{name}` must be at least 1. Received: {name}={value}.")
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.decode_chunk = decode_chunk
        self._prefill = tf.function(self._prefill_step, jit_compile=xla)
        self._decode = tf.function(self._decode_steps, jit_compile=xla)

    @property
    def traces(self) -> int:
        """Graphs traced so far: two for each batch size, whatever the lengths."""
        counts = (f.experimental_get_tracing_count() for f in (self._prefill, self._decode))
        return sum(counts)

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_tokens: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        state: Any = None,
    ) -> list[list[int]]:
        """Continues each prompt.

        Args:
            token_ids: B prompts of any lengths, none of them empty.
            max_new_tokens: Most tokens for each.
            stop_tokens: End a row; the one that did is included. At most 8.
            sampling: How to sample, fields ``[B]``; greedy where left out. The repetition
                penalty is not applied here.
            state: Sessions without a token to begin with, as the model has them; its
                `init_state` where left out.

        Returns:
            New tokens of each row.

        Raises:
            ConfigError: An argument is out of range, or prompt and answer do not fit the
                cache.
        """
        prompts = self._checked(token_ids, max_new_tokens, stop_tokens)
        batch = len(prompts)
        stops = np.full([_MAX_STOP_TOKENS], -1, np.int32)
        stops[: len(stop_tokens)] = stop_tokens
        params = greedy_params(batch) if sampling is None else sampling
        hidden, state = self._prefill_all(prompts, state)
        position = tf.constant([len(prompt) for prompt in prompts], tf.int32)
        done = tf.zeros([batch], tf.bool)
        pieces = []
        for first in range(0, max_new_tokens, self.decode_chunk):
            steps = min(self.decode_chunk, max_new_tokens - first)
            loop = self._decode(
                tf.constant(steps), hidden, position, done, state, tf.constant(stops), params
            )
            hidden, position, done, state = loop.hidden, loop.position, loop.done, loop.state
            pieces.append(loop.tokens.numpy()[:, :steps])
            if done.numpy().all():
                break
        rows = np.concatenate([np.empty([batch, 0], np.int32), *pieces], axis=1)
        return [row[row >= 0].tolist() for row in rows]

    def _checked(
        self, token_ids: Sequence[Sequence[int]], new: int, stops: Sequence[int]
    ) -> list[np.ndarray]:
        prompts = [np.asarray(prompt, np.int32) for prompt in token_ids]
        if not prompts or any(prompt.ndim != 1 or not prompt.size for prompt in prompts):
            raise ConfigError("`token_ids` must be a list of prompts of at least one token each.")
        vocabulary = self.model.vocabulary_size
        if any(prompt.min() < 0 or prompt.max() >= vocabulary for prompt in prompts):
            raise ConfigError(f"`token_ids` must be from 0 to {vocabulary - 1}.")
        if new < 0 or len(stops) > _MAX_STOP_TOKENS:
            raise ConfigError(
                "`max_new_tokens` must not be negative, and `stop_tokens` may name at most "
                f"{_MAX_STOP_TOKENS} tokens. Received: max_new_tokens={new}, {len(stops)} stops."
            )
        capacity = self.model.most_tokens
        longest = max(prompt.size for prompt in prompts) + new
        if 0 <= capacity < longest:
            raise ConfigError(
                f"Prompt and answer must fit `capacity`={capacity} tokens. Received: a prompt and "
                f"max_new_tokens of {longest} together. Ask for fewer, raise `capacity`, or "
                "choose a cache that forgets, such as 'sliding_window'."
            )
        return prompts

    def _prefill_all(self, prompts: list[np.ndarray], state: Any) -> tuple[tf.Tensor, Any]:
        """Last hidden state of each prompt, and the caches that hold the prompts."""
        batch, longest = len(prompts), max(map(len, prompts))
        width = -(-longest // self.prefill_chunk) * self.prefill_chunk
        padded = np.full([batch, width], -1, np.int32)
        for row, prompt in zip(padded, prompts, strict=True):
            row[: prompt.size] = prompt
        state = self.model.init_state(batch) if state is None else state
        hidden = self.model.no_hidden(batch)
        for first in range(0, width, self.prefill_chunk):
            chunk = tf.constant(padded[:, first : first + self.prefill_chunk])
            hidden, state = self._prefill(chunk, hidden, state)
        return hidden, state

    def _prefill_step(
        self, tokens: tf.Tensor, hidden: tf.Tensor, state: Any
    ) -> tuple[tf.Tensor, Any]:
        """One chunk; rows that ended before it keep their hidden state."""
        chunk, state = self.model.hidden_states(tokens, state=state)
        given = tf.reduce_sum(tf.cast(tokens >= 0, tf.int32), axis=1)
        last = tf.gather(chunk, tf.maximum(given - 1, 0), batch_dims=1)
        return tf.where((given > 0)[:, tf.newaxis], last, hidden), state

    def _decode_steps(
        self,
        steps: tf.Tensor,
        hidden: tf.Tensor,
        position: tf.Tensor,
        done: tf.Tensor,
        state: Any,
        stops: tf.Tensor,
        params: SamplingParams,
    ) -> _Loop:
        """Samples `steps` tokens; the cache then holds all but the last of each row."""
        batch = hidden.shape[0]
        start = _Loop(
            step=tf.constant(0),
            hidden=hidden,
            position=position,
            done=done,
            tokens=tf.fill([batch, self.decode_chunk], -1),
            state=state,
        )

        def body(*fields: tf.Tensor) -> _Loop:
            loop = _Loop(*fields)
            token = sample(self.model.logits(loop.hidden), params, loop.position)
            token = tf.where(loop.done, -1, token)
            column = tf.range(self.decode_chunk)[tf.newaxis] == loop.step
            done = loop.done | tf.reduce_any(token[:, tf.newaxis] == stops, axis=1)
            hidden, state = self.model.hidden_states(
                token[:, tf.newaxis], positions=loop.position[:, tf.newaxis], state=loop.state
            )
            return _Loop(
                step=loop.step + 1,
                hidden=hidden[:, 0],
                position=loop.position + tf.cast(token >= 0, tf.int32),
                done=done,
                tokens=tf.where(column, token[:, tf.newaxis], loop.tokens),
                state=state,
            )

        return tf.while_loop(
            lambda step, *_: step < steps, body, start, maximum_iterations=self.decode_chunk
        )


def greedy_params(batch: int) -> SamplingParams:
    """Sampling that takes the most likely token in each of `batch` rows."""
    return SamplingParams(
        temperature=tf.zeros([batch]),
        top_p=tf.ones([batch]),
        min_p=tf.zeros([batch]),
        repetition_penalty=tf.ones([batch]),
        top_k=tf.zeros([batch], tf.int32),
        seed=tf.zeros([batch], tf.int64),
    )


def generate(
    model: CausalLM,
    token_ids: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    sampling: SamplingParams | None = None,
) -> list[list[int]]:
    """Continues prompts with the model's own `Generator`, which is compiled once.

    The arguments, the result and the errors are those of `Generator.generate`.
    """
    return model.generator.generate(token_ids, max_new_tokens, stop_tokens, sampling)


def generate_without_cache(
    model: Decoder, token_ids: Sequence[Sequence[int]], max_new_tokens: int, xla: bool = True
) -> list[list[int]]:
    """Greedy continuation that computes the whole text anew for each token.

    The baseline that every cache is compared with: slow, and right by construction.
    """
    lengths = np.array([len(prompt) for prompt in token_ids])
    text = np.full([len(lengths), lengths.max() + max_new_tokens], -1, np.int32)
    for row, prompt in zip(text, token_ids, strict=True):
        row[: len(prompt)] = prompt

    @tf.function(jit_compile=xla)
    def next_tokens(text: tf.Tensor, last: tf.Tensor) -> tf.Tensor:
        hidden, _ = model.hidden_states(text)
        logits = model.logits(tf.gather(hidden, last, batch_dims=1))
        return tf.argmax(logits, axis=-1, output_type=tf.int32)

    rows = np.arange(len(lengths))
    for step in range(max_new_tokens):
        last = tf.constant(lengths + step - 1, tf.int32)
        text[rows, lengths + step] = next_tokens(tf.constant(text), last).numpy()
    return [row[n : n + max_new_tokens].tolist() for row, n in zip(text, lengths, strict=True)]

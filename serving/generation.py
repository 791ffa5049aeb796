"""One generation: how it samples, what streams out of it, and what it came to."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Self

from tfkv.chat_template import Message
from tfkv.errors import Finish
from tfkv.serving.failures import InputError
from tfkv.serving.text import Detokenizer

#: Text, token ids, or the messages of a conversation.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        max_new_tokens: Most tokens to sample; 0 only stores the prompt.
        temperature: 0 = greedy.
        top_p: Probability mass kept.
        top_k: Most candidates, 0 = all.
        min_p: Least share of the top token's probability.
        repetition_penalty: 1 = none.
        seed: The random stream; the same seed on the same transcript gives the same tokens.
            Drawn at random by default where the temperature is above 0.
        stop_tokens: Ids that end the generation, at most 8; the artifact's by default.

    Raises:
        InputError: ``max_new_tokens`` is negative, or a number is not one.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_tokens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise InputError(
                f"`max_new_tokens` must not be negative. Received: {self.max_new_tokens}."
            )
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise InputError(f"`{name}` must be finite. Received: {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one bounded call sampled."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A reply with sampled tokens.

    Args:
        seconds: From the first request of the generation to this reply.
        tokens: Sampled tokens that it brought.
    """

    seconds: float
    tokens: int


@dataclasses.dataclass(frozen=True)
class Result:
    """What a generation came to.

    Args:
        tokens: Sampled ids, the stop token included.
        text: Their text without the stop token; ``None`` without a tokenizer.
        logprobs: Of each sampled token, under the unmodified model.
        finish: Why it ended; ``NONE`` while it runs, or when it was abandoned or failed.
        seed: The seed it was sampled with.
        prompt_tokens: Tokens that this generation added before sampling.
        time_to_first_token: Seconds from the first request to the first sampled token.
        seconds: Seconds until the last sampled token, time between pieces included.
        first_tokens: Tokens that the first reply brought.
    """

    tokens: list[int]
    text: str | None
    logprobs: list[float]
    finish: Finish
    seed: int
    prompt_tokens: int
    time_to_first_token: float
    seconds: float
    first_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens a second after the first reply, 0 where there was only one."""
        rest, seconds = len(self.tokens) - self.first_tokens, self.seconds
        decoding = seconds - self.time_to_first_token
        return rest / decoding if rest > 0 and decoding > 0 else 0.0


class Generation(Iterator[Any]):
    """A running generation: iterate over it for its pieces as they arrive.

    Pieces are text where the client has a tokenizer, otherwise token ids. Nothing is sent
    before the first piece is asked for. `result` is there at any time and complete at the end.

    Args:
        chunks: Bounded calls, one chunk each.
        detokenizer: Makes text of ids; ``None`` to hand out ids.
        seed: The seed of the sampling.
        prompt_tokens: Tokens added before sampling.
        done: Called once, with this generation, when it has ended in whatever way.

    Attributes:
        completed: Whether it ran to its end; not so when it was abandoned or failed.
    """

    def __init__(
        self,
        chunks: Generator[Chunk, None, None],
        detokenizer: Detokenizer | None,
        *,
        seed: int,
        prompt_tokens: int,
        done: Callable[[Generation], None],
    ) -> None:
        self._chunks = chunks
        self._detokenizer = detokenizer
        self._seed = seed
        self._prompt_tokens = prompt_tokens
        self._done: Callable[[Generation], None] | None = done
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._text: list[str] = []
        self._finish = Finish.NONE
        self._started: float | None = None
        self._arrivals: list[Arrival] = []
        self._ready: collections.deque[Any] = collections.deque()
        self.completed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while not self._ready:
            if self._done is None:
                raise StopIteration
            self._pull()
        return self._ready.popleft()

    def run(self) -> Self:
        """Runs to the end; the pieces can still be iterated over afterwards."""
        while self._done is not None:
            self._pull()
        return self

    def close(self) -> None:
        """Ends it here; what was sampled stays in the session. Harmless when repeated."""
        self._chunks.close()
        self._end()

    @property
    def result(self) -> Result:
        """What was sampled so far, or altogether."""
        times = [arrival.seconds for arrival in self._arrivals] or [0.0]
        return Result(
            tokens=list(self._tokens),
            text=None if self._detokenizer is None else "".join(self._text),
            logprobs=list(self._logprobs),
            finish=self._finish,
            seed=self._seed,
            prompt_tokens=self._prompt_tokens,
            time_to_first_token=times[0],
            seconds=times[-1],
            first_tokens=self._arrivals[0].tokens if self._arrivals else 0,
        )

    @property
    def arrivals(self) -> list[Arrival]:
        """When sampled tokens came, so far."""
        return list(self._arrivals)

    @property
    def text(self) -> str | None:
        """Text so far, or altogether; ``None`` without a tokenizer."""
        return self.result.text

    def _pull(self) -> None:
        """Makes one bounded call and queues what it gave."""
        if self._started is None:
            self._started = time.monotonic()
        try:
            chunk = next(self._chunks)
        except StopIteration:
            self.completed = True
            self._end()
            return
        except BaseException:
            self._end()
            raise
        if chunk.tokens:
            passed = time.monotonic() - self._started
            self._arrivals.append(Arrival(passed, len(chunk.tokens)))
        self._tokens += chunk.tokens
        self._logprobs += chunk.logprobs
        self._finish = chunk.finish
        stopped = chunk.finish == Finish.STOP
        self._give(chunk.tokens[:-1] if stopped else chunk.tokens, chunk.tokens)

    def _give(self, visible: list[int], tokens: list[int]) -> None:
        if self._detokenizer is None:
            self._ready.extend(tokens)
        else:
            self._queue_text(self._detokenizer.push(visible))

    def _queue_text(self, text: str) -> None:
        if text:
            self._text.append(text)
            self._ready.append(text)

    def _end(self) -> None:
        if self._done is None:
            return
        done, self._done = self._done, None
        if self._detokenizer is not None and self.completed:
            self._queue_text(self._detokenizer.flush())
        done(self)


def is_messages(prompt: Prompt) -> bool:
    """Whether a prompt is a conversation."""
    return not isinstance(prompt, str) and bool(len(prompt)) and isinstance(prompt[0], Mapping)

"""Load on a server: many sessions at once, and how long each of them waits for its tokens."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np

from tfkv.errors import ServerError, TfkvError
from tfkv.serving.client import Client
from tfkv.serving.failures import InputError
from tfkv.serving.generation import Arrival

#: Ids that every vocabulary has, where the client does not know the model's.
_COMMON_IDS = 256
#: Open-loop requests that may be under way; later ones wait, and their wait is counted.
_MOST_OPEN = 512
_PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of a server.

    A closed loop (`concurrency` alone) keeps so many sessions busy, and a slow server is asked
    less: choose it for the throughput that a server can give. An open loop (`rate`) sends at
    random times whatever the server does, as users do: choose it for the latency at a given
    demand. There a request's time counts from when it was due, also where it had to wait for
    others.

    Args:
        requests: Sessions in all.
        concurrency: Sessions at a time, in a closed loop.
        rate: Sessions a second that begin, on average (Poisson); 0 = a closed loop.
        prompt_tokens: Tokens that each turn brings, drawn at random.
        shared_tokens: Tokens that come before, in all sessions the same.
        new_tokens: Tokens sampled in each turn; no stop token ends one early.
        turns: Turns of a session.
        seed: Of prompts and times.

    Raises:
        InputError: A number is out of its range.
    """

    requests: int = 32
    concurrency: int = 8
    rate: float = 0.0
    prompt_tokens: int = 128
    shared_tokens: int = 0
    new_tokens: int = 64
    turns: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "prompt_tokens", "new_tokens", "turns"):
            if getattr(self, name) < 1:
                raise InputError(f"`{name}` must be at least 1. Received: {getattr(self, name)}.")
        if self.shared_tokens < 0 or not 0 <= self.rate < float("inf"):
            raise InputError(
                "`shared_tokens` and `rate` must be finite and not negative. Received: "
                f"{self.shared_tokens} and {self.rate}."
            )


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of a session.

    Args:
        first: Seconds until its first token.
        last: Seconds until its last.
        gaps: Between replies, seconds for each token of the later one, each token once.
        tokens: Sampled tokens.
    """

    first: float
    last: float
    gaps: tuple[float, ...]
    tokens: int


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load came to.

    Args:
        load: What was asked.
        seconds: From the first request to the end of the last.
        turns: Those that ran to their end.
        errors: Message to the number of sessions that ended with it.
    """

    load: Load
    seconds: float
    turns: tuple[Turn, ...]
    errors: Mapping[str, int]

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens a second, of all sessions together."""
        return sum(turn.tokens for turn in self.turns) / self.seconds

    def latencies(self) -> dict[str, dict[str, float]]:
        """Percentiles in ms: ``first token``, ``between tokens`` and ``whole turn``, each
        ``p50``, ``p90``, ``p99`` and ``max``; empty where nothing ran to its end.

        Tokens come several at a time. Between two replies each token of the later one counts as
        having taken its share.
        """
        series = {
            "first token": [turn.first for turn in self.turns],
            "between tokens": [gap for turn in self.turns for gap in turn.gaps],
            "whole turn": [turn.last for turn in self.turns],
        }
        return {name: _percentiles(values) for name, values in series.items() if values}

    def to_dict(self) -> dict[str, Any]:
        """The report as data."""
        return {
            "load": dataclasses.asdict(self.load),
            "seconds": self.seconds,
            "turns": len(self.turns),
            "tokens_per_second": self.tokens_per_second,
            "turns_per_second": len(self.turns) / self.seconds,
            "latency_ms": self.latencies(),
            "errors": dict(self.errors),
        }


def run_load(
    client: Client, load: Load, progress: Callable[[str, int, int], None] | None = None
) -> LoadReport:
    """Puts a load on a server. A session that fails is counted, and the others go on.

    Args:
        client: Speaks to the server; its own rules say how calls are repeated.
        load: What is asked.
        progress: Called with ``sessions``, how many have ended, and of how many.
    """
    known = client.manifest.model if client.manifest else None
    vocabulary = known.vocabulary_size if known else _COMMON_IDS
    draw = random.Random(load.seed)
    shared = _tokens(draw, vocabulary, load.shared_tokens)
    seeds = [draw.getrandbits(32) for _ in range(load.requests)]
    at_once = min(load.requests, _MOST_OPEN if load.rate else load.concurrency)
    runs = _Runs(client, load, shared, vocabulary)
    started = time.monotonic()
    due = started
    futures = []
    with ThreadPoolExecutor(at_once, thread_name_prefix="load") as pool:
        for seed in seeds:
            if load.rate:
                due += draw.expovariate(load.rate)
                time.sleep(max(0.0, due - time.monotonic()))
            futures.append(pool.submit(runs.session, seed, due if load.rate else None))
        for number, future in enumerate(as_completed(futures), start=1):
            future.result()
            if progress is not None:
                progress("sessions", number, len(futures))
    return LoadReport(load, time.monotonic() - started, tuple(runs.turns), dict(runs.errors))


class _Runs:
    """Sessions of a load, in threads of their own, and what came of them.

    Args:
        client: Speaks to the server.
        load: What is asked.
        shared: Tokens that all prompts begin with.
        vocabulary: Ids below it are drawn.
    """

    def __init__(self, client: Client, load: Load, shared: list[int], vocabulary: int) -> None:
        self.turns: list[Turn] = []
        self.errors: collections.Counter[str] = collections.Counter()
        self._client = client
        self._load = load
        self._shared = shared
        self._vocabulary = vocabulary
        self._lock = threading.Lock()

    def session(self, seed: int, due: float | None) -> None:
        """Runs one session.

        Args:
            seed: Of its prompts.
            due: When it was to begin, on the monotonic clock; None = now.
        """
        draw = random.Random(seed)
        session = self._client.session()
        try:
            with session:
                for number in range(self._load.turns):
                    prompt = _tokens(draw, self._vocabulary, self._load.prompt_tokens)
                    if number == 0:
                        prompt = self._shared + prompt
                    late = time.monotonic() - due if due is not None and number == 0 else 0.0
                    generation = session.generate(
                        prompt, self._load.new_tokens, stop_tokens=(), stream=False
                    )
                    turn = _turn(generation.arrivals, late)
                    with self._lock:
                        self.turns.append(turn)
        except TfkvError as error:
            # Errors are counted by what they say, whichever session they are about.
            message = str(error).replace(repr(session.session_id), "...")
            with self._lock:
                self.errors[f"{type(error).__name__}: {message}"] += 1


def _turn(arrivals: Sequence[Arrival], late: float) -> Turn:
    """A turn whose first call came so many seconds late."""
    if not arrivals:
        raise ServerError("A turn ended without a token.")
    gaps = [
        (later.seconds - earlier.seconds) / later.tokens
        for earlier, later in itertools.pairwise(arrivals)
        for _ in range(later.tokens)
    ]
    tokens = sum(arrival.tokens for arrival in arrivals)
    return Turn(late + arrivals[0].seconds, late + arrivals[-1].seconds, tuple(gaps), tokens)


def _tokens(draw: random.Random, vocabulary: int, count: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(count)]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = 1e3 * np.percentile(seconds, [*_PERCENTILES, 100])
    names = [*(f"p{number}" for number in _PERCENTILES), "max"]
    return dict(zip(names, values.tolist(), strict=True))

"""Scores of one cache against the full one: on text, on what follows it, and on tasks."""

from __future__ import annotations

import dataclasses
from typing import Self

import numpy as np

from tfkv.evaluation import Comparison, perplexity

_RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class TextScore:
    """How far one cache is from the full one, on passages of one length.

    Intervals are of 95 %, from bootstrap samples of whole stretches of text: neighbouring
    tokens are not independent.

    Attributes:
        cache: Policy and codec.
        length: Tokens of a passage.
        bytes_per_token: Of a session of a passage's length, over the tokens that it read, with
            what the codec keeps exactly; a window stores fewer tokens than it reads.
        tokens: Tokens compared.
        kl: Mean KL divergence of the next token's distribution, nats.
        kl_interval: Of it.
        kl_median: Median over tokens.
        kl_p99: 99th percentile over tokens.
        top1_percent: Tokens after which both caches find the same one most likely.
        top1_interval: Of it.
        perplexity: Of the text, read through the cache.
        full_perplexity: Likewise, through the full one.
    """

    cache: str
    length: int
    bytes_per_token: float
    tokens: int
    kl: float
    kl_interval: tuple[float, float]
    kl_median: float
    kl_p99: float
    top1_percent: float
    top1_interval: tuple[float, float]
    perplexity: float
    full_perplexity: float

    @classmethod
    def of(
        cls, cache: str, length: int, bytes_per_token: float, found: Comparison, block: int
    ) -> Self:
        """Summarises a comparison.

        Args:
            cache: Policy and codec.
            length: Tokens of a passage.
            bytes_per_token: See `TextScore`.
            found: Token by token.
            block: Neighbouring tokens that are resampled together.
        """
        return cls(
            cache=cache,
            length=length,
            bytes_per_token=bytes_per_token,
            tokens=found.tokens,
            kl=found.mean_kl,
            kl_interval=interval(found.kl, block),
            kl_median=float(np.median(found.kl)),
            kl_p99=float(np.percentile(found.kl, 99)),
            top1_percent=found.top1_percent,
            top1_interval=interval(100.0 * found.same_top, block),
            perplexity=perplexity(found.candidate_nll),
            full_perplexity=perplexity(found.reference_nll),
        )

    @property
    def measure(self) -> str:
        """What was measured, for people and as a key."""
        return text_measure(self.length)


@dataclasses.dataclass(frozen=True)
class ContinuationScore:
    """What follows passages greedily, with one cache and with the full one.

    Attributes:
        cache: Policy and codec.
        length: Tokens of a passage, what follows it included.
        expected: Tokens that follow each passage with the full cache.
        made: Likewise, with this one.
    """

    cache: str
    length: int
    expected: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]

    @property
    def measure(self) -> str:
        """What was measured, for people and as a key."""
        return continuation_measure(self.length)

    @property
    def first_divergence(self) -> list[int]:
        """Tokens of each passage before the first that differs; all of them where none does."""
        same = np.array(self.expected) == np.array(self.made)
        return [int(row.argmin()) if not row.all() else len(row) for row in same]

    @property
    def agreement_percent(self) -> float:
        """Places at which both have the same token."""
        return 100.0 * float((np.array(self.expected) == np.array(self.made)).mean())


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """Questions of one kind about contexts of one length, with one cache.

    Attributes:
        cache: Policy and codec.
        task: Kind of task.
        length: Tokens of a context.
        depths: Where the answer to each question stands, 0 to 1; None = everywhere.
        solved: Which of them the full cache answers; only these are asked, and count.
        agnostic: Which this one answers where it is asked after a context was compressed.
        aware: Likewise, where the question was read before anything was evicted.
    """

    cache: str
    task: str
    length: int
    depths: tuple[float | None, ...]
    solved: tuple[bool, ...]
    agnostic: tuple[bool, ...]
    aware: tuple[bool, ...]

    @property
    def measure(self) -> str:
        """What was measured, for people and as a key."""
        return task_measure(self.task, self.length)

    @property
    def scored(self) -> int:
        """Questions that count."""
        return sum(self.solved)

    def percent(self, aware: bool = False) -> float:
        """Questions answered of those that count; NaN where none do."""
        right = self.aware if aware else self.agnostic
        return 100.0 * sum(right) / self.scored if self.scored else float("nan")

    def by_depth(self, aware: bool = False) -> dict[float, float]:
        """Likewise for each depth; empty where answers are everywhere."""
        right = self.aware if aware else self.agnostic
        rows = list(zip(self.depths, self.solved, right, strict=True))
        shares = {}
        for depth in sorted({depth for depth in self.depths if depth is not None}):
            counted = [good for at, does, good in rows if at == depth and does]
            shares[depth] = 100.0 * sum(counted) / len(counted) if counted else float("nan")
        return shares


#: Whatever is measured of a cache.
Score = TextScore | ContinuationScore | TaskScore


def text_measure(length: int) -> str:
    """Key of a `TextScore`."""
    return f"text of {length}"


def continuation_measure(length: int) -> str:
    """Key of a `ContinuationScore`."""
    return f"continuation at {length}"


def task_measure(task: str, length: int) -> str:
    """Key of a `TaskScore`."""
    return f"{task} in {length}"


def interval(values: np.ndarray, block: int, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of ``values [M]``, resampled in blocks."""
    whole = values[: len(values) // block * block].reshape(-1, block).mean(axis=1)
    chosen = np.random.default_rng(seed).integers(0, len(whole), (_RESAMPLES, len(whole)))
    low, high = np.percentile(whole[chosen].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)

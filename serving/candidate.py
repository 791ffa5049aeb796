"""One of several continuations of the same transcript."""

from __future__ import annotations

import dataclasses
import math

from tfkv.errors import Finish


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A continuation that n-best sampling or beam search came to.

    Args:
        tokens: Its ids, the stop token included.
        text: Their text without the stop token; ``None`` without a tokenizer.
        logprobs: Of each token, under the unmodified model.
        finish: Why it ended.
        score: What it was ranked by, higher is better.
        seed: The seed it was sampled with; ``None`` where nothing was drawn.
    """

    tokens: list[int]
    text: str | None
    logprobs: list[float]
    finish: Finish
    score: float
    seed: int | None = None

    @property
    def total_logprob(self) -> float:
        """Logprob of the whole continuation."""
        return math.fsum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """Logprob a token; minus infinity where there is none."""
        return self.total_logprob / len(self.logprobs) if self.logprobs else -math.inf

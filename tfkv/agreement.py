"""How far the answers of one system agree with those of another, and what is asked of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PromptAgreement:
    """Two answers to one prompt.

    Attributes:
        prompt: What was asked, as text, or token ids with spaces between them.
        reference: The reference's greedy answer, likewise.
        candidate: The candidate's.
        tokens: Of the longer answer.
        same_tokens: Places at which both answers have the same token.
        first_divergence: First place at which they differ, from 0; None = nowhere.
        kl: KL divergence of the candidate's next-token distribution from the reference's, mean
            over the places of the reference's answer, which both were given; nats.
        kl_max: Largest of them.
        places: Of the reference's answer.
        same_top: Of those, where both find the same token most likely.
        similarity: Cosine of the sentence embeddings of the two answers; None = not measured.
    """

    prompt: str
    reference: str
    candidate: str
    tokens: int
    same_tokens: int
    first_divergence: int | None
    kl: float
    kl_max: float
    places: int
    same_top: int
    similarity: float | None

    @property
    def agreement_percent(self) -> float:
        """Tokens of the longer answer that both have at the same place, in percent."""
        return 100.0 * self.same_tokens / self.tokens


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Answers to all prompts.

    Attributes:
        reference: What is held to be right: a cache string or a directory.
        candidate: What is compared with it.
        prompts: One by one.
    """

    reference: str
    candidate: str
    prompts: tuple[PromptAgreement, ...]

    @property
    def agreement_percent(self) -> float:
        """Tokens that both have at the same place, of all prompts, in percent."""
        same = sum(one.same_tokens for one in self.prompts)
        return 100.0 * same / sum(one.tokens for one in self.prompts)

    @property
    def first_divergence(self) -> int | None:
        """The earliest place at which two answers differ; None = nowhere."""
        found = (one.first_divergence for one in self.prompts)
        return min((place for place in found if place is not None), default=None)

    @property
    def kl(self) -> float:
        """Mean over all places, nats."""
        total = sum(one.kl * one.places for one in self.prompts)
        return total / sum(one.places for one in self.prompts)

    @property
    def same_top_percent(self) -> float:
        """Places where both find the same token most likely, in percent."""
        same = sum(one.same_top for one in self.prompts)
        return 100.0 * same / sum(one.places for one in self.prompts)

    @property
    def similarity(self) -> float | None:
        """Mean over the prompts; None = not measured."""
        found = [one.similarity for one in self.prompts if one.similarity is not None]
        return float(np.mean(found)) if found else None

    def to_dict(self) -> dict[str, Any]:
        """All of it as data."""
        overall = {
            name: getattr(self, name)
            for name in (
                *("agreement_percent", "first_divergence"),
                *("kl", "same_top_percent", "similarity"),
            )
        }
        return {**dataclasses.asdict(self), "overall": overall}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is asked of an `Agreement`; None = nothing.

    Args:
        min_agreement: Least `Agreement.agreement_percent`.
        min_first_divergence: No answer may differ before this place.
        max_kl: Most mean KL, nats.
        min_similarity: Least mean similarity.

    Raises:
        ConfigError: A limit is out of range.
    """

    min_agreement: float | None = None
    min_first_divergence: int | None = None
    max_kl: float | None = None
    min_similarity: float | None = None

    def __post_init__(self) -> None:
        ranges = {
            "min_agreement": (0, 100),
            "min_first_divergence": (0, float("inf")),
            "max_kl": (0, float("inf")),
            "min_similarity": (-1, 1),
        }
        for name, (least, most) in ranges.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(
                    f"`{name}` must be from {least} to {most}. Received: {name}={value}."
                )

    def broken(self, found: Agreement) -> list[str]:
        """What does not hold, a sentence each; a figure that is no number holds nothing.

        Raises:
            ConfigError: A similarity is asked for that was not measured.
        """
        place = found.first_divergence
        where = float("inf") if place is None else place
        checks = [
            ("agreement", self.min_agreement, found.agreement_percent, " %", True),
            ("first divergence", self.min_first_divergence, where, "", True),
            ("KL", self.max_kl, found.kl, " nats", False),
        ]
        if self.min_similarity is not None:
            if found.similarity is None:
                raise ConfigError("`min_similarity` needs similarities, which were not measured.")
            checks.append(("similarity", self.min_similarity, found.similarity, "", True))
        return [
            f"{name} is {value:.4g}{unit}, expected {'at least' if least else 'at most'} "
            f"{limit:.4g}{unit}"
            for name, limit, value, unit, least in checks
            if limit is not None and not (value >= limit if least else value <= limit)
        ]


def compare_answers(
    prompt: str,
    answers: tuple[Sequence[int], Sequence[int]],
    texts: tuple[str, str],
    kl: np.ndarray,
    same_top: np.ndarray,
    similarity: Callable[[str, str], float] | None,
) -> PromptAgreement:
    """Sums two answers up.

    Args:
        prompt: What was asked.
        answers: Tokens of the reference and of the candidate, at least one each.
        texts: Of the two.
        kl: float ``[M]``, at each place of the reference's answer.
        same_top: bool ``[M]``.
        similarity: Compares two texts; None = they are not compared.
    """
    reference, candidate = answers
    tokens = max(map(len, answers))
    same = [one == other for one, other in zip(reference, candidate, strict=False)]
    same += [False] * (tokens - len(same))
    return PromptAgreement(
        prompt,
        *texts,
        tokens=tokens,
        same_tokens=sum(same),
        first_divergence=None if all(same) else same.index(False),
        kl=float(np.mean(kl)),
        kl_max=float(np.max(kl)),
        places=len(kl),
        same_top=int(np.sum(same_top)),
        similarity=similarity(*texts) if similarity else None,
    )

"""What the driver and a child say to each other: one job in, JSON lines out.

Standard library only: every peer's environment imports it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, Self


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run at once.

    Args:
        prompts: Token ids of each row, as many in each.
        warm_up: Other texts of the same shape: nothing that was kept of them helps.
    """

    prompts: list[list[int]]
    warm_up: list[list[int]]

    @property
    def rows(self) -> int:
        """Rows of the batch, or sessions of a server."""
        return len(self.prompts)

    @property
    def context(self) -> int:
        """Tokens of each prompt."""
        return len(self.prompts[0])


@dataclasses.dataclass(frozen=True)
class Job:
    """What a child is to do: load, run the cases one after another, end.

    Args:
        weights: Path of the model, in the form that the system reads.
        settings: Of the system, see `benchmarks.peers.table`.
        threads: Threads that compute.
        steps: Tokens decoded in each row, after the one that the prompt ends with.
        cases: See `Case`.
    """

    weights: str
    settings: Mapping[str, Any]
    threads: int
    steps: int
    cases: list[Case]

    @property
    def longest(self) -> int:
        """Most tokens that a row of any case comes to."""
        return max(case.context for case in self.cases) + self.steps + 1

    @property
    def most_rows(self) -> int:
        """Rows of the largest case."""
        return max(case.rows for case in self.cases)

    @classmethod
    def read(cls, text: str) -> Self:
        """A job of its JSON."""
        data = json.loads(text)
        return cls(**{**data, "cases": [Case(**case) for case in data["cases"]]})

    def write(self) -> str:
        """Its JSON, on one line."""
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Timing:
    """How long a case took.

    Args:
        prefill_seconds: From the prompts to the first token of every row.
        decode_seconds: What the tokens after those took.
        decode_tokens: How many they are, over all rows.
        prefill_tokens: Tokens read in that time, over all rows.
        tokens: What each row said, greedily; its first token included.
    """

    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int
    prefill_tokens: int
    tokens: list[list[int]]


@dataclasses.dataclass(frozen=True)
class CaseAnswer:
    """What came of a case.

    Args:
        context: See `Case`.
        rows: See `Case`.
        timing: None where it was not run.
        warm_up_seconds: Of the first run of this shape: compiling, for those who do.
        reason: Why it was not run.
    """

    context: int
    rows: int
    timing: Timing | None = None
    warm_up_seconds: float = 0.0
    reason: str = ""


@dataclasses.dataclass
class Answers:
    """Everything a child said.

    Attributes:
        load_seconds: Until the first case could start, imports included.
        about: Versions, and settings that are not those of the table.
        cases: As far as it came.
        peak_mb: Most memory its process had resident, MB (10^6 bytes).
    """

    load_seconds: float = 0.0
    about: dict[str, str] = dataclasses.field(default_factory=dict)
    cases: list[CaseAnswer] = dataclasses.field(default_factory=list)
    peak_mb: float = 0.0

    @classmethod
    def read(cls, lines: Iterable[str]) -> Self:
        """Answers of JSON lines; those of a child that ended early as far as they go.

        Raises:
            ValueError: A line is not one of an answer.
        """
        found = cls()
        for line in lines:
            try:
                data = json.loads(line)
                kind = data.pop("kind")
                if kind == "loaded":
                    found.load_seconds, found.about = data["seconds"], data["about"]
                elif kind == "case":
                    timing = data.pop("timing")
                    found.cases.append(CaseAnswer(timing=timing and Timing(**timing), **data))
                elif kind == "end":
                    found.peak_mb = data["peak_mb"]
                else:
                    raise KeyError(kind)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"A child answers with lines of JSON of kind loaded, case or end. "
                    f"Received: {line.rstrip()[:200]!r}."
                ) from error
        return found

"""Prefill and decode rates of several systems on the same weights, in turn, each in a process
of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.peers.environments import Absent, variables
from benchmarks.peers.protocol import Answers, Case, CaseAnswer
from benchmarks.peers.run import Prepared
from benchmarks.peers.table import OWN, REFERENCE, ROOT, SYSTEMS, System
from benchmarks.peers.weights import path_of
from benchmarks.registry import Say

#: Tokens decoded in each row, after the first.
STEPS = 32
#: Most seconds that one process may take for its cases.
LIMIT = 1800.0

_OPEN = "import json; from benchmarks import machine; print(json.dumps(machine.limits()))"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a token of the model costs, and the text that is read.

    Args:
        weight_bytes: In float32.
        cache_bytes_per_token: In float32.
        flop_per_token: Of all matrices but the output matrix, which a prefill needs once.
        flop_per_token_and_position: Of attention, for each position that a token looks at.
        text: Token ids of real text.
    """

    weight_bytes: int
    cache_bytes_per_token: int
    flop_per_token: int
    flop_per_token_and_position: int
    text: list[int]

    def decode_limit(self, system: System, context: int, rows: int, bandwidth: float) -> float:
        """Tokens a second, if a step did nothing but read weights once and each row's cache.

        Args:
            system: Its bits of a weight and of a number in the cache count.
            context: Tokens that each row holds.
            rows: Rows of a step.
            bandwidth: Bytes a second.
        """
        weights = self.weight_bytes * system.weight_bits / 32
        cache = self.cache_bytes_per_token * system.cache_bits / 32 * context * rows
        return rows * bandwidth / (weights + cache)

    def prefill_limit(self, context: int, gemm: float) -> float:
        """Tokens a second, if a prompt took its multiplications alone.

        Args:
            context: Tokens of the prompt; one looks at half of them.
            gemm: FLOP a second.
        """
        return gemm / (self.flop_per_token + self.flop_per_token_and_position * context / 2)


def read_facts(say: Say) -> Facts:
    """See `Facts`."""
    return Facts(**json.loads(path_of("facts", say).read_text(encoding="utf-8")))


@dataclasses.dataclass
class Run:
    """What the rounds of one case came to; rates in tokens a second over all rows.

    Attributes:
        agreed: Tokens that are those of `REFERENCE`, up to the first difference of each row.
        compared: Tokens looked at.
        reason: Why it was not run.
    """

    system: str
    context: int
    rows: int
    decode: list[float] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)
    warm_up_seconds: list[float] = dataclasses.field(default_factory=list)
    agreed: int = 0
    compared: int = 0
    reason: str = ""

    def add(self, answer: CaseAnswer, reference: CaseAnswer | None) -> None:
        """Adds a round."""
        if answer.timing is None:
            self.reason = answer.reason
            return
        timing = answer.timing
        # A difference of two times, where it is one, may drown in noise.
        if timing.decode_seconds > 0:
            self.decode.append(timing.decode_tokens / timing.decode_seconds)
        self.prefill.append(timing.prefill_tokens / timing.prefill_seconds)
        self.warm_up_seconds.append(answer.warm_up_seconds)
        if reference is not None and reference.timing is not None:
            for mine, other in zip(timing.tokens, reference.timing.tokens, strict=True):
                self.agreed += agreement(mine, other)
                self.compared += min(len(mine), len(other))

    def median(self, phase: str) -> float | None:
        """Of ``decode`` or ``prefill``; None where it was not run."""
        rates = self.decode if phase == "decode" else self.prefill
        return statistics.median(rates) if rates else None


@dataclasses.dataclass
class Process:
    """What a system's processes took, one a round."""

    about: dict[str, str] = dataclasses.field(default_factory=dict)
    load_seconds: list[float] = dataclasses.field(default_factory=list)
    peak_mb: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Comparison:
    """All of it.

    Attributes:
        machine: ``read_gb_per_s`` and ``gemm_gflop_per_s``, one value a round.
        threads: That computed.
        beside: Load of the machine before each round, without ours.
        runs: By system, context and rows.
        processes: By system.
        absent: System to why it is not there.
    """

    facts: Facts
    threads: int
    machine: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    beside: list[float] = dataclasses.field(default_factory=list)
    runs: dict[tuple[str, int, int], Run] = dataclasses.field(default_factory=dict)
    processes: dict[str, Process] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)

    def limit(self, name: str) -> float:
        """A limit of the machine, the best of its measurements."""
        return max(self.machine[name])

    def share(self, run: Run, phase: str) -> float | None:
        """Of the machine's limit: read bandwidth for decode, GEMM rate for prefill."""
        rate = run.median(phase)
        if rate is None:
            return None
        if phase == "prefill":
            gemm = self.limit("gemm_gflop_per_s") * 1e9
            return rate / self.facts.prefill_limit(run.context, gemm)
        bandwidth = self.limit("read_gb_per_s") * 1e9
        # Half of the decoded tokens are there on average.
        held = run.context + STEPS // 2
        return rate / self.facts.decode_limit(SYSTEMS[run.system], held, run.rows, bandwidth)

    def rate(self, system: str, context: int, rows: int = 1, phase: str = "decode") -> float:
        """A median rate.

        Raises:
            Absent: It was not measured.
        """
        run = self.runs.get((system, context, rows))
        rate = run.median(phase) if run else None
        if rate is None:
            raise Absent(f"{system}: {self.absent.get(system) or (run and run.reason)}")
        return rate

    def add(self, name: str, answers: Answers, reference: Answers | None) -> None:
        """Adds what a process said."""
        process = self.processes.setdefault(name, Process())
        process.about = answers.about
        process.load_seconds.append(answers.load_seconds)
        process.peak_mb.append(answers.peak_mb)
        others = reference.cases if reference else [None] * len(answers.cases)
        for answer, other in zip(answers.cases, others, strict=True):
            key = (name, answer.context, answer.rows)
            self.runs.setdefault(key, Run(*key)).add(answer, other)

    def to_dict(self) -> dict[str, Any]:
        """As data, with medians and shares."""
        runs = [
            {
                **dataclasses.asdict(run),
                **{f"{phase}_median": run.median(phase) for phase in ("decode", "prefill")},
                **{f"{phase}_share": self.share(run, phase) for phase in ("decode", "prefill")},
                "server": SYSTEMS[run.system].server,
            }
            for run in self.runs.values()
        ]
        return {
            "machine": self.machine,
            "threads": self.threads,
            "load_before_rounds": self.beside,
            "runs": runs,
            "processes": {n: dataclasses.asdict(p) for n, p in self.processes.items()},
            "absent": self.absent,
        }


def agreement(mine: Sequence[int], other: Sequence[int]) -> int:
    """Tokens up to the first that differs."""
    pairs = zip(mine, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(other)))


def compare(
    names: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    rounds: int,
    threads: int,
    say: Say,
    after_round: Callable[[Comparison], object] = lambda found: None,
) -> Comparison:
    """Every system in every round, one at a time.

    Args:
        names: Keys of `SYSTEMS`.
        shapes: Context and rows of each case. A server takes its rows from as many callers.
        rounds: How often; a process of its own each time.
        threads: That compute; see `benchmarks.peers.run.cores`.
        say: Told how far it is.
        after_round: Given what there is so far.
    """
    known = read_facts(say)
    found = Comparison(known, threads)
    prepared: dict[str, Prepared] = {}
    for name in names:
        try:
            prepared[name] = Prepared(name, SYSTEMS[name], say)
        except Absent as error:
            say(f"{name} is absent: {error}")
            found.absent[name] = str(error)
    text = _pieces(known.text)
    for turn in range(rounds):
        found.beside.append(os.getloadavg()[0])
        for limit, value in _limits(threads).items():
            found.machine.setdefault(limit, []).append(value)
        cases = [cases_of(text, *shape) for shape in shapes]
        reference: Answers | None = None
        for name, system in list(prepared.items()):
            say(f"round {turn + 1} of {rounds}: {name}")
            try:
                answers = system.run(cases, STEPS, threads, LIMIT)
            except Absent as error:
                say(f"{name} is absent: {error}")
                found.absent[name] = str(error)
                del prepared[name]
                continue
            reference = answers if name == REFERENCE else reference
            found.add(name, answers, reference)
        after_round(found)
    return found


def _pieces(text: Sequence[int]) -> Iterator[int]:
    while True:
        yield from text


def cases_of(text: Iterator[int], context: int, rows: int) -> Case:
    """A case of the next tokens of a text, no two rows alike: a prefix cache finds nothing."""

    def take() -> list[list[int]]:
        return [[next(text) for _ in range(context)] for _ in range(rows)]

    return Case(take(), take())


def _limits(threads: int) -> dict[str, float]:
    command = [sys.executable, "-c", _OPEN]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables(OWN, threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        text=True,
    )
    limits: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return limits

"""The process of a system: reads a job from standard input, writes answers to standard output.

Standard library only: every peer's environment imports it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.peers.protocol import CaseAnswer, Job, Timing

_WARM_UP_TOKENS, _WARM_UP_STEPS = 64, 4


class NotRun(Exception):
    """Raised by `System.run` for a case it cannot run; its text says why."""


class System(Protocol):
    """Something that is timed.

    Attributes:
        about: Versions, and settings that are not those of the table.
        compiles: Whether each shape is compiled when it is first run. Others warm up with a
            short text, once.
        pid: Process whose memory counts.
    """

    about: dict[str, str]
    compiles: bool
    pid: int | str

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """Prefills the prompts, then decodes so many tokens in each row.

        Raises:
            NotRun: The case is beyond it.
        """


def serve(open_system: Callable[[Job], contextlib.AbstractContextManager[System]]) -> None:
    """Runs the job on standard input.

    Args:
        open_system: Loads it.
    """
    begin = time.perf_counter()
    # Libraries print to standard output as they like: only answers get there.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def say(kind: str, **data: Any) -> None:
            print(json.dumps({"kind": kind, **data}), file=out, flush=True)

        job = Job.read(sys.stdin.read())
        with open_system(job) as system:
            say("loaded", seconds=time.perf_counter() - begin, about=system.about)
            warm = False
            for case in job.cases:
                answer = _run(system, case.prompts, [] if warm else case.warm_up, job.steps)
                warm = not system.compiles
                say("case", **dataclasses.asdict(answer))
            say("end", peak_mb=peak_mb(system.pid))


def _run(
    system: System, prompts: list[list[int]], warm_up: list[list[int]], steps: int
) -> CaseAnswer:
    shape = len(prompts[0]), len(prompts)
    seconds = 0.0
    try:
        if warm_up:
            start = time.perf_counter()
            if system.compiles:
                system.run(warm_up, steps)
            else:
                system.run([row[:_WARM_UP_TOKENS] for row in warm_up], _WARM_UP_STEPS)
            seconds = time.perf_counter() - start
        return CaseAnswer(*shape, system.run(prompts, steps), seconds)
    except NotRun as error:
        return CaseAnswer(*shape, reason=str(error))


def peak_mb(pid: int | str = "self") -> float:
    """Most memory that a process had resident, MB (10^6 bytes).

    The kernel's mark of the process's own memory: what `resource.getrusage` says is inherited
    from the parent.
    """
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/status does not say VmHWM: this needs Linux.")

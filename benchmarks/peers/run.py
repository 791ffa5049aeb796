"""Runs one system in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import IO

from benchmarks.peers.environments import Absent, last_error, python_of, variables
from benchmarks.peers.protocol import Answers, Case, Job
from benchmarks.peers.table import BUILD, ROOT, System
from benchmarks.peers.weights import path_of
from benchmarks.registry import Say


class Prepared:
    """A system whose environment and weights are there.

    Args:
        name: Key of `benchmarks.peers.table.SYSTEMS`.
        system: Of that name.
        say: Told what takes a while.

    Raises:
        Absent: One of the two cannot be had.
    """

    def __init__(self, name: str, system: System, say: Say) -> None:
        self.name = name
        self.system = system
        self._python = python_of(system.environment, say)
        self._weights = path_of(system.weights, say)

    def run(self, cases: list[Case], steps: int, threads: int, seconds: float) -> Answers:
        """Starts it, has it run the cases, and waits for its end.

        Args:
            cases: See `Case`.
            steps: See `Job`.
            threads: See `Job`; the process inherits the cores of this one.
            seconds: Most that all of it may take.

        Raises:
            Absent: It failed, or took too long; what it said until then is lost.
        """
        job = Job(str(self._weights), self.system.settings, threads, steps, cases)
        command = [str(self._python), "-m", f"benchmarks.peers.{self.system.module}"]
        log = BUILD / "logs" / f"{self.name.replace(' ', '-').replace(',', '')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            out, code = _communicate(
                command, job.write(), variables(self.system.environment, threads), errors, seconds
            )
        if code is None:
            raise Absent(f"not done within {seconds:.0f} s")
        if code:
            reason = last_error(log.read_text(encoding="utf-8", errors="replace"))
            raise Absent(f"exit code {code}: {reason}")
        return Answers.read(out.splitlines())


def _communicate(
    command: list[str], given: str, environment: dict[str, str], errors: IO[str], seconds: float
) -> tuple[str, int | None]:
    """What a command writes to standard output, and its exit code; None if it took too long."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        # A server that it started ends with it.
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(given, timeout=seconds)
            return out, process.returncode
        except subprocess.TimeoutExpired:
            return "", None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def cores(threads: int) -> int:
    """Keeps this process, and those that it starts, on so many cores.

    Returns:
        The cores that are there, if those are fewer.
    """
    mine = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, mine)
    return len(mine)

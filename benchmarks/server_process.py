"""An embedded server in a process of its own."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

_READY = re.compile(r"^Serving \S+: gRPC (?P<target>\S+?)(,|$)")
_SHUTDOWN_SECONDS = 60


class ServerProcess:
    """Runs ``tfkv serve`` on a free port, as a context manager.

    Args:
        directory: Model directory.
        environment: Variables on top of this process's own.

    Attributes:
        target: gRPC address, once entered.
        load_seconds: From the start of the process until it answered.

    Raises:
        RuntimeError: It ended before it answered; the message holds its last lines.
    """

    def __init__(
        self, directory: pathlib.Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = [sys.executable, "-m", "tfkv", "serve", str(directory)]
        self._command += ["--port", "0", "--rest-port", "-1"]
        self._environment = {**os.environ, **(environment or {})}
        self.target = ""
        self.load_seconds = 0.0

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        start = time.perf_counter()
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
        )
        try:
            self.target = self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.load_seconds = time.perf_counter() - start
        return self

    def _wait(self) -> str:
        for line in self._process.stdout or ():
            if match := _READY.match(line):
                return match["target"]
        code = self._process.wait()
        raise RuntimeError(f"The server ended with exit code {code}:\n{self.log()[-4000:]}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()

    def log(self) -> str:
        """What it wrote to standard error so far."""
        return pathlib.Path(f"/proc/self/fd/{self._log.fileno()}").read_text(errors="replace")

    def resident_mb(self) -> float:
        """Resident size in MB (10^6 bytes)."""
        return resident_mb(self._process.pid)


def resident_mb(pid: int | str = "self") -> float:
    """Resident size of a process in MB (10^6 bytes)."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/status does not say VmRSS: this needs Linux.")


def import_baseline_mb() -> float:
    """Resident size of a process that has imported what the server does, and no more."""
    code = (
        "from tfkv import terminal; terminal.load_tensorflow(); import tfkv.serving.server\n"
        "from benchmarks.server_process import resident_mb; print(resident_mb())"
    )
    root = pathlib.Path(__file__).resolve().parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root
    )
    return float(result.stdout.split()[-1])

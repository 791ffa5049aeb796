"""The embedded server in a process of its own."""

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
from typing import IO, Self

from tfkv.errors import ServerError

_READY = re.compile(r"^Serving \S+: gRPC (?P<target>\S+?)(,|$)")
_SHUTDOWN_SECONDS = 60


class ServerProcess:
    """Runs ``tfkv serve`` as a context manager: for demonstrations, notebooks and measurements.

    It listens on loopback, on a free port that it keeps when it is started again, as a server
    behind one address would.

    Args:
        directory: Model directory.
        environment: Variables on top of this process's own.
        show_log: Whether its log goes to this process's standard error; otherwise it is kept,
            see `log`.
        rest: Whether it answers REST, too, on another free port.

    Attributes:
        target: gRPC address, once started.
        load_seconds: From the start of the process until it answered.
        said: The line in which it said where it listens.

    Raises:
        ServerError: It ended before it answered, or not with exit code 0 when it was stopped.

    Example:
        >>> with ServerProcess("artifacts/smollm2") as server:  # doctest: +SKIP
        ...     client = Client(server.target, artifact="artifacts/smollm2")
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        environment: Mapping[str, str] | None = None,
        show_log: bool = False,
        rest: bool = False,
    ) -> None:
        self.target = self.said = ""
        self.load_seconds = 0.0
        self._directory = pathlib.Path(directory)
        self._environment = {**os.environ, **(environment or {})}
        self._keep_log = not show_log
        self._log: IO[str] | None = None
        self._logged = ""
        self._rest = rest
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Starts it, and waits until it answers."""
        begin = time.perf_counter()
        port = self.target.rpartition(":")[2] or "0"
        if self._keep_log:
            self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            _command(self._directory, port, self._rest),
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
        )
        try:
            self.said = self._wait(self._process)
        except BaseException:
            self.kill()
            raise
        self.load_seconds = time.perf_counter() - begin
        return self

    def _wait(self, process: subprocess.Popen[str]) -> str:
        for line in process.stdout or ():
            if match := _READY.match(line):
                self.target = match["target"]
                return line.rstrip()
        log = f":\n{self.log()[-4000:]}" if self._log else "; see its messages above."
        raise ServerError(
            f"The server ended with exit code {process.wait()} before it answered{log}"
        )

    @property
    def pid(self) -> int:
        """Of the process.

        Raises:
            ServerError: It was not started.
        """
        if self._process is None:
            raise ServerError("The server does not run. Call `start` first.")
        return self._process.pid

    def stop(self) -> None:
        """Ends it as an orchestrator would; one that was killed stays so."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.send_signal(signal.SIGTERM)
            code = process.wait(_SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ServerError(
                f"The server did not end within {_SHUTDOWN_SECONDS} s of SIGTERM; killed it."
            ) from error
        finally:
            self._end(process)
        if code != 0:
            raise ServerError(f"The server ended with exit code {code} after SIGTERM; expected 0.")

    def kill(self) -> None:
        """Ends it as a power cut would: with all sessions."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()
        if self._log is not None:
            self._logged = self.log()
            self._log.close()
            self._log = None

    def log(self) -> str:
        """What it wrote to standard error so far, where that is kept."""
        if self._log is None:
            return self._logged
        path = pathlib.Path(f"/proc/self/fd/{self._log.fileno()}")
        return self._logged + path.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.stop()
        else:
            self.kill()


def _command(directory: pathlib.Path, port: str, rest: bool) -> list[str]:
    ports = ["--port", port, "--rest-port", "0" if rest else "-1"]
    return [sys.executable, "-m", "tfkv", "serve", str(directory), *ports]

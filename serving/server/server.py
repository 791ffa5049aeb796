"""The embedded server: one model directory, on gRPC and REST."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from tfkv.errors import ServerError
from tfkv.serving.server.batching_parameters import BatchingParameters
from tfkv.serving.server.call_error import CallError
from tfkv.serving.server.data_plane import DataPlane
from tfkv.serving.server.grpc_face import GrpcFace
from tfkv.serving.server.memory import trim_memory, use_huge_pages
from tfkv.serving.server.metrics import Metrics
from tfkv.serving.server.rest_face import RestFace
from tfkv.serving.server.servable import Servable
from tfkv.serving.server.servable_manager import ServableManager
from tfkv.serving.server.session_options import SessionOptions
from tfkv.serving.server.warmup import read_warmup, replay_warmup
from tfkv.serving.server.xla import set_xla_compilation

_LOG = logging.getLogger(__name__)

#: Called with the stage (``load`` or ``warmup``), steps done and steps in all.
Progress = Callable[[str, int, int], None]


def _no_progress(stage: str, done: int, total: int) -> None:
    del stage, done, total


class Server:
    """Serves an artifact as stock TensorFlow Serving does, without Docker.

    For laptops, tests and CI; a client can't tell the two apart. Choose the stock
    TensorFlow Serving image for production.

    Args:
        model_dir: Directory of version directories, or one version directory.
        name: Model name clients ask for.
        host: Address to listen on; loopback unless told otherwise.
        port: gRPC port, 0 = a free one.
        rest_port: REST port, 0 = a free one, None = no REST.
        grpc_max_threads: As TensorFlow Serving's flag: one less is the number of calls
            that run at once, and the next one fails with RESOURCE_EXHAUSTED. 0 = 4 a CPU.
        poll_seconds: Seconds between two looks for new versions, 0 = never.
        batching: Emulate ``--enable_batching`` with these parameters; a test mode.
        progress: Called while a version loads and warms up; by the polling thread for a
            version that appears later.
        session: Threads of the TensorFlow session.
        xla_cpu_compilation_enabled: False refuses XLA compilation as stock TensorFlow
            Serving does without that flag; for the whole process.
        rest_timeout_seconds: Seconds after which the run of a REST call is cancelled.

    Raises:
        ServerError: A port is taken, or the newest version cannot be served.

    Example:
        >>> with Server("artifacts/smollm2", port=0, rest_port=0) as server:
        ...     print(server.target)
    """

    def __init__(
        self,
        model_dir: str | pathlib.Path,
        name: str = "tfkv",
        host: str = "127.0.0.1",
        port: int = 8500,
        rest_port: int | None = 8501,
        grpc_max_threads: int = 0,
        poll_seconds: float = 1.0,
        batching: BatchingParameters | None = None,
        progress: Progress | None = None,
        session: SessionOptions | None = None,
        xla_cpu_compilation_enabled: bool = True,
        rest_timeout_seconds: float = 30.0,
    ) -> None:
        self.name = name
        self.host = host
        self.metrics = Metrics()
        self._progress = progress or _no_progress
        self._batching = batching
        self._session = session
        self._xla = xla_cpu_compilation_enabled
        self._wanted_ports = (port, rest_port)
        self._threads = grpc_max_threads or 4 * (os.cpu_count() or 1)
        self._rest_timeout = rest_timeout_seconds
        self._manager = ServableManager(
            name, pathlib.Path(model_dir), self._load, self._warm_up, poll_seconds
        )
        self._grpc: GrpcFace | None = None
        self._rest: RestFace | None = None
        self._stopped = threading.Event()

    @property
    def port(self) -> int:
        """gRPC port in use; the wanted one before `start`."""
        return self._grpc.port if self._grpc else self._wanted_ports[0]

    @property
    def rest_port(self) -> int | None:
        """REST port in use; the wanted one before `start`."""
        return self._rest.port if self._rest else self._wanted_ports[1]

    @property
    def target(self) -> str:
        """gRPC address, as clients take it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def start(self) -> Self:
        """Loads and warms up the newest version, then binds the ports and begins to answer."""
        port, rest_port = self._wanted_ports
        # Loading can take a minute: find a taken port before. The ports are bound after it,
        # so that a client is refused meanwhile instead of hanging.
        for wanted in (port, rest_port):
            if wanted:
                _check_free(self.host, wanted)
        set_xla_compilation(self._xla)
        plane = DataPlane(self._manager, self.metrics)
        try:
            self._manager.start()
            self._grpc = GrpcFace(plane, self.host, port, self._threads)
            if rest_port is not None:
                self._rest = RestFace(plane, self.host, rest_port, self._rest_timeout)
        except CallError as error:
            self.stop(0)
            raise ServerError(f"Failed to start server. Error: {error}") from error
        except BaseException:
            self.stop(0)
            raise
        self._grpc.start()
        if self._rest is not None:
            self._rest.start()
        _LOG.info("gRPC on %s, REST on port %s", self.target, self.rest_port)
        return self

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until `stop` has finished; False when the timeout passed first."""
        return self._stopped.wait(timeout)

    def stop(self, grace: float = 10.0) -> None:
        """Refuses new calls, lets those under way finish, then unloads. Safe to repeat.

        Args:
            grace: Seconds the calls under way get before the answer is given up.
        """
        deadline = time.monotonic() + grace
        rest = threading.Thread(target=self._rest.stop, args=(grace,)) if self._rest else None
        if rest is not None:
            rest.start()
        if self._grpc is not None:
            self._grpc.stop(grace)
        if rest is not None:
            rest.join()
        self._manager.close(max(0.1, deadline - time.monotonic()))
        self._stopped.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _load(self, version: int, path: pathlib.Path) -> Servable:
        self._progress("load", 0, 1)
        servable = Servable(
            self.name,
            version,
            path,
            self._session,
            self._batching,
            lambda micros: self.metrics.runtime_latency(self.name, micros),
        )
        use_huge_pages()
        self._progress("load", 1, 1)
        return servable

    def _warm_up(self, servable: Servable) -> None:
        logs = read_warmup(servable.path)
        replay_warmup(servable, logs, lambda done, total: self._progress("warmup", done, total))
        trim_memory()


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"Cannot listen on {host}:{port}: {error}. Choose another port, or 0 for a "
                "free one."
            ) from error


def run(
    server: Server, grace: float = 30.0, on_ready: Callable[[Server], None] | None = None
) -> None:
    """Runs a server until SIGTERM or SIGINT, then drains it. A second signal kills.

    Call it from the main thread. A signal that comes before the server answers ends the
    process with SystemExit, since there is nothing to drain.

    Args:
        server: Server that is not started.
        grace: Seconds the calls under way get after the signal.
        on_ready: Called once the server answers.

    Raises:
        ServerError: The server did not start.
    """
    asked = threading.Event()
    answering = False

    def ask(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_DFL)
        if not answering:
            raise SystemExit(128 + number)
        asked.set()

    previous = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.start()
        answering = True
        if on_ready is not None:
            on_ready(server)
        asked.wait()
        _LOG.info("Signal received: draining for up to %g s", grace)
        server.stop(grace)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

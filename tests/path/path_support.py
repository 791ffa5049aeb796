"""What the tests of the whole path share: a server, a proxy that loses replies, near ties."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfkv.errors import Status
from tfkv.serving import Client

#: Two logits nearer than this may change places through rounding alone.
NEAR_TIE = 1e-4
NEW_TOKENS = 64

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = (
    _CHAT.format("What is the capital of France?"),
    _CHAT.format("Name three animals that live in the sea."),
    _CHAT.format("Write a haiku about autumn leaves."),
    _CHAT.format("How many days are there in a leap year, and why?"),
    _CHAT.format("Translate 'good morning' into Spanish."),
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "It was the best of times, it was the worst of times, it was the age of wisdom,",
    "Dear Sir or Madam,\n\nI am writing to complain about",
)


@dataclasses.dataclass
class Reference:
    """What keras-nlp's own `generate` gave, and the logits its model gives for that text.

    Args:
        tokens: New tokens of each prompt.
        logits: float32 ``[T, V]`` of each prompt and its answer; row t follows token t.
    """

    tokens: list[list[int]]
    logits: list[np.ndarray]


def assert_same_tokens(
    tokens: Sequence[int],
    expected: Sequence[int],
    logits: np.ndarray,
    what: str = "",
    near_tie: float = NEAR_TIE,
) -> None:
    """Fails unless the tokens are the expected ones up to the reference's first near tie.

    Args:
        tokens: What is tested.
        expected: What the reference sampled.
        logits: float32 ``[T, V]`` of the reference; the last rows are those that `expected`
            was sampled from, the very last one stands behind it.
        what: Names the case.
        near_tie: Gap of the two best logits at which either may be chosen.
    """
    assert len(tokens) == len(expected), what
    rows = logits[-len(expected) - 1 : -1]
    for step, (token, other, row) in enumerate(zip(tokens, expected, rows, strict=True)):
        if token != other:
            best = np.sort(row)[-2:]
            gap = float(best[1] - best[0])
            assert gap <= near_tie, f"{what}: token {step} is {token}, not {other}; gap {gap:.1e}"
            return  # both continuations are right


def one(client: Client, signature: str, **row: Any) -> Mapping[str, Any]:
    """The answer to a call of one row, which must be OK."""
    answer = client.call(signature, [row])[0]
    assert answer["status"] == Status.OK, (Status(answer["status"]), answer["detail"])
    return answer


def greedy(client: Client, prompt: Sequence[int], new: int = NEW_TOKENS) -> list[int]:
    """`new` tokens after a prompt, whatever they are."""
    return client.generate(prompt, new, stop_tokens=(), stream=False).result.tokens


class ServerProcess:
    """`tfkv serve` as a process of its own, on ports that stay through a restart."""

    def __init__(self, model_dir: pathlib.Path) -> None:
        self.model_dir = model_dir
        self.port, self.rest_port = _free_port(), _free_port()
        self.target = f"127.0.0.1:{self.port}"
        self.url = f"http://127.0.0.1:{self.rest_port}/v1/models/tfkv"
        self.seconds_to_ready = 0.0
        self.memory_when_ready: dict[str, int] = {}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> ServerProcess:
        begin = time.monotonic()
        ports = ["--port", str(self.port), "--rest-port", str(self.rest_port)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tfkv", "serve", str(self.model_dir), *ports),
                *("--grpc-max-threads", "32"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        _wait_for_line(self._process, r"^Serving tfkv: gRPC ", timeout=240)
        self.seconds_to_ready = time.monotonic() - begin
        self.memory_when_ready = self.memory()
        return self

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def stop(self) -> int:
        """Ends it as an orchestrator would. Returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.stdout.close()
        return code

    def memory(self) -> dict[str, int]:
        """Bytes of the process by the names of /proc/<pid>/status."""
        status = pathlib.Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        sizes = re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)
        return {name: int(size) * 1024 for name, size in sizes}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for_line(process: subprocess.Popen[str], pattern: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            line = process.stdout.readline()
            if re.match(pattern, line):
                return
            if not line:
                raise RuntimeError(f"The server ended with exit code {process.wait()}.")
    process.kill()
    raise RuntimeError(f"The server did not answer within {timeout} s.")


class LossyProxy:
    """A TCP proxy that passes a call on and then cuts the line instead of its reply."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.losses = 0
        self._armed = threading.Event()
        self._sent_since = threading.Event()

    def __enter__(self) -> LossyProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def lose_next_reply(self) -> None:
        """Has the reply to the next message from a client get lost."""
        self._sent_since.clear()
        self._armed.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                return
            for one, other, reply in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pump, args=(one, other, reply), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, reply: bool) -> None:
        try:
            while data := one.recv(1 << 16):
                # A reply of some size: not the acknowledgement of a setting or a ping.
                due = self._armed.is_set() and self._sent_since.is_set()
                if reply and due and len(data) > 100:
                    self._armed.clear()
                    self.losses += 1
                    break
                if not reply and len(data) > 100:
                    self._sent_since.set()
                other.sendall(data)
        except OSError:
            pass
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

"""An exported artifact behind gRPC: sessions side by side, as callers have them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator

from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing
from tfkv._version import __version__
from tfkv.serving import Client, ServerProcess, Session


class Served:
    """``tfkv serve`` and its client.

    Args:
        server: Started.
        client: Connected to it.
    """

    #: The server does so while it loads: warm-up calls of every shape are in the artifact.
    compiles = False

    def __init__(self, server: ServerProcess, client: Client) -> None:
        self._client = client
        self.pid = server.pid
        self.about = {"tfkv": __version__, "server answers after (s)": f"{server.load_seconds:.1f}"}

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`; each row is a caller for itself, and the server makes batches."""
        rows = len(prompts)
        with contextlib.ExitStack() as stack:
            callers = stack.enter_context(concurrent.futures.ThreadPoolExecutor(rows))
            sessions = [stack.enter_context(self._client.session()) for _ in prompts]
            start = time.perf_counter()
            first = list(callers.map(_say, sessions, prompts, [1] * rows))
            middle = time.perf_counter()
            rest = list(callers.map(_say, sessions, [[]] * rows, [steps] * rows))
            end = time.perf_counter()
        tokens = [one + more for one, more in zip(first, rest, strict=True)]
        read = rows * len(prompts[0])
        return Timing(middle - start, end - middle, steps * rows, read, tokens)


def _say(session: Session, given: list[int], count: int) -> list[int]:
    answer = session.generate(given, count, stop_tokens=(), stream=False)
    return [int(token) for token in answer.result.tokens]


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[Served]:
    """Starts it."""
    with (
        ServerProcess(job.weights) as server,
        Client(server.target, artifact=job.weights) as client,
    ):
        yield Served(server, client)


if __name__ == "__main__":
    child.serve(open_system)

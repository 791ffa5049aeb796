"""llama.cpp's server: callers side by side, each on a slot of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing

_START_SECONDS = 120
_ANSWER_SECONDS = 900


class LlamaCppServer:
    """``llama-server`` on loopback.

    Args:
        job: Its setting ``cache`` is a type of llama.cpp.
    """

    compiles = False

    def __init__(self, job: Job) -> None:
        self._port = _free_port()
        self._process = subprocess.Popen(_command(job, self._port), stdout=subprocess.DEVNULL)
        self.pid = self._process.pid
        self.about = {"flash attention": "on", "slots": str(job.most_rows)}

    def wait(self) -> None:
        """Until it answers.

        Raises:
            RuntimeError: It ended, or did not answer in time.
        """
        for _ in range(10 * _START_SECONDS):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
                return
            time.sleep(0.1)
        raise RuntimeError(f"llama-server does not answer; exit code {self._process.poll()}.")

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`; each row is a caller with a connection of its own."""
        rows = len(prompts)
        with concurrent.futures.ThreadPoolExecutor(rows) as callers:
            start = time.perf_counter()
            first = list(callers.map(self._ask, prompts, range(rows), [1] * rows))
            middle = time.perf_counter()
            # The slot still holds the prompt: only what was said is new.
            texts = [prompt + said for prompt, said in zip(prompts, first, strict=True)]
            rest = list(callers.map(self._ask, texts, range(rows), [steps] * rows))
            end = time.perf_counter()
        tokens = [one + more for one, more in zip(first, rest, strict=True)]
        read = rows * len(prompts[0])
        return Timing(middle - start, end - middle, steps * rows, read, tokens)

    def _ask(self, text: list[int], slot: int, count: int) -> list[int]:
        body = {
            "prompt": text,
            "n_predict": count,
            "id_slot": slot,
            "cache_prompt": True,
            "temperature": 0,
            "top_k": 1,
            "ignore_eos": True,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            tokens: list[Any] = json.load(answer)["tokens"]
        if len(tokens) != count:
            raise RuntimeError(f"Asked for {count} tokens, received {len(tokens)}.")
        return tokens


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _command(job: Job, port: int) -> list[str]:
    rows = job.most_rows
    cache, threads = str(job.settings["cache"]), str(job.threads)
    binary = pathlib.Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "llama-server"
    # A slot's part of the context is a multiple of 256 tokens.
    context = str(rows * -(-job.longest // 256) * 256)
    return [
        *(str(binary), "--model", job.weights, "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads, "--threads-http", str(rows + 1)),
        *("--parallel", str(rows), "--ctx-size", context, "--n-gpu-layers", "0"),
        *("--cache-type-k", cache, "--cache-type-v", cache, "--flash-attn", "on"),
        # Nothing is kept of earlier callers but what their own slot holds.
        *("--slot-prompt-similarity", "0", "--cache-ram", "0", "--no-webui"),
    ]


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[LlamaCppServer]:
    """Starts it."""
    server = LlamaCppServer(job)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


if __name__ == "__main__":
    child.serve(open_system)

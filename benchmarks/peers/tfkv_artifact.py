"""An exported artifact in this process, a batch a call."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from benchmarks.engine import Artifact
from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing
from tfkv._version import __version__


class InProcess:
    """Loads an artifact as TensorFlow Serving does.

    Args:
        artifact: It.
    """

    #: The first call of each shape.
    compiles = True
    pid = "self"

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._serial = itertools.count()
        engine = artifact.engine
        self.about = {
            "tfkv": __version__,
            "tensorflow": tf.__version__,
            "weights": engine.weights,
            "cache": engine.cache,
        }

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`."""
        serial = next(self._serial)
        names = [f"{serial}-{row}" for row in range(len(prompts))]
        length, chunk = len(prompts[0]), self._artifact.engine.decode_chunk
        start = time.perf_counter()
        # One row a call: what a batch prefills is bounded, and rows past that come back.
        tokens = [self._prefill(*item) for item in zip(names, prompts, strict=True)]
        middle = time.perf_counter()
        for done in range(1, steps + 1, chunk):
            count = min(chunk, steps + 1 - done)
            answers = self._artifact.rows(
                [
                    {"session_id": name, "position": length + done, "max_new_tokens": count}
                    for name in names
                ]
            )
            for said, answer in zip(tokens, answers, strict=True):
                said += answer["tokens"][:count].tolist()
        end = time.perf_counter()
        self._artifact.close(names)
        rows = len(prompts)
        return Timing(middle - start, end - middle, steps * rows, rows * length, tokens)

    def _prefill(self, name: str, prompt: list[int]) -> list[int]:
        width = self._artifact.engine.prefill_tokens
        for first in range(0, len(prompt), width):
            piece = prompt[first : first + width]
            last = first + len(piece) == len(prompt)
            row: dict[str, Any] = {"session_id": name, "tokens": piece, "position": first}
            answer = self._artifact.rows([{**row, "max_new_tokens": int(last)}])[0]
            if answer["position"] != first + len(piece) + int(last):
                raise RuntimeError(f"The piece at {first} was not taken whole: {answer}.")
        return answer["tokens"][:1].tolist()


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[InProcess]:
    """Loads it."""
    with Artifact(pathlib.Path(job.weights)) as artifact:
        yield InProcess(artifact)


if __name__ == "__main__":
    child.serve(open_system)

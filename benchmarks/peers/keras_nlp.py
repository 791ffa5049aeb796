"""keras-nlp's ``generate``, compiled with XLA."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from collections.abc import Iterator

import numpy as np

from benchmarks import texts
from benchmarks.keras_nlp_peer import KerasNlpPeer, few_steps
from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing

#: Most bytes of attention scores in one layer's prefill.
_SCORES = 2e9


class KerasNlp:
    """See `KerasNlpPeer`."""

    compiles = True
    pid = "self"

    def __init__(self) -> None:
        self._peer = KerasNlpPeer(texts.model())
        self._heads = texts.model().config.num_query_heads
        self.about = {name: importlib.metadata.version(name) for name in ("keras-nlp", "keras")}

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`. It has one call for both phases: two lengths are timed, and what
        a step takes is the difference; the prefill reads the places of the answer, too.
        """
        rows, length = len(prompts), len(prompts[0])
        if rows * self._heads * length**2 * 4 > _SCORES:
            raise child.NotRun("the scores of one layer's prefill alone would take gigabytes")
        whole = length + steps + 1
        start = time.perf_counter()
        said = self._peer.generate(prompts, whole)
        seconds = [time.perf_counter() - start]
        # The same compiled call, with all of the answer but some of its steps given.
        for new in (few_steps(steps), 1):
            given = [row[: whole - new] for row in said]
            start = time.perf_counter()
            self._peer.generate(given, whole)
            seconds.append(time.perf_counter() - start)
        longer, shorter, prefill = seconds
        decoded = (steps + 1 - few_steps(steps)) * rows
        tokens = np.asarray(said)[:, length:].tolist()
        return Timing(prefill, longer - shorter, decoded, rows * whole, tokens)


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[KerasNlp]:
    """Loads it."""
    yield KerasNlp()


if __name__ == "__main__":
    child.serve(open_system)

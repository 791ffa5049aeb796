"""The whole text anew for each token, as `tfkv.generation.generate_without_cache` does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import tensorflow as tf

from benchmarks import texts
from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing
from tfkv._version import __version__
from tfkv.causal_lm import CausalLM

_MOST_TOKENS = 4096


class NoCache:
    """Our model without its cache, compiled with XLA; a token costs a prefill."""

    compiles = True
    pid = "self"

    def __init__(self) -> None:
        source = texts.model()
        self._model = CausalLM.from_weights(source.config, source.weights)
        self._step = tf.function(self._next, jit_compile=True)
        self.about = {"tfkv": __version__}

    def _next(self, text: tf.Tensor) -> tf.Tensor:
        hidden, _ = self._model.hidden_states(text)
        return tf.argmax(self._model.logits(hidden[:, -1]), axis=-1)

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`; one token says what all of them would take."""
        rows, length = len(prompts), len(prompts[0])
        if rows * length > _MOST_TOKENS:
            raise child.NotRun(f"a step would read {rows * length} tokens")
        text = tf.constant(prompts)
        start = time.perf_counter()
        token = self._step(text).numpy()
        seconds = time.perf_counter() - start
        return Timing(seconds, seconds, rows, rows * length, token[:, None].tolist())


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[NoCache]:
    """Loads it."""
    yield NoCache()


if __name__ == "__main__":
    child.serve(open_system)

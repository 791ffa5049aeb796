"""llama.cpp through its C interface, as llama-cpp-python declares it."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing

_BATCH = 512
#: Names of a cache's type to ggml's.
CACHE_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
}


class LlamaCpp:
    """A context with flash attention and a cache of a type.

    Args:
        job: Its setting ``cache`` is a key of `CACHE_TYPES`.
    """

    compiles = False
    pid = "self"

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(job.weights.encode(), settings)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {job.weights}.")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._words = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._threads = job.threads
        self._type = CACHE_TYPES[str(job.settings["cache"])]
        self.about = {
            "llama-cpp-python": llama_cpp.__version__,
            "flash attention": "on",
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`; a context of its own for each case, as large as it needs."""
        rows, length = len(prompts), len(prompts[0])
        context = self._context(rows, length + steps + 1)
        batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        try:
            start = time.perf_counter()
            tokens = [[self._prefill(context, batch, *item)] for item in enumerate(prompts)]
            middle = time.perf_counter()
            for step in range(steps):
                fed = [(row, length + step, said[-1], True) for row, said in enumerate(tokens)]
                self._decode(context, batch, fed)
                for row, said in enumerate(tokens):
                    said.append(self._best(context, row))
            end = time.perf_counter()
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)
        return Timing(middle - start, end - middle, steps * rows, rows * length, tokens)

    def _context(self, rows: int, length: int) -> Any:
        settings = llama_cpp.llama_context_default_params()
        # Each sequence has its part of the context, a multiple of 256 tokens.
        settings.n_ctx = rows * -(-length // 256) * 256
        settings.n_seq_max = rows
        settings.n_batch = settings.n_ubatch = _BATCH
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.type_k = settings.type_v = self._type
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        settings.kv_unified = False
        context = llama_cpp.llama_init_from_model(self._model, settings)
        if not context:
            raise child.NotRun(f"llama.cpp made no context of {settings.n_ctx} tokens")
        return context

    def _prefill(self, context: Any, batch: Any, row: int, prompt: list[int]) -> int:
        for first in range(0, len(prompt), _BATCH):
            piece = prompt[first : first + _BATCH]
            last = first + len(piece) == len(prompt)
            fed = [
                (row, first + i, token, last and i == len(piece) - 1)
                for i, token in enumerate(piece)
            ]
            self._decode(context, batch, fed)
        return self._best(context, len(piece) - 1)

    @staticmethod
    def _decode(context: Any, batch: Any, fed: list[tuple[int, int, int, bool]]) -> None:
        batch.n_tokens = len(fed)
        for index, (row, position, token, wanted) in enumerate(fed):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = wanted
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode of {len(fed)} tokens returned {code}.")

    def _best(self, context: Any, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, shape=(self._words,)).argmax())


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[LlamaCpp]:
    """Loads it."""
    yield LlamaCpp(job)


if __name__ == "__main__":
    child.serve(open_system)

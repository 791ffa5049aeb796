"""Transformers on PyTorch: the model's own forward pass, one call a step.

Without ``generate`` around it, which costs a few milliseconds a step and could only be slower.
"""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing

_QUANTIZED_BITS = 4


class Transformers:
    """A causal LM in float32 with one of the library's caches.

    Args:
        job: Its setting ``cache`` is ``dynamic``, ``static`` or ``quantized``.
    """

    pid = "self"

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job.weights, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._kind = str(job.settings["cache"])
        # Only a cache of fixed shape spares a compiled step from being compiled anew.
        self.compiles = self._kind == "static"
        self._step = torch.compile(self._model, dynamic=False) if self.compiles else self._model
        self.about = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": "sdpa",
            "step": "torch.compile" if self.compiles else "eager",
        }

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`."""
        with torch.inference_mode():
            cache = self._cache(len(prompts[0]) + steps + 1)
            start = time.perf_counter()
            # No later token is asked for: the logits of the last one are enough.
            token = self._next(self._model, torch.tensor(prompts), cache)
            tokens = [token]
            middle = time.perf_counter()
            for _ in range(steps):
                token = self._next(self._step, token, cache)
                tokens.append(token)
            end = time.perf_counter()
        rows = len(prompts)
        said = torch.cat(tokens, dim=1).tolist()
        read = rows * len(prompts[0])
        return Timing(middle - start, end - middle, steps * rows, read, said)

    @staticmethod
    def _next(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(dim=-1)

    def _cache(self, length: int) -> Any:
        config = self._model.config
        if self._kind == "static":
            return transformers.StaticCache(config=config, max_cache_len=length)
        if self._kind == "quantized":
            return transformers.QuantizedCache(
                backend="quanto", config=config, nbits=_QUANTIZED_BITS
            )
        return transformers.DynamicCache(config=config)


def _unlock() -> None:
    """Takes away what a process that was ended while it compiled quanto's extension left behind:
    others would wait for it for ever. One system runs at a time, so that nobody holds it.
    """
    from optimum import quanto

    folder = pathlib.Path(quanto.__file__).parent / "library" / "extensions" / "cpp" / "build"
    (folder / "lock").unlink(missing_ok=True)


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[Transformers]:
    """Loads it."""
    if job.settings["cache"] == "quantized":
        _unlock()
    yield Transformers(job)


if __name__ == "__main__":
    child.serve(open_system)

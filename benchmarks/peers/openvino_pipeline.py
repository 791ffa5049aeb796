"""OpenVINO GenAI's ``LLMPipeline`` on the CPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers import child
from benchmarks.peers.protocol import Job, Timing


class OpenVino:
    """A pipeline that computes in float32; it would take bfloat16 where the CPU has it.

    Args:
        job: Its setting ``cache`` is OpenVINO's name of a type.
    """

    compiles = False
    pid = "self"

    def __init__(self, job: Job) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = job.most_rows
        # All prompts in one step: the first tokens of all rows are there at once.
        scheduler.max_num_batched_tokens = job.most_rows * job.longest
        scheduler.cache_size = 2
        self._pipeline = openvino_genai.LLMPipeline(
            job.weights,
            "CPU",
            INFERENCE_PRECISION_HINT="f32",
            KV_CACHE_PRECISION=str(job.settings["cache"]),
            # Otherwise activations are rounded to 8 bits where weights are.
            DYNAMIC_QUANTIZATION_GROUP_SIZE=0,
            INFERENCE_NUM_THREADS=job.threads,
            scheduler_config=scheduler,
        )
        self.about = {
            "openvino": openvino.__version__,
            "openvino-genai": openvino_genai.__version__,
            "precision": "f32",
            "prefix caching": "off",
        }

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        """See `child.System`; the library says itself when the first token was there."""
        rows, length = len(prompts), len(prompts[0])
        ids = openvino.Tensor(np.array(prompts, np.int64))
        mask = openvino.Tensor(np.ones([rows, length], np.int64))
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = steps + 1
        settings.ignore_eos = True
        settings.do_sample = False
        start = time.perf_counter()
        answer = self._pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), settings)
        whole = time.perf_counter() - start
        prefill = answer.perf_metrics.get_ttft().mean / 1e3
        tokens = [[int(token) for token in row] for row in answer.tokens]
        return Timing(prefill, whole - prefill, steps * rows, rows * length, tokens)


@contextlib.contextmanager
def open_system(job: Job) -> Iterator[OpenVino]:
    """Loads it."""
    yield OpenVino(job)


if __name__ == "__main__":
    child.serve(open_system)

"""Decode steps of SmolLM2 whose sessions have LoRA adapters, over those without:
``python -m benchmarks.adapters``.
"""

from __future__ import annotations

import numpy as np

from benchmarks import texts
from benchmarks.decode_steps import adapter_ratio
from tfkv import terminal
from tfkv.export import LoraAdapter
from tfkv.export.importers import expected_tensors

_HELD = 128
#: Adapters, their rank, and sessions in a step.
_CASES = ((2, 8, 1), (16, 8, 1), (2, 64, 1), (2, 8, 4))


def random_adapter(rank: int, seed: int) -> LoraAdapter:
    """One of the form that keras-nlp trains by default, on queries and values."""
    draw = np.random.default_rng(seed)
    factors = {}
    for name, shape in expected_tensors(texts.model().config):
        if name.endswith(("/query", "/value")):
            width, heads, size = shape
            a = draw.normal(size=(width, heads, rank)) / np.sqrt(width)
            b = draw.normal(size=(rank, size)) * 0.05
            factors[name] = (a.astype(np.float32), b.astype(np.float32))
    return LoraAdapter(factors)


def main() -> None:
    """Prints a line for each case."""
    terminal.load_tensorflow()
    print("adapters | rank | rows | step over one without")
    for count, rank, rows in _CASES:
        adapters = {f"a{number}": random_adapter(rank, number) for number in range(count)}
        ratio = adapter_ratio(adapters, _HELD, rows)
        print(f"{count} | {rank} | {rows} | {ratio}", flush=True)


if __name__ == "__main__":
    main()

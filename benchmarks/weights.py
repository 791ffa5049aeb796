"""Weights in fewer bits: bytes, quality and decode steps, beside float32:
``python -m benchmarks.weights [TYPE ...]``.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks import texts
from benchmarks.decode_steps import FULL, step_ratio
from tfkv import terminal
from tfkv.config import WEIGHT_TYPES, EngineConfig

_PASSAGES, _LENGTH = 4, 2048
_HELD = 256
_ROWS = (1, 2, 4, 8)


def main() -> None:
    """Prints a block of lines for each type, or those named."""
    types = sys.argv[1:] or [name for name in WEIGHT_TYPES if name != "float32"]
    if len(types) > 1:
        for name in types:
            # A process each: TensorFlow keeps the weights of engines that are gone.
            subprocess.run([sys.executable, "-m", "benchmarks.weights", name], check=True)
        return
    name = types[0]
    print(f"{name}: {_quality(name)}", flush=True)
    for cache in (FULL, "dense+int8"):
        for rows in _ROWS:
            ratio = step_ratio(cache, _HELD, rows, weights=name)
            print(f"{name}, {cache}, {rows} sessions of {_HELD} tokens: {ratio}", flush=True)


def _quality(name: str) -> str:
    from tfkv.evaluation import compare_caches
    from tfkv.export import plan_memory
    from tfkv.export.cache_eval import open_reader

    source = texts.model()
    plan = plan_memory(source.config, EngineConfig(weights=name), _LENGTH, 1 << 40)
    full, other = (open_reader(source, FULL, _LENGTH, None, (), kind) for kind in ("float32", name))
    found = compare_caches(full, other, texts.passages(_PASSAGES, _LENGTH), 64)
    return (
        f"{plan.weight_bytes:,} bytes; KL {found.mean_kl:.2e}, "
        f"same top token {found.top1_percent:.2f} %, of {found.tokens} tokens"
    )


if __name__ == "__main__":
    terminal.load_tensorflow()
    main()

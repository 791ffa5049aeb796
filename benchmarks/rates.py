"""Decode steps of every codec and of policies that store less, over those of the float32 cache:
``python -m benchmarks.rates [CACHE ...]``.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.decode_steps import step_ratio, tokens_held
from benchmarks.eviction import calibration
from tfkv import terminal
from tfkv.layers import CacheSpec
from tfkv.layers.codecs import CODECS

_TOKENS = 4096
_BUDGET = "budget=1024,interval=256,whole_prompt=True"
_POLICIES = (
    "sliding_window(window=1024,sinks=4)",
    "streaming_llm",
    f"recent_tokens({_BUDGET})",
    f"key_diff({_BUDGET})",
    f"snapkv({_BUDGET})",
    f"expected_attention({_BUDGET},recent=64,caps='kvzip')",
)


def main() -> None:
    """Prints a line for each cache as soon as it is measured; all, or those named."""
    caches = sys.argv[1:] or [*CODECS, *_POLICIES]
    if len(caches) > 1:
        # A process each: TensorFlow keeps the weights of engines that are gone.
        print(f"cache | step at {_TOKENS} tokens, of float32", flush=True)
        for cache in caches:
            subprocess.run([sys.executable, "-m", "benchmarks.rates", cache], check=True)
        return
    cache = caches[0]
    needs_tables = "caps" in cache or CacheSpec.parse(cache).codec.needs_calibration
    tables = calibration() if needs_tables else None
    print(f"{cache} | {step_ratio(cache, tokens_held(_TOKENS), 1, tables)}", flush=True)


if __name__ == "__main__":
    terminal.load_tensorflow()
    main()

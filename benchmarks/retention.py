"""Every policy that evicts, on the same budget: ``python -m benchmarks.retention``.

A quarter of 2048 tokens is kept, and 512 tokens are read on; KL from the full cache, nats.
"""

from __future__ import annotations

import sys

from benchmarks.eviction import later_kl

_COMMON = "budget=512,interval=512,sinks=4,whole_prompt=True"
#: Policies and their further arguments; of those with a window, its tokens are kept.
_POLICIES = (
    ("recent_tokens", ""),
    ("random_eviction", ""),
    ("knorm", "recent=32"),
    ("key_diff", "recent=32"),
    ("h2o", "recent=128"),
    ("tova", "recent=32"),
    ("snapkv", "window=32"),
    ("snapkv", "window=128"),
    ("pyramid_kv", "window=8"),
    ("critical_kv", "window=32"),
    ("expected_attention", "recent=32"),
    ("kvzip", "recent=32"),
    ("ada_kv", "window=32"),
    ("defensive_kv", "window=32"),
    ("layer_defensive_kv", "window=32"),
    ("key_diff", "recent=128,caps='kvzip'"),
    ("snapkv", "window=128,caps='kvzip'"),
    ("expected_attention", "recent=128,caps='kvzip'"),
    ("kvzip", "recent=32,caps='kvzip'"),
)


def main() -> None:
    """Prints a line for each policy as soon as it is measured; all, or those named."""
    asked = sys.argv[1:]
    texts = [
        f"{policy}({','.join(filter(None, (_COMMON, more)))})"
        for policy, more in _POLICIES
        if not asked or policy in asked
    ]
    for cache, gap, size in later_kl(dict(zip(texts, texts, strict=True)), lambda _: None):
        print(f"{gap:.4f}  {size:,} bytes  {cache}", flush=True)


if __name__ == "__main__":
    main()

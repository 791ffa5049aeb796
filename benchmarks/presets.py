"""Every preset beside the full float32 cache: ``python -m benchmarks.presets``.

Bytes of a session are exact. Quality is measured on passages of the scenario's length, at most
of the trained context. A decode step is timed in turns with one of the float32 cache that holds
as many tokens: what is printed is the median of the ratios, which noise spares.
"""

from __future__ import annotations

import math
import sys

from benchmarks import texts
from benchmarks.decode_steps import FULL, step_ratio, tokens_held
from tfkv import presets, terminal
from tfkv.config import EngineConfig
from tfkv.export import plan_memory

#: Tokens that quality is measured on.
_TOKENS = 8192
#: Sessions in a step, 1 unless named.
_ROWS = {"throughput": 4}


def main() -> None:
    """Prints a line for each preset as soon as it is measured; all, or those named."""
    print("preset, tokens, sessions a step | bytes | of float32 | KL | same top | step, of float32")
    for name in sys.argv[1:] or presets.PRESETS:
        preset = presets.get(name)
        rows = _ROWS.get(name, 1)
        size, saving = session_bytes(preset)
        print(f"{name}, {preset.length}, {rows} | {size:,} | {saving:+.1f} %", end="", flush=True)
        kl, same_top = quality(preset)
        print(f" | {kl:.2e} | {same_top:.2f} %", end="", flush=True)
        context = texts.model().config.context_length
        held = tokens_held(min(preset.length, context))
        print(f" | {step_ratio(preset.cache, held, rows)}", flush=True)


def session_bytes(preset: presets.Preset) -> tuple[int, float]:
    """Bytes of a session's cache, without its token history, and percent more than float32's."""
    config = texts.model().config
    engine = preset.engine()
    plan = plan_memory(config, engine, preset.length, 1)
    size = plan.session_bytes - plan.history_bytes
    page = plan_memory(config, EngineConfig(cache=FULL), engine.page_size, 1).page_bytes
    return size, 100 * (size / (page * math.ceil(preset.length / engine.page_size)) - 1)


def quality(preset: presets.Preset) -> tuple[float, float]:
    """Mean KL from the float32 cache in nats, and same top tokens in percent."""
    from tfkv.export.cache_eval import against_full

    tokens = min(preset.length, texts.model().config.context_length)
    compare = against_full(texts.model(), texts.passages(_TOKENS // tokens, tokens))
    found, _ = compare(preset.cache)
    return found.mean_kl, found.top1_percent


if __name__ == "__main__":
    terminal.load_tensorflow()
    main()

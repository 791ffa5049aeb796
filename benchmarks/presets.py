"""Every preset beside the full float32 cache: ``python -m benchmarks.presets``.

Bytes of a session are exact. Quality is measured on passages of the scenario's length, at most
of the trained context. A decode step is timed in turns with one of the float32 cache that holds
as many tokens: what is printed is the median of the ratios, which noise spares.
"""

from __future__ import annotations

import math
import statistics
import sys
import time

from benchmarks import texts
from tfkv import presets, terminal
from tfkv.config import EngineConfig
from tfkv.export import plan_memory

_FULL = "dense+float32"
_TURNS, _CHUNK = 16, 16
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
        ratio, low, high, full = step_ratio(preset, rows)
        print(f" | {ratio:.2f} ({low:.2f} to {high:.2f}; {full:.1f} ms in float32)", flush=True)


def session_bytes(preset: presets.Preset) -> tuple[int, float]:
    """Bytes of a session's cache, without its token history, and percent more than float32's."""
    config = texts.model().config
    engine = preset.engine()
    plan = plan_memory(config, engine, preset.length, 1)
    size = plan.session_bytes - plan.history_bytes
    page = plan_memory(config, EngineConfig(cache=_FULL), engine.page_size, 1).page_bytes
    return size, 100 * (size / (page * math.ceil(preset.length / engine.page_size)) - 1)


def quality(preset: presets.Preset) -> tuple[float, float]:
    """Mean KL from the float32 cache in nats, and same top tokens in percent."""
    from tfkv.export.cache_eval import against_full

    tokens = min(preset.length, texts.model().config.context_length)
    compare = against_full(texts.model(), texts.passages(_TOKENS // tokens, tokens))
    found, _ = compare(preset.cache)
    return found.mean_kl, found.top1_percent


def step_ratio(preset: presets.Preset, rows: int) -> tuple[float, float, float, float]:
    """Time of a step over that of float32: median and quartiles; and float32's, ms."""
    context = texts.model().config.context_length
    held = min(preset.length, context) - (_TURNS + 1) * _CHUNK
    ours, full = (_Sessions(cache, held, rows) for cache in (preset.cache, _FULL))
    ratios, theirs = [], []
    for turn in range(_TURNS):
        mine, other = ours.step_ms(), full.step_ms()
        if turn:
            ratios.append(mine / other)
            theirs.append(other)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high, statistics.median(theirs)


class _Sessions:
    """Sessions of one engine that hold as many tokens each, of texts of their own.

    Args:
        cache: Cache string.
        held: Tokens of each.
        rows: Sessions.
    """

    def __init__(self, cache: str, held: int, rows: int) -> None:
        from tfkv.export.engine_calls import EngineCalls

        capacity = held + (_TURNS + 1) * _CHUNK
        sizes = (1, rows) if rows > 1 else (1,)
        engine = EngineConfig(cache=cache, slots=rows, capacity=capacity, batch_sizes=sizes)
        self._calls = EngineCalls(texts.model(), engine)
        self._names = [f"row {row}" for row in range(rows)]
        self._position = held
        for row, name in enumerate(self._names):
            text = texts.real_text()[row * held :][:held].tolist()
            for first in range(0, held, engine.prefill_tokens):
                self._generate([name], [text[first : first + engine.prefill_tokens]], first, 0)

    def step_ms(self) -> float:
        """Moves all of them on by a chunk; milliseconds a step."""
        start = time.perf_counter()
        self._generate(self._names, [[]] * len(self._names), self._position, _CHUNK)
        self._position += _CHUNK
        return 1e3 * (time.perf_counter() - start) / _CHUNK

    def _generate(
        self, names: list[str], tokens: list[list[int]], position: int, count: int
    ) -> None:
        answer = self._calls.call(
            "generate",
            session_id=names,
            tokens=tokens,
            length=[len(row) for row in tokens],
            position=[position] * len(names),
            max_new_tokens=[count],
            stop_tokens=[[-1] * 8],
        )
        end = position + len(tokens[0]) + count
        if answer["status"].any() or (answer["position"] != end).any():
            raise RuntimeError(f"Expected {end} tokens, received: {answer}.")


if __name__ == "__main__":
    terminal.load_tensorflow()
    main()

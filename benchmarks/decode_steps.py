"""How long a decode step takes with a cache, beside one in float32 that keeps everything."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping

from benchmarks import texts
from tfkv.calibration import Calibration
from tfkv.config import EngineConfig
from tfkv.export.engine_calls import EngineCalls
from tfkv.export.exporter import fitted
from tfkv.export.lora_adapter import LoraAdapter

FULL = "dense+float32"
_TURNS, _CHUNK = 16, 16


@dataclasses.dataclass(frozen=True)
class StepRatio:
    """Times of a cache's steps over those of float32, turn by turn in one run.

    Args:
        low: First quartile.
        median: What noise spares.
        high: Third quartile.
        full_ms: Median of float32, milliseconds.
    """

    low: float
    median: float
    high: float
    full_ms: float

    def __str__(self) -> str:
        spread = f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.median:.2f} ({spread}; {self.full_ms:.1f} ms in float32)"


def tokens_held(most: int) -> int:
    """Tokens of a session before the first step, where it holds `most` after the last."""
    return most - (_TURNS + 1) * _CHUNK


def step_ratio(
    cache: str,
    held: int,
    rows: int = 1,
    calibration: Calibration | None = None,
    weights: str = "float32",
) -> StepRatio:
    """Measures a cache; see `StepRatio`.

    Args:
        cache: Cache string.
        held: Tokens of each session before the first step.
        rows: Sessions in a step.
        calibration: For a cache that needs one.
        weights: As of `EngineConfig.weights`; the other's are float32.
    """
    ours = _Sessions(cache, held, rows, calibration, weights)
    return _ratio(ours, _Sessions(FULL, held, rows))


def adapter_ratio(adapters: Mapping[str, LoraAdapter], held: int, rows: int = 1) -> StepRatio:
    """Measures sessions that take adapters in turn, beside an engine that has none.

    Args:
        adapters: By name.
        held: Tokens of each session before the first step.
        rows: Sessions in a step.
    """
    ours = _Sessions(FULL, held, rows, adapters=adapters)
    return _ratio(ours, _Sessions(FULL, held, rows))


def _ratio(ours: _Sessions, full: _Sessions) -> StepRatio:
    ratios, theirs = [], []
    for turn in range(_TURNS):
        mine, other = ours.step_ms(), full.step_ms()
        if turn:
            ratios.append(mine / other)
            theirs.append(other)
    return StepRatio(*statistics.quantiles(ratios, n=4), statistics.median(theirs))


class _Sessions:
    """Sessions of one engine that hold as many tokens each, of texts of their own.

    Args:
        cache: Cache string.
        held: Tokens of each.
        rows: Sessions.
        calibration: For a cache that needs one.
        weights: As of `EngineConfig.weights`.
        adapters: By name; sessions take them in turn.
    """

    def __init__(
        self,
        cache: str,
        held: int,
        rows: int,
        calibration: Calibration | None = None,
        weights: str = "float32",
        adapters: Mapping[str, LoraAdapter] | None = None,
    ) -> None:
        capacity = held + (_TURNS + 1) * _CHUNK
        sizes = (1, rows) if rows > 1 else (1,)
        engine = EngineConfig(
            cache=cache, slots=rows, capacity=capacity, batch_sizes=sizes, weights=weights
        )
        engine = fitted(texts.model(), engine, calibration)
        self._calls = EngineCalls(texts.model(), engine, calibration, adapters)
        names = list(adapters or {}) or [""]
        #: Name of each session to its adapter.
        self._names = {f"row {row}": names[row % len(names)] for row in range(rows)}
        self._position = held
        for row, name in enumerate(self._names):
            text = texts.real_text()[row * held :][:held].tolist()
            for first in range(0, held, engine.prefill_tokens):
                self._generate([name], [text[first : first + engine.prefill_tokens]], first, 0)

    def step_ms(self) -> float:
        """Moves all of them on by a chunk; milliseconds a step."""
        start = time.perf_counter()
        names = list(self._names)
        self._generate(names, [[]] * len(names), self._position, _CHUNK)
        self._position += _CHUNK
        return 1e3 * (time.perf_counter() - start) / _CHUNK

    def _generate(
        self, names: list[str], tokens: list[list[int]], position: int, count: int
    ) -> None:
        answer = self._calls.call(
            "generate",
            session_id=names,
            adapter=[self._names[name] for name in names],
            tokens=tokens,
            length=[len(row) for row in tokens],
            position=[position] * len(names),
            max_new_tokens=[count],
            stop_tokens=[[-1] * 8],
        )
        end = position + len(tokens[0]) + count
        if answer["status"].any() or (answer["position"] != end).any():
            raise RuntimeError(f"Expected {end} tokens, received: {answer}.")

"""Measures caches on the functions that an artifact runs: the engine's own pages."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfkv import sample_text
from tfkv.cache_report import CacheScore, Progress, Report, evaluate
from tfkv.calibration import Calibration
from tfkv.config import EngineConfig
from tfkv.evaluation import Comparison, compare_caches
from tfkv.export import model_text
from tfkv.export.engine import PREFILL_PIECE, Engine
from tfkv.export.engine_reader import EngineReader
from tfkv.export.exporter import checked, with_budgets
from tfkv.export.importers import ModelSource, load
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.policies import EvictingPolicy, RandomEviction, RecentTokens

_FULL = "dense+float32"


def evaluate_caches(
    source: Any,
    caches: Sequence[str],
    out: str | pathlib.Path,
    text: str | None = None,
    tokens: int = 2048,
    passages: int = 4,
    baselines: bool = True,
    calibration: Calibration | str | pathlib.Path | None = None,
    progress: Progress = lambda *_: None,
) -> list[CacheScore]:
    """Compares caches with the full float32 one on real text, and writes a report.

    Passages are read teacher-forced in pieces of 64 tokens, by the functions and pages that
    an artifact serves with; all but the newest piece is read back from the cache under test.

    Args:
        source: As of `tfkv.export.export`; it needs a tokenizer.
        caches: Policies and codecs, such as ``"int8"`` or ``"sliding_window(window=512)"``.
        out: Directory of ``eval.json`` and ``eval.html``. What it holds already is not
            measured again.
        text: What to read; Python's language reference where left out.
        tokens: Of a passage.
        passages: How many, spread evenly over the text.
        baselines: Whether to measure windows of as many bytes as each cache that forgets
            nothing, without and with sinks: what a codec has to beat; and for each policy that
            evicts, to evict at random and to keep the newest, on the same budget.
        calibration: As of `tfkv.export.export`.
        progress: Called with ``"caches"``, caches done and caches in all.

    Returns:
        A score for each of `caches` and of the baselines.

    Raises:
        ConfigError: A cache is unknown, or the text is too short.
        ModelSourceError: The source cannot be read, or has no tokenizer.
    """
    specs = [str(CacheSpec.parse(cache)) for cache in caches]
    model = load(source)
    whole = sample_text.language_reference() if text is None else text
    read = model_text.passages(model, whole, passages, tokens)
    if baselines:
        specs += [w for spec in specs for w in _windows(spec, model.config.head_dim, tokens)]
        specs += [other for spec in specs for other in _plain_evictions(spec)]
    setting = {
        "model": model.description,
        "text": "Python's language reference" if text is None else "given",
        "text hash": hashlib.sha256(whole.encode()).hexdigest()[:12],
        "tokens": tokens,
        "passages": passages,
    }
    report, unlike = Report(out, setting), list(dict.fromkeys(specs))
    return evaluate(unlike, report, against_full(model, read, calibration), PREFILL_PIECE, progress)


def against_full(
    model: ModelSource,
    read: Sequence[np.ndarray],
    calibration: Calibration | str | pathlib.Path | None = None,
) -> Callable[[str], tuple[Comparison, float]]:
    """What compares a cache with the full float32 one, on the pages of an engine.

    Args:
        model: Architecture and weights.
        read: Passages of one length, token ids.
        calibration: As of `tfkv.export.export`.

    Returns:
        A function of policy and codec: what the comparison found, and the bytes that a
        session of one passage stores, for each of its tokens.
    """
    tokens, tables = len(read[0]), checked(model, calibration)

    def engine(cache: str) -> Engine:
        config = EngineConfig(cache=cache, slots=1, capacity=max(tokens, 128), batch_sizes=(1,))
        config = with_budgets(model, config, tables)
        return Engine(model.config, model.weights, config, calibration=tables)

    full = EngineReader(engine(_FULL))

    def compare(cache: str) -> tuple[Comparison, float]:
        candidate = engine(cache)
        policy = candidate.geometry.cache.policy
        entries = min(candidate.geometry.layout.entries, tokens)
        if isinstance(policy, EvictingPolicy):
            # On pages are the tokens since the last eviction.
            entries = min(policy.interval, tokens)
        found = compare_caches(full, EngineReader(candidate), read, PREFILL_PIECE)
        stored = candidate.bytes_per_token * entries + candidate.beside_bytes
        return found, stored / tokens

    return compare


def _plain_evictions(cache: str) -> list[str]:
    """What a policy that evicts has to beat: at random, and all but the newest, on its budget."""
    spec = CacheSpec.parse(cache)
    policy = spec.policy
    if not isinstance(policy, EvictingPolicy) or isinstance(policy, (RandomEviction, RecentTokens)):
        return []
    common = {name: getattr(policy, name) for name in ("budget", "sinks", "interval")}
    plain = (RandomEviction(**common), RecentTokens(**common))
    return [str(dataclasses.replace(spec, policy=one)) for one in plain]


def _windows(cache: str, head_dim: int, tokens: int) -> list[str]:
    """Float32 windows, without and with sinks, of the bytes that a dense cache takes."""
    spec, full = CacheSpec.parse(cache), CacheSpec.parse(_FULL)
    if spec.policy.bounded or spec.codec.name == full.codec.name:
        return []
    stored = spec.codec.bytes_per_token(head_dim) + spec.codec.exact_bytes(head_dim) / tokens
    share = stored / full.codec.bytes_per_token(head_dim)
    # A window stores one piece more than it shows.
    piece, sinks = PREFILL_PIECE, 4
    window = max(int(share * tokens) // piece * piece - 2 * piece, piece)
    return [
        f"sliding_window(window={window + piece})+float32",
        f"sliding_window(window={window},sinks={sinks})+float32",
    ]

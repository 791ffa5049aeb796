"""Figures of speed on SmolLM2: against the machine's limits, and against peers in the same run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from benchmarks import speed
from benchmarks.bars import HOLDS, Measurement, read_bars
from benchmarks.peers.environments import Absent
from benchmarks.peers.run import cores
from benchmarks.peers.table import SYSTEMS
from benchmarks.registry import Measured, Say, measures

_THREADS, _ROUNDS = 2, 3
_CONTEXTS = (100, 1000, 4000)
#: Where batches are measured: context and rows.
_ONE, _EIGHT = (512, 1), (512, 8)
_SHAPES = (*((context, 1) for context in _CONTEXTS), _ONE, _EIGHT)

_OURS, _INT8, _GRPC = "tfkv", "tfkv int8", "tfkv gRPC"
_KERAS_NLP = "keras-nlp"
_LLAMA, _LLAMA_Q8 = "llama.cpp f32, KV f32", "llama.cpp q8_0, KV q8_0"
_SYSTEMS = (_OURS, _INT8, _GRPC, _KERAS_NLP, _LLAMA, _LLAMA_Q8)

_BARS = {bar.name: bar for bar in read_bars()}


@measures(
    *("fast.share_of_limit_100", "fast.share_of_limit_4000"),
    *("fast.vs_llamacpp_f32_100", "fast.vs_llamacpp_f32_4000"),
    *("fast.vs_keras_nlp_100", "fast.vs_keras_nlp_4000"),
    *("fast.int8_vs_own_f32_b1", "fast.int8_vs_own_f32_b8"),
    *("fast.vs_llamacpp_q8_100", "fast.vs_llamacpp_q8_4000"),
    *("fast.batch8_vs_batch1", "fast.grpc_vs_inprocess_b8"),
    *("fast.prefill_share_of_gemm_1k", "fast.prefill_vs_llamacpp_f32"),
)
def rates(say: Say) -> Measured:
    """Prefill and decode of one run, each system in a process of its own, in turn."""
    mine = os.sched_getaffinity(0)
    try:
        return figures(speed.compare(_SYSTEMS, _SHAPES, _ROUNDS, cores(_THREADS), say))
    finally:
        os.sched_setaffinity(0, mine)


def figures(found: speed.Comparison) -> dict[str, Measurement]:
    """The figures of a run; those that need what is absent are not numbers."""
    values = {}
    for context in (100, 4000):
        values |= {
            f"fast.share_of_limit_{context}": _share(found, (context, 1), "decode"),
            f"fast.vs_llamacpp_f32_{context}": _ratio(found, _OURS, _LLAMA, (context, 1)),
            f"fast.vs_keras_nlp_{context}": _ratio(found, _OURS, _KERAS_NLP, (context, 1)),
            f"fast.vs_llamacpp_q8_{context}": _ratio(found, _INT8, _LLAMA_Q8, (context, 1)),
        }
    holds = _holds("fast.share_of_limit_100", values)
    for name, shape in (("b1", _ONE), ("b8", _EIGHT)):
        values[f"fast.int8_vs_own_f32_{name}"] = _int8(found, shape, holds)
    values["fast.batch8_vs_batch1"] = _batch(found, _holds("fast.int8_vs_own_f32_b1", values))
    values["fast.grpc_vs_inprocess_b8"] = _ratio(found, _GRPC, _OURS, _EIGHT)
    values["fast.prefill_share_of_gemm_1k"] = _share(found, (1000, 1), "prefill")
    ratios = [_ratio(found, _OURS, _LLAMA, (context, 1), "prefill") for context in _CONTEXTS]
    worst = min(ratios, key=lambda ratio: ratio.value)
    note = "; ".join(f"{c}: {r.note}" for c, r in zip(_CONTEXTS, ratios, strict=True))
    values["fast.prefill_vs_llamacpp_f32"] = Measurement(worst.value, note=note)
    return values


def _holds(name: str, values: Mapping[str, Measurement]) -> bool:
    return _BARS[name].verdict(values[name]) == HOLDS


def _share(found: speed.Comparison, shape: tuple[int, int], phase: str) -> Measurement:
    try:
        rate = found.rate(_OURS, *shape, phase)
    except Absent as error:
        return Measurement(float("nan"), note=str(error))
    share = found.share(found.runs[_OURS, *shape], phase)
    limit = "gemm_gflop_per_s" if phase == "prefill" else "read_gb_per_s"
    note = f"{rate:.1f} tokens/s, {limit} {found.limit(limit):.1f}"
    return Measurement(share if share is not None else float("nan"), note=note)


def _ratio(
    found: speed.Comparison, ours: str, theirs: str, shape: tuple[int, int], phase: str = "decode"
) -> Measurement:
    try:
        mine, other = (found.rate(name, *shape, phase) for name in (ours, theirs))
    except Absent as error:
        return Measurement(float("nan"), note=str(error))
    return Measurement(mine / other, note=f"{mine:.1f} against {other:.1f} tokens/s")


def _int8(found: speed.Comparison, shape: tuple[int, int], holds: bool) -> Measurement:
    """Int8 over float32, where that is fast enough to be a measure; else over its bar."""
    if holds:
        return _ratio(found, _INT8, _OURS, shape)
    try:
        rate = found.rate(_INT8, *shape)
    except Absent as error:
        return Measurement(float("nan"), note=str(error))
    bandwidth = found.limit("read_gb_per_s") * 1e9
    share = _BARS["fast.share_of_limit_100"].limit({}) or math.nan
    bar = share * found.facts.decode_limit(SYSTEMS[_OURS], *shape, bandwidth)
    note = f"{rate:.1f} against {bar:.1f} tokens/s, {share:.0%} of float32's limit"
    return Measurement(rate / bar, note=note)


def _batch(found: speed.Comparison, holds: bool) -> Measurement:
    """Eight rows over one, of int8, where one is fast enough to be a measure."""
    try:
        eight, one = (found.rate(_INT8, *shape) for shape in (_EIGHT, _ONE))
    except Absent as error:
        return Measurement(float("nan"), note=str(error))
    note = f"{eight:.1f} against {one:.1f} tokens/s"
    if not holds:
        note = f"{eight / one:.2f}, does not count: one row falls short; {note}"
        return Measurement(float("nan"), note=note)
    return Measurement(eight / one, note=note)

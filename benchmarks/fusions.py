"""What XLA makes of a decode step; noise cannot touch it."""

from __future__ import annotations

from benchmarks import hlo, texts
from benchmarks.bare_step import zero_arguments
from benchmarks.bars import Measurement
from benchmarks.registry import Measured, Say, measures
from tfkv.config import EngineConfig
from tfkv.export import Engine

_WEIGHTS = ("float32", "int8")


@measures("fast.hlo_fusions_per_layer")
def fusions(say: Say) -> Measured:
    """Fusions that a layer of a decode step runs, without those of the scan over pages: int8
    cache and int8 weights; beside it float32 weights."""
    source, found = texts.model(), {}
    for weights in _WEIGHTS:
        say(f"compiling a step with {weights} weights")
        settings = EngineConfig(slots=1, cache="int8", batch_sizes=(1,), weights=weights)
        engine = Engine(source.config, source.weights, settings)
        ir = engine.compute.experimental_get_compiler_ir(*zero_arguments(engine, 1))
        wide = 2 * source.config.intermediate_dim
        found[weights] = hlo.fusions_a_layer(ir(stage="optimized_hlo"), wide)
    note = ", ".join(f"{weights} weights: {count}" for weights, count in found.items())
    return {"fast.hlo_fusions_per_layer": Measurement(found["int8"], note=note)}

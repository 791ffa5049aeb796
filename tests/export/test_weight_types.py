"""Engines whose weights are stored in fewer bits: against the model of the rounded weights."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_model
from tiny_artifacts import PLAIN, Caller

from tfkv.architecture import Experts
from tfkv.config import WEIGHT_TYPES, EngineConfig
from tfkv.errors import ConfigError
from tfkv.export import Engine, LoadedArtifact, export, exporter, plan_memory
from tfkv.export.engine_reader import EngineReader
from tfkv.export.packed_weights import as_served

TEXT = tiny_model.text(90, seed=31)
#: An output matrix that is the embedding, experts, one of them shared, and biases.
MIXED = dataclasses.replace(
    tiny_model.CONFIG,
    tie_embeddings=True,
    experts=Experts(4, 2, 16, True, 8),
    attention=dataclasses.replace(tiny_model.CONFIG.attention, bias=True),
)
MODELS = {"llama": tiny_model.CONFIG, "mixed": MIXED}
_COMPILED = ["llama", pytest.param("mixed", marks=pytest.mark.slow)]


@functools.cache
def weights_of(model: str) -> dict[str, np.ndarray]:
    return tiny_model.make_weights(MODELS[model])


def reader(model: str, stored: str, weights: dict[str, np.ndarray]) -> EngineReader:
    engine = dataclasses.replace(PLAIN, weights=stored, slots=1, batch_sizes=(1,), xla=True)
    return EngineReader(Engine(MODELS[model], weights, engine))


def logits(model: str, stored: str, weights: dict[str, np.ndarray], cut: int) -> np.ndarray:
    """Of TEXT, read in pieces of `cut` tokens."""
    read = reader(model, stored, weights)
    pieces = [TEXT[start : start + cut] for start in range(0, 60, cut)]
    return np.concatenate(
        [read.read(np.array(piece), cut * index).numpy() for index, piece in enumerate(pieces)]
    )


@pytest.mark.parametrize("model", _COMPILED)
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_an_engine_computes_with_the_rounded_weights(model, stored):
    exact = logits(model, "float32", weights_of(model), 60)
    expected = logits(model, "float32", as_served(weights_of(model), stored), 60)
    made = logits(model, stored, weights_of(model), 60)
    of_weights = np.abs(expected - exact).max()
    # Activations in int8 engines are rounded 128 times finer than weights.
    room = of_weights / 16 if stored == "int8" else 1e-4
    assert np.abs(made - expected).max() <= room < of_weights


@pytest.mark.parametrize("model", _COMPILED)
def test_codes_give_the_same_logits_however_many_tokens_are_read_at_once(model):
    """One at a time codes are cast to float, 12 at a time they are multiplied as integers."""
    alone, some, many = (logits(model, "int8", weights_of(model), cut) for cut in (1, 12, 60))
    # As far apart as float32 engines are: an activation rounded to the other side moves logits
    # by a 128th of what a weight's rounding does.
    moved = np.abs(alone - logits(model, "float32", weights_of(model), 60)).max()
    assert np.abs(alone - some).max() < moved / 16
    assert np.abs(alone - many).max() < moved / 16


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stored", WEIGHT_TYPES)
def test_the_plan_knows_the_bytes_of_weights(model, stored):
    engine = EngineConfig(slots=1, capacity=96, page_size=16, weights=stored)
    built = Engine(MODELS[model], weights_of(model), engine)
    held = sum(v.shape.num_elements() * v.dtype.size for v in built.weights.variables)
    assert plan_memory(MODELS[model], engine, 96, 10**9).weight_bytes == held


def test_int8_weights_take_little_more_than_a_quarter():
    model = dataclasses.replace(tiny_model.CONFIG, hidden_dim=576, intermediate_dim=1536)
    engine = EngineConfig(weights="int8")
    few = plan_memory(model, engine, 96, 10**9).weight_bytes
    whole = plan_memory(model, EngineConfig(), 96, 10**9).weight_bytes
    assert whole / 4 < few < whole / 4 * 1.02


def test_weights_of_another_kind_are_another_fingerprint():
    source = tiny_model.source()
    prints = {
        exporter._fingerprint(source, EngineConfig(weights=stored)) for stored in WEIGHT_TYPES
    }
    assert len(prints) == len(WEIGHT_TYPES)


def test_an_unknown_kind_is_refused_and_named():
    with pytest.raises(
        ConfigError, match=r"`weights` must be one of float32, bfloat16, int8.*int4"
    ):
        EngineConfig(weights="int4")


@pytest.mark.parametrize("xla", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_artifact_of_codes_is_verified_and_batches_as_if_alone(tmp_path, xla):
    """`export` compares it with the Keras model of the rounded weights."""
    engine = dataclasses.replace(PLAIN, weights="int8", xla=xla, batch_sizes=(1, 4))
    source = tiny_model.source()
    version = export(source, tmp_path, engine)
    stored = sum(
        int(np.prod(shape)) * dtype.size
        for name, shape in tf.train.list_variables(str(version / "variables" / "variables"))
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
        for dtype in [tf.int8 if "numbers" in name else tf.float32]
    )
    assert stored == plan_memory(source.config, engine, 96, 10**9).weight_bytes
    with LoadedArtifact(version) as artifact:
        caller = Caller(artifact)
        prompts = [TEXT[first : first + 20] for first in (0, 20, 40, 60)]
        alone = [caller.generate(caller.name(), prompt)["logprobs"] for prompt in prompts]
        names = [caller.name() for _ in prompts]
        together = caller.generate(names, prompts, [0] * 4)["logprobs"]
        np.testing.assert_allclose(together, alone, atol=1e-3)
        caller.close_all()

"""Codecs with tables of a calibration, on pages and in an artifact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import PLAIN

from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, Status
from tfkv.evaluation import ModelReader
from tfkv.export import Engine, LoadedArtifact, export
from tfkv.export.engine_reader import EngineReader
from tfkv.manifest import Manifest

TEXT = np.array(tiny_model.text(192, seed=900), np.int32)
CACHES = {
    "low_rank(rank=6,bits=16,recent=0,sinks=0)": 2e-2,
    "low_rank(rank=4,bits=8,recent=64,sinks=2)": 1e-1,
    "block_gtq(bits=5,recent=64,sinks=2)": 3e-1,
    "sliding_window(window=70,sinks=3)+block_gtq(bits=4)": 3e-1,
    "streaming_llm(window=61,sinks=3)+low_rank(rank=6,bits=16,recent=0,sinks=0)": 2e-2,
    "key_diff(budget=80,sinks=2,recent=16)+low_rank(rank=8,bits=16,recent=0,sinks=0)": 2e-2,
    "key_diff(budget=80,sinks=2,recent=16)+block_gtq(bits=8,recent=64,sinks=2)": 1e-3,
}


def logits(reader: EngineReader | ModelReader) -> np.ndarray:
    reader.start()
    # As wide as the interval of a policy that evicts: then both evict between the same tokens.
    return np.concatenate([reader.read(TEXT[first : first + 64], first) for first in (0, 64, 128)])


#: `make test` reads one of each codec, and one whose policy evicts.
_OFTEN = (
    "low_rank(rank=4,bits=8,recent=64,sinks=2)",
    "block_gtq(bits=5,recent=64,sinks=2)",
    "key_diff(budget=80,sinks=2,recent=16)+block_gtq(bits=8,recent=64,sinks=2)",
)


@pytest.mark.parametrize(
    "cache",
    [pytest.param(one, marks=[] if one in _OFTEN else [pytest.mark.slow]) for one in CACHES],
)
def test_pages_read_as_the_layers_of_a_keras_model_do(cache: str):
    """Each layer and head by its own tables: with those of another, logits are far off."""
    calibration, weights = tiny_model.calibration(), tiny_model.make_weights()
    config = EngineConfig(**{**PLAIN.to_dict(), "cache": cache, "capacity": 256, "slots": 1})
    engine = Engine(tiny_model.CONFIG, weights, config, calibration=calibration)
    model = CausalLM.from_weights(
        tiny_model.CONFIG, weights, cache=cache, calibration=calibration, capacity=256, slack=64
    )
    paged, expected = logits(EngineReader(engine)), logits(ModelReader(model))
    apart = np.abs(paged - expected)
    # Codes that fall to the other side through rounding move some logits, by what a code is.
    assert np.median(apart) < 1e-4 and np.quantile(apart, 0.99) < CACHES[cache]


@pytest.mark.slow
def test_an_artifact_answers_as_its_model_and_knows_its_tables(tmp_path):
    """`export` itself compares it with the Keras model of the same calibration."""
    calibration = tiny_model.calibration()
    cache = "low_rank(rank=7,recent=64,sinks=2)"
    engine = dataclasses.replace(PLAIN, cache=cache, batch_sizes=(1,))
    version = export(tiny_model.source(), tmp_path, engine, calibration=calibration)
    fingerprint = Manifest.read(version).fingerprint
    with LoadedArtifact(version) as artifact:
        prompt = tiny_model.text(40, seed=901)
        answer = artifact.call(
            "decode", session_id=["one"], tokens=[prompt], length=[40], position=[0]
        )
        assert answer["status"][0] == Status.OK
        probe = artifact.call("attention", session_id=["one"], layer=[1], position=[-1])
        np.testing.assert_allclose(probe["weights"][0].sum(axis=-1), 1, atol=1e-5)
    louder = dataclasses.replace(calibration.moments, keys=calibration.moments.keys * 2)
    other = dataclasses.replace(calibration, moments=louder)
    again = export(tiny_model.source(), tmp_path, engine, calibration=other)
    # Pages of one would be misread by the other.
    assert Manifest.read(again).fingerprint != fingerprint


def test_a_codec_without_its_calibration_is_refused(tmp_path):
    engine = dataclasses.replace(PLAIN, cache="block_gtq(bits=4)")
    with pytest.raises(ConfigError, match="'block_gtq' needs tables of a calibration"):
        export(tiny_model.source(), tmp_path, engine)
    assert not list(tmp_path.iterdir())
    old = dataclasses.replace(tiny_model.calibration(), moments=None)
    with pytest.raises(ConfigError, match=r"took no moments.*Run `tfkv calibrate` anew"):
        export(tiny_model.source(), tmp_path, engine, calibration=old)

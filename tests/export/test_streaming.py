"""Sessions without an end: positions in the cache, 3 sinks and a window of 61."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import ENGINES, Caller

from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, Finish, Status
from tfkv.export.layer_groups import LayerGroups

TEXT = tiny_model.text(700, seed=600)


@pytest.fixture
def stream(caller_of) -> Caller:
    return caller_of("stream")


def test_a_session_goes_on_far_beyond_the_trained_context(stream):
    assert tiny_model.CONFIG.context_length == 512
    layers = CausalLM.from_weights(
        tiny_model.CONFIG, tiny_model.make_weights(), cache=ENGINES["stream"].cache
    )
    logits, state = layers(np.array([TEXT], np.int32), state=layers.init_state(1))
    logits, name, pages = np.asarray(logits)[0], stream.name(), set()
    for first in range(0, 690, 115):
        stream.generate(name, TEXT[first : first + 115], first, count=0)
        pages.add(stream.stats()["pages_used"])
        answer = stream.decode(name, [TEXT[first + 115]], first + 115)
        assert answer["status"] == Status.OK
        np.testing.assert_allclose(answer["logits"], logits[first + 115], atol=2e-4)
        stream.truncate(name, first + 115)
    assert len(pages) <= 2, "memory is constant once the ring is full"
    answer = stream.generate(name, TEXT[690:], 690)
    assert (answer["finish"], answer["position"]) == (Finish.LENGTH, 708)


def test_pictures_show_what_the_query_read(stream):
    """Weights sum to one over sinks and window, and the sinks hold what was looked at anew."""
    name = stream.name()
    stream.generate(name, TEXT[:100], count=0)
    stream.generate(name, TEXT[100:200], 100, count=0)
    answer = stream.call("attention", name, (), -1, layer=[0])
    assert answer["status"] == Status.OK
    seen = answer["positions"][answer["weights"].sum(axis=0) > 0]
    assert sorted(seen) == [0, 1, 2, *range(139, 200)]
    np.testing.assert_allclose(answer["weights"].sum(-1), 1, atol=1e-5)


def test_a_window_below_a_piece_is_refused():
    engine = EngineConfig(cache="streaming_llm(window=40)", page_size=16)
    with pytest.raises(ConfigError, match="at least 64 together"):
        LayerGroups.of(tiny_model.CONFIG, engine, 64)

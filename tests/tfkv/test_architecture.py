from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from tfkv.architecture import Attention, Experts, FeedForward, Norms, Positions, Rope
from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError

PLAIN = DecoderConfig(64, 3, 32, 4, 2, 8, 48)


def test_a_plain_llama_reads_as_it_did_before_there_were_options():
    assert PLAIN.to_dict() == {
        "vocabulary_size": 64,
        "num_layers": 3,
        "hidden_dim": 32,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_dim": 48,
        "rope_max_wavelength": 10000.0,
        "rms_epsilon": 1e-5,
        "context_length": 2048,
        "tie_embeddings": True,
    }


def test_options_round_trip_through_json():
    config = dataclasses.replace(
        PLAIN,
        positions=Positions(
            ropes=(Rope(5e5, 4, (1.0, 2.5), 1.2), Rope(1e4, 4)), of_layers=(0, -1, 1)
        ),
        attention=Attention(windows=(4, 0, 4), soft_cap=2.0, bias=True),
        norms=Norms("layer", embedding=True, final_epsilon=1e-3),
        experts=Experts(4, 2, 16, True, 8, (1,)),
        embedding_scale=5.5,
    )
    assert DecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_layers_have_what_the_tables_say():
    local, far = Rope(100.0), Rope(1e6).linear(8.0)
    config = dataclasses.replace(
        PLAIN,
        positions=Positions(ropes=(local, far), of_layers=(0, 1, -1)),
        attention=Attention(windows=(5, 0, 0)),
        experts=Experts(4, 2, 16, layers=(2,)),
    )
    assert [config.rope(layer) for layer in range(3)] == [local, far, None]
    assert [config.window(layer) for layer in range(3)] == [5, 0, 0]
    assert [config.experts_of(layer) is not None for layer in range(3)] == [False, False, True]
    assert config.block_options(0).window == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": Attention(windows=(3,))}, "one number for each of 3 layers"),
        ({"positions": Positions(of_layers=(0, 0))}, "one number for each of 3 layers"),
        ({"positions": Positions(ropes=(Rope(channels=10),))}, "at most head_dim=8"),
        ({"positions": Positions(ropes=(Rope(divisors=(1.0, 2.0)),))}, "each of 4 pairs"),
        ({"experts": Experts(4, 2, 16, layers=(3,))}, "numbers of the 3 layers"),
        (
            {"experts": Experts(4, 2, 16), "feed_forward": FeedForward(gated=False)},
            "must be gated",
        ),
        ({"head_dim": 7}, "must be even for RoPE"),
        ({"embedding_scale": 0.0}, "must be greater than 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(PLAIN, **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Positions("sinusoidal"), "must be one of rope, learned, alibi"),
        (lambda: Positions("alibi", ropes=(Rope(),)), "must be left out for 'alibi'"),
        (lambda: Positions(of_layers=(1,)), "number of one of `ropes`"),
        (lambda: Positions(ropes=(Rope(channels=2), Rope())), "same number of channels"),
        (lambda: Experts(2, 3, 16), "at most count=2"),
        (lambda: FeedForward("swish"), "must be one of silu, gelu, gelu_tanh, relu"),
        (lambda: Norms("batch"), "'rms' or 'layer'"),
        (lambda: Attention(soft_cap=-1.0), "must not be below 0"),
        (lambda: Rope(channels=3), "0 or even"),
    ],
)
def test_options_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_alibi_and_learned_positions_need_no_even_heads():
    for kind in ("alibi", "learned"):
        config = dataclasses.replace(PLAIN, head_dim=7, positions=Positions(kind))
        assert config.ropes == ()


def test_llama3_divides_long_wavelengths_only():
    rope = Rope(1e4).llama3(16, factor=8.0, low=1.0, high=4.0, original=64)
    turns = 64 / (2 * math.pi) * 1e4 ** (-np.arange(8) / 8)
    divisors = np.array(rope.divisors)
    np.testing.assert_allclose(divisors[turns > 4], 1.0)
    np.testing.assert_allclose(divisors[turns < 1], 8.0)
    between = divisors[(turns >= 1) & (turns <= 4)]
    assert len(between) and (between > 1).all() and (between < 8).all()


def test_yarn_as_keras_nlp_computes_it():
    from keras_hub.layers import RotaryEmbedding

    settings = {"scaling_factor": 4.0, "original_max_position_embeddings": 128}
    layer = RotaryEmbedding(max_wavelength=5000, rope_type="yarn", **settings)
    rope = Rope(5000.0).yarn(16, 4.0, 128)
    expected = np.asarray(layer._get_inverse_freq(16))
    found = 5000.0 ** (-np.arange(8) / 8) / np.array(rope.divisors)
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert rope.magnitude == pytest.approx(0.1 * math.log(4.0) + 1)

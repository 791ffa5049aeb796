"""Attention of a whole text, against the layer's own output, and what states keep."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.attention_maps import attention_maps
from tfkv.cache_bytes import session_bytes
from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError

CONFIG = DecoderConfig(64, 2, 32, 4, 2, 8, 48, context_length=64)
TOKENS = np.random.default_rng(0).integers(0, 64, 24)
CACHES = ("dense", "sliding_window(window=6,sinks=2)", "streaming_llm(window=6,sinks=2)")


def model_of(cache, **options):
    tf.keras.utils.set_random_seed(1)
    return CausalLM(CONFIG, cache=cache, **options)


@pytest.mark.parametrize("cache", CACHES)
def test_weights_mix_the_values_to_what_the_layer_gives(cache):
    model = model_of(cache)
    maps = attention_maps(model, TOKENS)
    assert maps.shape == (2, 4, 24, 24)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-5)
    layer, norm = model.blocks[0].attention, model.blocks[0].attention_norm
    x = norm(model.token_embedding(TOKENS[np.newaxis]))
    positions = tf.range(24)[tf.newaxis]
    _, _, values = layer.project_in(x, positions)
    by_head = np.repeat(values.numpy()[0], 2, axis=0)
    expected, _ = layer.mixed(x, positions, None)
    mixed = np.einsum("nts,nsh->tnh", maps[0], by_head)
    np.testing.assert_allclose(mixed, expected.numpy()[0], atol=1e-5)


def test_a_window_lets_nothing_else_through():
    maps = attention_maps(model_of("sliding_window(window=6,sinks=2)"), TOKENS)
    asking, seen = np.indices((24, 24))
    allowed = (seen <= asking) & ((seen > asking - 6) | (seen < 2))
    assert (maps[:, :, ~allowed] == 0).all()
    assert (maps[:, :, allowed] > 0).all()


@pytest.mark.parametrize("tokens", [[], [[1, 2]]])
def test_a_text_is_needed(tokens):
    with pytest.raises(ConfigError, match="list of token ids"):
        attention_maps(model_of("dense"), tokens)


def read(model):
    _, state = model(tf.constant(TOKENS[np.newaxis], tf.int32), state=model.init_state(1))
    return state


def test_positions_of_a_window_are_sinks_and_newest():
    model = model_of("sliding_window(window=6,sinks=2)")
    for layer in model.kept_positions(read(model)):
        assert layer.shape == (1, 2, 8)
        for head in layer.numpy()[0]:
            assert sorted(head) == [0, 1, *range(18, 24)]


def test_positions_of_heads_with_budgets_of_their_own():
    model = model_of("recent_tokens(budget=8,budgets=(5,11),sinks=2,interval=64)")
    kept = model.kept_positions(model.evict(read(model)))
    for layer in kept:
        first, second = layer.numpy()[0]
        assert sorted(first[first >= 0]) == [0, 1, 21, 22, 23]
        assert sorted(second[second >= 0]) == [0, 1, *range(15, 24)]


def test_positions_of_an_empty_session():
    model = model_of("dense+int8", capacity=16)
    assert all((layer == -1).numpy().all() for layer in model.kept_positions(model.init_state(2)))


@pytest.mark.parametrize("cache", ["dense+int8", "dense+k4v4", "dense"])
def test_bytes_are_those_of_a_model_of_this_capacity(cache):
    model = model_of(cache, capacity=40)
    assert session_bytes(CONFIG, cache, 40) == model.bytes_per_session()


def test_a_policy_that_forgets_takes_what_it_reads_and_then_no_more():
    cache = "sliding_window(window=6,sinks=2)"
    whole = model_of(cache).bytes_per_session()
    sizes = [session_bytes(CONFIG, cache, tokens) for tokens in (4, 8, 100)]
    assert sizes == [session_bytes(CONFIG, "dense", 4), whole, whole]

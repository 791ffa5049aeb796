"""Policies that evict, on keys, values and queries of SmolLM2 instead of random ones."""

from __future__ import annotations

import functools

import eviction_reference as papers
import numpy as np
import pytest
import tensorflow as tf

from tfkv import sample_text
from tfkv.causal_lm import CausalLM
from tfkv.export import model_text
from tfkv.export.importers import load
from tfkv.layers import CachedMultiHeadAttention

TOKENS, BUDGET, INTERVAL, LAYER = 192, 48, 32, 12
SCORES = {
    "h2o(recent=16": papers.h2o,
    "tova(recent=8": lambda head: head.attention(1).mean(axis=(0, 1)),
    "snapkv(window=16": functools.partial(papers.snapkv, window=16),
    "critical_kv(window=16": functools.partial(papers.critical, window=16, budget=BUDGET),
    "defensive_kv(caps='',window=16": functools.partial(papers.defensive, window=16),
    "expected_attention(recent=8,window=32,future=64": functools.partial(
        papers.expected, window=32, future=64
    ),
    "key_diff(recent=8": papers.key_diff,
    "knorm(recent=8": papers.knorm,
    "kvzip(recent=8": papers.kvzip,
}


@pytest.fixture(scope="module")
def real() -> tuple[CausalLM, np.ndarray]:
    """SmolLM2, and what its attention in one layer is given of a real text."""
    source = load("smollm2")
    text = model_text.encode(source, sample_text.language_reference()[:4000])[:TOKENS]
    model = CausalLM.from_weights(source.config, source.weights)
    x = model.token_embedding(text[np.newaxis])
    for block in model.blocks[:LAYER]:
        x, _ = block(x)
    return model, model.blocks[LAYER].attention_norm(x).numpy()


@pytest.mark.parametrize("policy", SCORES)
def test_what_is_kept_of_a_real_text_is_the_papers(real, policy: str):
    model, x = real
    source = model.blocks[LAYER].attention
    name = policy.partition("(")[0]
    cache = f"{policy},budget={BUDGET},interval={INTERVAL},sinks=4,whole_prompt=False)"
    layer = CachedMultiHeadAttention.from_config({**source.get_config(), "cache": cache})
    layer.build(x.shape)
    layer.set_weights(source.get_weights())
    cuts = [INTERVAL] * (TOKENS // INTERVAL)
    state, outputs = layer.init_state(1), []
    for first in range(0, TOKENS, INTERVAL):
        output, state = layer(tf.constant(x[:, first : first + INTERVAL]), state=state)
        outputs.append(output.numpy()[0])
    recent = layer.cache.policy.recent
    names = ("query", "key", "value", "output")
    output, kept = papers.session(
        x[0],
        dict(zip(names, layer.get_weights(), strict=True)),
        cuts,
        SCORES[policy],
        [BUDGET] * 3,
        INTERVAL,
        4,
        recent,
        source.rope_max_wavelength,
        highest=name == "kvzip",
        together=name == "tova",
    )
    held = layer.store.view(state).positions.numpy()[0]
    for head in range(3):
        assert held[head][held[head] >= 0].tolist() == kept[head]
    # float32 against float64: sums of 576 terms that reach 11.
    np.testing.assert_allclose(np.concatenate(outputs), output, atol=5e-5)

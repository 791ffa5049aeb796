from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from own_models import VOCABULARY, WIDTH, Learned, decoder, naive, trained, translator

from tfkv.cached_model import CachedModel
from tfkv.errors import ConfigError
from tfkv.generation import Generator, generate_without_cache
from tfkv.layers import CachedMultiHeadAttention
from tfkv.layers.keras_api import keras

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [3]]


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return trained(decoder())


@pytest.fixture(scope="module")
def cached(model: keras.Model) -> CachedModel:
    return CachedModel(model)


def test_generates_what_the_model_says_without_a_cache(model: keras.Model, cached: CachedModel):
    expected = naive(model, PROMPTS, 12)
    assert len({tuple(row) for row in expected}) == 3
    assert cached.generate(PROMPTS, 12) == expected
    assert generate_without_cache(cached, PROMPTS, 12, xla=False) == expected


def test_compiles_once_for_a_batch_size_and_sees_training(model: keras.Model, cached: CachedModel):
    cached.generate(PROMPTS, 2)
    traces, before = cached.generator.traces, model.get_weights()
    model.layers[-1].bias.assign(np.eye(VOCABULARY)[7] * 50)
    assert cached.generate([[2] * 20, [9], [1, 2]], 3) == [[7, 7, 7]] * 3
    assert cached.generator.traces == traces
    model.set_weights(before)


def test_stops_and_samples_as_it_is_told(model: keras.Model, cached: CachedModel):
    greedy = cached.generate(PROMPTS, 10)
    stop = greedy[1][4]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in greedy]
    assert cached.generate(PROMPTS, 10, [stop]) == expected
    assert cached.generate(PROMPTS, 10, temperature=2.0, top_k=1) == greedy
    drawn = cached.generate(PROMPTS, 10, temperature=2.0, seed=5)
    assert drawn == cached.generate(PROMPTS, 10, temperature=2.0, seed=5) != greedy
    assert drawn != cached.generate(PROMPTS, 10, temperature=2.0, seed=6)
    rows = cached.generate([[1, 2], [1, 2], [1, 2]], 10, temperature=2.0)
    assert rows[0] != rows[1]


def test_layers_have_the_caches_they_were_made_with():
    model = decoder(["int8", "bfloat16", "quest(pages=2,page_size=4)"])
    cached = CachedModel(model)
    assert [str(layer.cache) for layer in cached.layers] == [
        "dense+int8",
        "dense+bfloat16",
        "quest(pages=2,page_size=4)+float32",
    ]
    state = cached.begin(2)
    held = sum(tensor.numpy().nbytes for own in state["caches"] for tensor in own.values())
    assert held == 2 * cached.bytes_per_session()
    assert cached.most_tokens == 48
    cached.check()


def test_a_session_that_would_not_fit_is_refused(cached: CachedModel):
    with pytest.raises(ConfigError, match="must fit `capacity`=48 tokens"):
        cached.generate([[1] * 40] * 3, 9)


def test_subclassed_models_get_positions_and_shared_keys():
    keras.utils.set_random_seed(4)
    model = Learned()
    model(np.array([[1, 2]], np.int32))
    # Lively enough to say more than one word.
    model.set_weights([4 * weight for weight in model.get_weights()])
    cached = _interpreted(model, lambda tokens, positions, _: model(tokens, positions))
    expected = naive(model, PROMPTS, 8)
    assert len({token for row in expected for token in row}) > 4
    assert cached.generate(PROMPTS, 8) == expected
    assert [layer is model.twice for layer in cached.layers] == [False, True, True]
    with pytest.raises(ConfigError, match="count positions from 0"):
        CachedModel(model).check()


def test_encoders_run_once_and_are_dropped_from_decode_steps():
    model = translator()
    cached = _interpreted(model, lambda tokens, _, given: model([given["source"], tokens]))
    source = np.array([[3, 4, 5, 6], [7, 8, 0, 0], [9, 10, 11, 0]], np.int32)
    expected = []
    for row, prompt in zip(source, PROMPTS, strict=True):
        own = [row[row > 0].tolist()]
        expected += naive(lambda t, own=own: model([np.array(own, np.int32), t]), [prompt], 7)
    assert cached.generate(PROMPTS, 7, context={"source": source}) == expected

    state = cached.begin(3, {"source": source})
    assert state["caches"][1]["given"].numpy()[:, :4].tolist() == (source > 0).tolist()

    def step(tokens: tf.Tensor, source: tf.Tensor, caches: list) -> tf.Tensor:
        return cached.hidden_states(tokens, None, {"caches": caches, "context": {"source": source}})

    arguments = (tf.zeros([3, 1], tf.int32), tf.constant(source), state["caches"])
    whole = _computed(lambda tokens, source, _: model([source, tokens]), arguments)
    assert any("37]" in line for line in whole)
    assert not any("37]" in line for line in _computed(step, arguments))


def _interpreted(model: keras.Model, call: Callable[..., tf.Tensor]) -> CachedModel:
    """A model that XLA does not compile, which takes it longer than the steps themselves."""
    cached = CachedModel(model, call)
    cached.generator = Generator(cached, prefill_chunk=8, decode_chunk=8, xla=False)
    return cached


def _computed(function: Callable[..., object], arguments: tuple) -> list[str]:
    """What a compiled function computes: its HLO but for what it is given."""
    compiled = tf.function(function, jit_compile=True)
    hlo = compiled.experimental_get_compiler_ir(*arguments)("optimized_hlo")
    return [line for line in hlo.splitlines() if " = " in line and " parameter(" not in line]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (keras.layers.Conv1D(WIDTH, 3, padding="causal"), "does a layer that is not of"),
        (keras.layers.GRU(WIDTH, return_sequences=True), "does a layer that is not of"),
    ],
    ids=["convolution", "recurrence"],
)
def test_refuses_a_model_that_looks_at_other_tokens_by_itself(layer: object, message: str):
    tokens = keras.Input([None], dtype="int32")
    x = layer(keras.layers.Embedding(VOCABULARY, WIDTH)(tokens))
    x = x + CachedMultiHeadAttention(2, 12, capacity=16)(x)[0]
    model = keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))
    with pytest.raises(ConfigError, match=f"(?i){message}"):
        CachedModel(model).generate([[1, 2]], 3)


def test_refuses_models_that_it_can_do_nothing_for():
    tokens = keras.Input([None], dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    with pytest.raises(ConfigError, match="called no layer with a cache"):
        CachedModel(keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))).generate([[1]], 1)
    pooled = keras.Model(tokens, keras.layers.GlobalAveragePooling1D()(x))
    with pytest.raises(ConfigError, match=r"must give logits \[B, T, V\]"):
        CachedModel(pooled).generate([[1]], 1)
    with pytest.raises(ConfigError, match="must have 2 rows, one for each prompt"):
        CachedModel(decoder()).begin(2, {"source": np.zeros([3, 4], np.int32)})


def test_mixed_precision_generates_and_stays_within_rounding():
    keras.utils.set_random_seed(1)
    model = decoder(dtype="mixed_bfloat16")
    cached = CachedModel(model)
    cached.check()
    state = cached.begin(1)
    assert all(own["keys/codes"].dtype == tf.float32 for own in state["caches"])
    text = tf.constant([[1, 2, 3, 4, 5, 6]])
    logits, _ = cached.hidden_states(text, state=state)
    np.testing.assert_allclose(logits, model(text), atol=0.05)

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tfkv.architecture import Attention, Positions, Rope
from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import CacheError, ConfigError, ModelSourceError
from tfkv.export.layer_groups import LayerGroups
from tfkv.generation import generate, generate_without_cache
from tfkv.layers.keras_api import keras

CONFIG = DecoderConfig(
    vocabulary_size=41,
    num_layers=2,
    hidden_dim=24,
    num_query_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_dim=40,
    rope_max_wavelength=100.0,
    context_length=32,
)
UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False)


def _model(config: DecoderConfig = CONFIG, **kwargs) -> CausalLM:
    keras.utils.set_random_seed(4)
    return CausalLM(config, **kwargs)


def _ids(batch: int = 2, length: int = 12) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 41, [batch, length]).astype(np.int32)


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_equals_keras_nlp(config: DecoderConfig):
    """The same weights give keras-nlp's logits."""
    models = pytest.importorskip("keras_hub").models
    keras.utils.set_random_seed(4)
    backbone = models.LlamaBackbone(
        vocabulary_size=config.vocabulary_size,
        num_layers=config.num_layers,
        num_query_heads=config.num_query_heads,
        num_key_value_heads=config.num_key_value_heads,
        hidden_dim=config.hidden_dim,
        intermediate_dim=config.intermediate_dim,
        rope_max_wavelength=config.rope_max_wavelength,
        layer_norm_epsilon=config.rms_epsilon,
        tie_word_embeddings=config.tie_embeddings,
    )
    embedding = backbone.token_embedding
    weights = {"token_embedding": embedding.embeddings.numpy()}
    for index, layer in enumerate(backbone.transformer_layers):
        paths = {w.path.partition("/")[2]: w.numpy() for w in layer.weights}
        named = {
            "query": "self_attention/query/kernel",
            "key": "self_attention/key/kernel",
            "value": "self_attention/value/kernel",
            "attention_output": "self_attention/attention_output/kernel",
            "attention_norm": "self_attention_layernorm/scale",
            "feedforward_norm": "feedforward_layernorm/scale",
            "gate": "feedforward_gate_dense/kernel",
            "up": "feedforward_intermediate_dense/kernel",
            "down": "feedforward_output_dense/kernel",
        }
        weights |= {f"layers/{index}/{name}": paths[path] for name, path in named.items()}
    weights["final_norm"] = backbone.layer_norm.scale.numpy()
    if not config.tie_embeddings:
        weights["output"] = embedding.reverse_embeddings.numpy().T
    model = CausalLM.from_weights(config, weights)
    ids = _ids()
    hidden = backbone({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    expected = embedding(hidden, reverse=True)
    np.testing.assert_allclose(model(ids), expected, atol=1e-4)
    with_cache, _ = model(ids, state=model.init_state(2))
    np.testing.assert_allclose(with_cache, expected, atol=1e-4)


@pytest.mark.parametrize("cache", ["dense", "sliding_window(window=5,sinks=1)"])
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_chunks_equal_the_whole(config: DecoderConfig, cache: str):
    model, ids = _model(config, cache=cache), _ids()
    state, pieces = model.init_state(2), []
    for first, last in ((0, 7), (7, 8), (8, 12)):
        logits, state = model(ids[:, first:last], state=state)
        pieces.append(logits)
    np.testing.assert_allclose(tf.concat(pieces, 1), model(ids), atol=1e-5)
    assert tf.nest.map_structure(lambda t: (t.shape, t.dtype), state) == tf.nest.map_structure(
        lambda s: (s.shape, s.dtype), model.get_state_spec(2)
    )
    held = sum(tensor.numpy().nbytes for layer in state for tensor in layer.values())
    assert model.bytes_per_session() * 2 == held


def test_padding_on_any_side_is_not_there():
    """tensorflow/serving #1279: what is padding is said, never inferred from a real token id."""
    model, ids = _model(), _ids(1, 5)
    padded = np.full([3, 8], -1, np.int32)
    padded[0, :5] = padded[1, 3:] = ids[0]
    logits, state = model(padded, state=model.init_state(3))
    expected = model(ids)[0]
    np.testing.assert_allclose(logits[0, :5], expected, atol=1e-5)
    np.testing.assert_allclose(logits[1, 3:], expected, atol=1e-5)
    np.testing.assert_allclose(model(padded)[1, 3:], expected, atol=1e-5)
    assert state[1]["filled"].numpy().tolist() == [5, 5, 0]


def test_a_full_session_is_refused():
    model = _model(capacity=8)
    _, state = model(_ids(2, 8), state=model.init_state(2))
    with pytest.raises(CacheError, match="at most 8 tokens"):
        model(_ids(2, 1), state=state)


def test_weights_by_canonical_name():
    model = _model(UNTIED)
    weights = model.export_weights()
    shapes = {name: value.shape for name, value in weights.items() if "layers/1" not in name}
    assert shapes == {
        "token_embedding": (41, 24),
        "layers/0/query": (24, 4, 6),
        "layers/0/key": (24, 2, 6),
        "layers/0/value": (24, 2, 6),
        "layers/0/attention_output": (4, 6, 24),
        "layers/0/attention_norm": (24,),
        "layers/0/feedforward_norm": (24,),
        "layers/0/gate": (24, 40),
        "layers/0/up": (24, 40),
        "layers/0/down": (40, 24),
        "final_norm": (24,),
        "output": (41, 24),
    }
    twin = CausalLM.from_weights(UNTIED, weights)
    np.testing.assert_array_equal(twin(_ids()), model(_ids()))
    assert len(model.weights) == len(weights)


def test_wrong_weights_are_refused_and_none_is_set():
    model = _model()
    before = model.export_weights()
    doubled = {name: value * 2 for name, value in before.items()}
    wrong = {
        "lacks 'layers/1/up'": {k: v for k, v in doubled.items() if k != "layers/1/up"},
        "has an unknown 'output'": {**doubled, "output": before["token_embedding"]},
        r"final_norm'\]` must have shape \(24,\).*\(23,\)": {**doubled, "final_norm": np.ones(23)},
    }
    for message, weights in wrong.items():
        with pytest.raises(ModelSourceError, match=message):
            model.assign_weights(weights)
    for name, value in model.export_weights().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_learns_and_comes_back_from_a_file(config: DecoderConfig, tmp_path):
    model = _model(config, cache="sliding_window(window=8)+int8")
    text = np.tile(np.arange(6, dtype=np.int32), [8, 3])
    text[4:, 12:] = -1
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    history = model.fit(text[:, :-1], text[:, 1:], epochs=30, verbose=0).history["loss"]
    assert history[-1] < 0.1 * history[0]
    model.save(tmp_path / "model.keras")
    twin = keras.saving.load_model(tmp_path / "model.keras")
    assert twin.get_config() == model.get_config()
    assert twin.get_config()["cache"] == "sliding_window(window=8)+int8"
    np.testing.assert_array_equal(twin(_ids()), model(_ids()))


def test_mixed_precision_answers_in_float32():
    model = _model(dtype="mixed_bfloat16")
    exact = CausalLM.from_weights(CONFIG, model.export_weights())
    logits, state = model(_ids(), state=model.init_state(2))
    assert logits.dtype == tf.float32
    assert state[0]["keys/codes"].dtype == tf.float32
    np.testing.assert_allclose(logits, exact(_ids()), atol=0.05)


def test_configuration_is_checked():
    with pytest.raises(ConfigError, match="no field 'layers'"):
        CausalLM({"layers": 3})
    with pytest.raises(ConfigError, match="Did you mean 'dense'"):
        CausalLM(CONFIG, cache="dens")


SHARED = dataclasses.replace(
    CONFIG, num_layers=4, attention=Attention(share_kv_with=(-1, 0, -1, 2), query_key_epsilon=1e-5)
)


@pytest.mark.parametrize("cache", ["dense", "sliding_window(window=5,sinks=1)+int8"])
def test_layers_that_share_keys_and_values(cache: str):
    model, ids = _model(SHARED, cache=cache), _ids()
    whole, _ = model(ids, state=model.init_state(2))
    state, pieces = model.init_state(2), []
    for first, last in ((0, 7), (7, 8), (8, 12)):
        logits, state = model(ids[:, first:last], state=state)
        pieces.append(logits)
    np.testing.assert_allclose(tf.concat(pieces, 1), whole, atol=1e-5)
    assert [bool(own) for own in state] == [True, False, True, False]
    alone = _model(dataclasses.replace(SHARED, attention=Attention()), cache=cache)
    assert model.bytes_per_session() * 2 == alone.bytes_per_session()
    kept = model.kept_positions(state)
    np.testing.assert_array_equal(kept[1], kept[0])


def test_layers_that_share_have_no_weights_for_it(tmp_path):
    model = _model(SHARED)
    names = {name for name in model.export_weights() if name.startswith("layers/1/")}
    assert names & {f"layers/1/{name}" for name in ("key", "value", "key_norm")} == set()
    assert "layers/1/query_norm" in names and "layers/2/key_norm" in model.export_weights()
    path = str(tmp_path / "model.keras")
    model.save(path)
    other = keras.models.load_model(path)
    np.testing.assert_allclose(other(_ids()), model(_ids()), atol=1e-6)


def test_layers_that_share_train_and_generate():
    model = _model(SHARED)
    text = (np.arange(64)[:, np.newaxis] * 7 + np.arange(13)) % 41
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    model.compile(keras.optimizers.Adam(0.01), loss)
    losses = model.fit(text[:, :-1], text[:, 1:], epochs=12, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 4
    prompts = [[3, 4, 5], [20, 21, 22, 23, 24]]
    expected = generate_without_cache(model, prompts, 6)
    assert generate(model, prompts, 6) == expected
    assert expected[1] == [25, 26, 27, 28, 29, 30]


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ((0, -1, -1, -1), "layer 0 -1, or the number of an earlier layer"),
        ((-1, 2, -1, -1), "layer 1 -1, or the number of an earlier layer"),
        ((-1, 0, 1, -1), "layer 2 one that has keys and values of its own"),
        ((-1, 0), "one number for each of 4 layers"),
    ],
)
def test_which_layers_can_share(shared: tuple[int, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SHARED, attention=Attention(share_kv_with=shared))


def test_layers_that_turn_keys_otherwise_cannot_share():
    ropes = Positions(ropes=(Rope(10.0), Rope(100.0)), of_layers=(0, 1, 0, 0))
    with pytest.raises(ConfigError, match="must name layers of the same rotation"):
        dataclasses.replace(SHARED, positions=ropes)


def test_paged_artifacts_refuse_layers_that_share():
    with pytest.raises(ConfigError, match=r"tfkv.export.export_keras"):
        LayerGroups.of(SHARED, EngineConfig(), 64)

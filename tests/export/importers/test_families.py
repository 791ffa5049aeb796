"""Every family of keras-nlp, with all of its options on, against keras-nlp itself.

A family counts where all three hold: logits, cached decoding, an artifact's greedy tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

import family_cases
import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
from family_cases import CASES, build
from tiny_artifacts import PLAIN, Caller, write

from tfkv.architecture import Attention, FeedForward, Norms, Positions
from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import ConfigError, ModelSourceError
from tfkv.export import LoadedArtifact, export, from_keras_nlp
from tfkv.export.importers import ModelSource, expected_tensors
from tfkv.export.importers.families import FAMILIES, family_of
from tfkv.export.importers.families.parity import check_parity, keras_nlp_logits

#: Families that show positions, layers and scores of all kinds; the others' artifacts are slow.
_TELLING = ("gpt_2", "gemma_3", "bloom")
_EXPORTED = [
    case if case in _TELLING else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]
_ENGINE = EngineConfig(**{**PLAIN.to_dict(), "slots": 2, "batch_sizes": (2,), "prefill_tokens": 64})
#: All random tokens of a test, and how many of each row.
_WIDTH, _LENGTHS = 21, (21, 15)


@functools.cache
def _read(case: str) -> tuple[object, ModelSource]:
    backbone = build(case)
    return backbone, from_keras_nlp(backbone)


def _text(config: DecoderConfig) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a ragged batch, and which are no padding."""
    tokens = np.random.default_rng(3).integers(0, config.vocabulary_size, (2, _WIDTH))
    return tokens.astype(np.int32), np.arange(_WIDTH) < np.array(_LENGTHS)[:, np.newaxis]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_keras_nlp(case, record_property):
    backbone, source = _read(case)
    family, _ = family_of(backbone)
    assert family.name == CASES[case][0]
    gap = check_parity(source, family, backbone)
    record_property("family", family.name)
    record_property("logit_gap", gap)
    assert gap <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_a_manifest_holds_the_architecture(case):
    config = _read(case)[1].config
    assert DecoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("case", CASES)
def test_cached_decoding_equals_one_pass_of_keras_nlp(case, record_property):
    """A ragged batch, in chunks and token by token."""
    backbone, source = _read(case)
    tokens, given = _text(source.config)
    expected = keras_nlp_logits(backbone, tokens, given)
    model = CausalLM.from_weights(source.config, source.weights, capacity=_WIDTH)
    assert {n: w.shape for n, w in model.export_weights().items()} == dict(
        expected_tensors(source.config)
    )
    rows, state, logits = np.where(given, tokens, -1), model.init_state(2), []
    for first, end in ((0, 8), (8, 18), *((at, at + 1) for at in range(18, _WIDTH))):
        found, state = model(rows[:, first:end], state=state)
        logits.append(np.asarray(found))
    np.testing.assert_allclose(
        np.concatenate(logits, axis=1)[given], expected[given], rtol=0, atol=1e-4
    )
    record_property("family", CASES[case][0])


def _greedy(backbone: object, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The tokens that follow, by keras-nlp's logits of the whole text. Not by its `generate`:
    that of GPT-NeoX turns all queries of cached steps by the angle of position 0."""
    width = max(map(len, prompts)) + count

    @tf.function
    def next_tokens(tokens: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
        mask = tf.sequence_mask(lengths, width, tf.int32)
        hidden = backbone({"token_ids": tokens, "padding_mask": mask})
        last = tf.gather(hidden, lengths - 1, batch_dims=1)[:, tf.newaxis]
        return tf.argmax(backbone.token_embedding(last, reverse=True)[:, 0], axis=-1)

    texts = [list(prompt) for prompt in prompts]
    for _ in range(count):
        padded = np.zeros((len(texts), width), np.int32)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        chosen = next_tokens(tf.constant(padded), tf.constant([len(text) for text in texts]))
        for text, token in zip(texts, chosen.numpy(), strict=True):
            text.append(int(token))
    return [text[-count:] for text in texts]


def _furthest_look(caller: Caller, tokens: Sequence[int], layer: int) -> int:
    """How many tokens the last one of a text attends to in a layer, by the `attention`
    signature."""
    name = caller.name()
    caller.generate(name, tokens, count=0)
    answer = caller.call("attention", name, (), -1, layer=[layer])
    seen = answer["positions"][(answer["weights"] > 0).any(axis=0)]
    caller.close(name)
    return len(tokens) - int(seen.min())


def _generated(caller: Caller, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What an artifact says, a chunk a call."""
    names, made = [caller.name() for _ in prompts], [[] for _ in prompts]
    while len(made[0]) < count:
        first = not made[0]
        position = 0 if first else [len(p) + len(m) for p, m in zip(prompts, made, strict=True)]
        answer = caller.generate(names, prompts if first else [[]] * len(names), position)
        assert not answer["status"].any()
        for row, tokens in zip(made, answer["tokens"], strict=True):
            row += map(int, tokens)
    for name in names:
        caller.close(name)
    return made


@pytest.mark.parametrize("case", _EXPORTED)
def test_an_artifact_says_what_keras_nlp_says(case, tmp_path, record_property):
    """Greedily, 32 tokens after each prompt of a ragged batch."""
    backbone, source = _read(case)
    tokens, _ = _text(source.config)
    prompts = [tokens[0, :17].tolist(), tokens[1, :5].tolist()]
    with LoadedArtifact(write(source, tmp_path, _ENGINE)) as artifact:
        assert artifact.manifest.model == source.config
        caller = Caller(artifact)
        made = _generated(caller, prompts, 32)
        for layer, window in enumerate(source.config.attention.windows):
            whole = len(prompts[0])
            assert _furthest_look(caller, prompts[0], layer) == min(window or whole, whole)
    assert made == _greedy(backbone, prompts, 32)
    record_property("family", CASES[case][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "cache"),
    [
        ("bloom", "dense+int8"),
        ("bloom", "snapkv(budget=40,sinks=2,window=16,interval=64)"),
        ("gemma_3", "k4v4(recent=64)"),
        ("gemma_3", "snapkv(budget=40,sinks=2,window=16,interval=64)"),
        ("gemma_3", "streaming_llm(window=61,sinks=3)"),
        ("gpt_2", "sliding_window(window=12,sinks=2)+int8"),
        ("qwen_moe", "sliding_window(window=12)"),
    ],
)
def test_other_caches_serve_what_the_keras_model_computes(case, cache, tmp_path):
    """`export` compares both, and raises where they differ; here with XLA."""
    engine = EngineConfig(**{**_ENGINE.to_dict(), "xla": True, "cache": cache, "capacity": 192})
    export(_read(case)[1], tmp_path, engine)


@pytest.mark.parametrize("case", ["gemma_3", "bloom", "qwen_moe"])
def test_a_keras_model_is_saved_with_its_options(case, tmp_path):
    _, source = _read(case)
    model = CausalLM.from_weights(source.config, source.weights, capacity=_WIDTH)
    model.save(tmp_path / "model.keras")
    twin = keras.saving.load_model(tmp_path / "model.keras")
    assert twin.config == source.config
    tokens, _ = _text(source.config)
    np.testing.assert_array_equal(twin(tokens), model(tokens))


# What differs is noticed.

_OFF: dict[str, tuple[str, Callable[[DecoderConfig], dict[str, object]]]] = {
    "windows": ("gemma_3", lambda c: {"attention": _attention(c, windows=())}),
    "soft cap": ("gemma_2", lambda c: {"attention": _attention(c, soft_cap=0.0)}),
    "final soft cap": ("gemma_2", lambda c: {"final_soft_cap": 0.0}),
    "embedding scale": ("gemma_1", lambda c: {"embedding_scale": 1.0}),
    "epsilon": ("gemma_1", lambda c: {"norms": Norms()}),
    "query scale": ("gemma_1", lambda c: {"attention": _attention(c, query_scale=0.3)}),
    "local rope": ("gemma_3", lambda c: {"positions": Positions()}),
    "layers without rope": ("smollm_3", lambda c: {"positions": Positions()}),
    "scaled rope": ("llama_3", lambda c: {"positions": Positions()}),
    "long rope": ("phi_3", lambda c: {"positions": Positions()}),
    "partial rope": ("gpt_neo_x", lambda c: {"positions": Positions(of_layers=(-1,) * 3)}),
    "alibi's scale": ("falcon", lambda c: {"positions": Positions("alibi")}),
    "parallel": ("gpt_neo_x", lambda c: {"parallel_residual": False}),
    "activation": ("falcon", lambda c: {"feed_forward": FeedForward("gelu_tanh", False, True)}),
    "normalised experts": (
        "mixtral",
        lambda c: {"experts": dataclasses.replace(c.experts, normalize=False)},
    ),
    "number of experts": (
        "mixtral",
        lambda c: {"experts": dataclasses.replace(c.experts, top_k=3)},
    ),
}


def _attention(config: DecoderConfig, **changes: object) -> Attention:
    return dataclasses.replace(config.attention, **changes)


@pytest.mark.parametrize("option", _OFF)
def test_a_wrong_option_is_refused(option):
    case, changed = _OFF[option]
    backbone, source = _read(case)
    wrong = dataclasses.replace(source.config, **changed(source.config))
    with pytest.raises(ModelSourceError, match="computes something else.*float32 rounding"):
        check_parity(dataclasses.replace(source, config=wrong), family_of(backbone)[0], backbone)


def test_the_first_layer_that_differs_is_named():
    backbone, source = _read("qwen_2")
    weights = {**source.weights, "layers/1/key_bias": 0 * source.weights["layers/1/key_bias"] + 1}
    with pytest.raises(ModelSourceError, match="output of layer 1 is the first that differs"):
        check_parity(dataclasses.replace(source, weights=weights), family_of(backbone)[0], backbone)


def test_a_model_that_computes_in_bfloat16_is_compared_in_float32():
    backbone = build("llama_3", dtype="bfloat16")
    source = from_keras_nlp(backbone)
    assert check_parity(source, family_of(backbone)[0], backbone) < 1e-4


def test_long_rope_follows_the_context_length():
    backbone = build("phi_3")
    long = from_keras_nlp(backbone, context_length=256).config.positions.ropes[0]
    short = from_keras_nlp(backbone, context_length=128).config.positions.ropes[0]
    assert long.divisors == (1.5, 4.0, 9.0)
    assert short.divisors == (1.0, 1.5, 2.5)
    assert long.magnitude == short.magnitude > 1


def test_a_window_that_holds_the_whole_context_is_none():
    backbone = _read("qwen_3")[0]
    assert from_keras_nlp(backbone, context_length=9).config.attention.windows == ()
    assert from_keras_nlp(backbone, context_length=10).config.attention.windows == (9, 9, 9)


# What is not supported says so.


def test_an_unknown_class_is_refused_with_those_that_are_known():
    other = type("GPT2Backbone", (keras_hub.models.GPT2Backbone,), {})
    model = other(**family_cases.CASES["gpt_2"][2])
    with pytest.raises(ModelSourceError, match="GPT2Backbone is not supported.*Gemma 3.*Bloom"):
        from_keras_nlp(model)


def test_an_embedding_model_is_refused():
    with pytest.raises(ModelSourceError, match="Gemma 3 cannot be exported.*embeddings"):
        from_keras_nlp(build("gemma_3", use_bidirectional_attention=True))


def test_a_table_of_positions_is_as_long_as_it_is():
    with pytest.raises(ModelSourceError, match="learned 128 positions"):
        from_keras_nlp(_read("gpt_2")[0], context_length=64)


@pytest.mark.parametrize(
    ("case", "cache", "message"),
    [
        ("bloom", "streaming_llm(window=60,sinks=4)", "'alibi' positions.*'sliding_window'"),
        ("gpt_2", "streaming_llm(window=60,sinks=4)", "'learned' positions.*'sliding_window'"),
        ("bloom", "expected_attention(budget=64)", "without ALiBi's slopes.*'snapkv'"),
    ],
)
def test_a_cache_that_relies_on_rotation_is_refused(case, cache, message, tmp_path):
    source = _read(case)[1]
    with pytest.raises(ConfigError, match=message):
        CausalLM(source.config, cache=cache)
    with pytest.raises(ConfigError, match=message):
        export(source, tmp_path, PLAIN, cache=cache)


def test_foreseeing_layers_that_turn_apart_is_left_to_keras_models(tmp_path):
    source = _read("gemma_3")[1]
    CausalLM(source.config, cache="expected_attention(budget=64)")
    with pytest.raises(ConfigError, match="turn them differently"):
        export(source, tmp_path, PLAIN, cache="expected_attention(budget=64,interval=64)")


def test_causal_models_are_taken_as_well():
    backbone, source = _read("bloom")
    found = from_keras_nlp(keras_hub.models.BloomCausalLM(backbone, preprocessor=None))
    assert found.config == source.config


def test_every_family_has_a_case():
    assert {family for family, _, _ in CASES.values()} == {family.name for family in FAMILIES}

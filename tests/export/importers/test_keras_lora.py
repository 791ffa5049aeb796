"""LoRA weights of keras-nlp, taken apart from the base they were trained beside."""

import family_cases
import keras
import numpy as np
import pytest
from keras_hub.models import LlamaBackbone

from tfkv.errors import ConfigError, ModelSourceError
from tfkv.export import LoraAdapter, lora_from_keras_nlp
from tfkv.export.adapter_sources import load_adapters
from tfkv.export.importers.keras_lora import lora_from_file
from tfkv.export.importers.keras_nlp import from_keras_nlp, read_frozen

_SIZES = {
    "vocabulary_size": 61,
    "num_layers": 3,
    "hidden_dim": 24,
    "intermediate_dim": 40,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
}
_NAMES = ["query", "key", "value", "attention_output"]
_EVERY = [*_NAMES, "feedforward_gate_dense", "feedforward_intermediate_dense"]
_EVERY.append("feedforward_output_dense")


def train(backbone, rank=3, targets=None, seed=0):
    """Turns LoRA on, and gives it weights as training would."""
    backbone.enable_lora(rank, targets)
    draw = np.random.default_rng(seed)
    for layer in backbone._flatten_layers():
        if getattr(layer, "lora_enabled", False) and hasattr(layer, "lora_kernel_b"):
            layer.lora_kernel_b.assign(draw.normal(size=layer.lora_kernel_b.shape) * 0.2)
    return backbone


def llama(**changes):
    keras.utils.set_random_seed(1)
    return LlamaBackbone(**{**_SIZES, **changes})


def merged(backbone):
    """What the export of the model itself takes."""
    return from_keras_nlp(backbone, check=False).weights


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", family_cases.CASES)
def test_an_adapter_beside_the_base_is_the_merged_model(case):
    """By default keras-nlp adds to queries and values; SmolLM3 and GPT-NeoX call them otherwise."""
    backbone = family_cases.build(case)
    names = {"smollm_3": ["q_proj", "v_proj"], "gpt_neo_x": ["query_key_value"]}
    train(backbone, targets=names.get(case))
    frozen = read_frozen(backbone)
    adapter = lora_from_keras_nlp(backbone)
    adapter.check(frozen.config, frozen.weights)
    assert adapter.rank == 3
    changed = adapter.merged(frozen.weights)
    assert np.abs(changed["layers/0/value"] - frozen.weights["layers/0/value"]).max() > 1e-2
    assert_same(changed, merged(backbone))


def test_every_matrix_of_a_block_can_be_taken():
    backbone = train(llama(), targets=_EVERY)
    adapter = lora_from_keras_nlp(backbone)
    assert adapter.targets == ("query", "key", "value", "attention_output", "gate", "up", "down")
    assert len(adapter.factors) == 21
    assert_same(adapter.merged(read_frozen(backbone).weights), merged(backbone))


def test_alpha_scales_what_is_added():
    backbone = llama()
    layer = backbone.transformer_layers[1]._self_attention_layer._query_dense
    layer.enable_lora(4, lora_alpha=10)
    layer.lora_kernel_b.assign(keras.ops.ones_like(layer.lora_kernel_b))
    adapter = lora_from_keras_nlp(backbone)
    assert list(adapter.factors) == ["layers/1/query"]
    np.testing.assert_allclose(adapter.factors["layers/1/query"][1], 2.5)
    assert_same(adapter.merged(read_frozen(backbone).weights), merged(backbone))


@pytest.mark.parametrize("targets", [None, _EVERY])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("given", [True, False])
def test_a_file_of_keras_nlp_is_the_model_it_was_saved_from(tmp_path, layers, targets, given):
    base = from_keras_nlp(llama(num_layers=layers), check=False)
    tuned = train(llama(num_layers=layers), targets=targets)
    path = tmp_path / "legal.lora.h5"
    tuned.save_lora_weights(path)
    model = llama(num_layers=layers) if given else None
    adapter = lora_from_file(path, base.config, model)
    adapter.check(base.config, base.weights)
    assert adapter.fingerprint == lora_from_keras_nlp(tuned, base).fingerprint
    assert_same(adapter.merged(base.weights), merged(tuned))


def test_a_file_of_another_family_needs_its_model(tmp_path):
    tuned = train(family_cases.build("gemma_1"))
    base = read_frozen(tuned)
    path = tmp_path / "legal.lora.h5"
    tuned.save_lora_weights(path)
    with pytest.raises(ModelSourceError, match="no plain Llama"):
        lora_from_file(path, base.config)
    adapter = lora_from_file(path, base.config, family_cases.build("gemma_1"))
    assert_same(adapter.merged(base.weights), merged(tuned))


def test_its_own_file_brings_an_adapter_back(tmp_path):
    adapter = lora_from_keras_nlp(train(llama()))
    path = tmp_path / "legal.safetensors"
    adapter.save(path)
    again = LoraAdapter.load(path)
    assert (again.base, again.description) == (adapter.base, adapter.description)
    assert again.fingerprint == adapter.fingerprint
    assert again.fingerprint != lora_from_keras_nlp(train(llama(), seed=1)).fingerprint


def test_sources_of_all_kinds_are_read(tmp_path):
    base, tuned = llama(), train(llama())
    adapter = lora_from_keras_nlp(tuned)
    adapter.save(tmp_path / "own.safetensors")
    tuned.save_lora_weights(tmp_path / "theirs.lora.h5")
    sources = {
        "model": tuned,
        "adapter": adapter,
        "own": tmp_path / "own.safetensors",
        "theirs": str(tmp_path / "theirs.lora.h5"),
    }
    found = load_adapters(sources, from_keras_nlp(base, check=False), base)
    assert list(found) == list(sources)
    assert {one.fingerprint for one in found.values()} == {adapter.fingerprint}


def test_another_base_is_refused(tmp_path):
    tuned = train(llama())
    keras.utils.set_random_seed(2)
    other = from_keras_nlp(LlamaBackbone(**_SIZES), check=False)
    with pytest.raises(ModelSourceError, match="'legal'.*'token_embedding' differs"):
        load_adapters({"legal": tuned}, other)
    lora_from_keras_nlp(tuned).save(tmp_path / "legal.safetensors")
    with pytest.raises(ModelSourceError, match="'legal'.*trained beside other weights"):
        load_adapters({"legal": tmp_path / "legal.safetensors"}, other)
    with pytest.raises(ModelSourceError, match="'legal'.*'layers/0/query' differs"):
        load_adapters({"legal": tuned}, from_keras_nlp(tuned, check=False))
    wide = from_keras_nlp(llama(hidden_dim=32), check=False)
    tuned.save_lora_weights(tmp_path / "legal.lora.h5")
    with pytest.raises(ModelSourceError, match="'legal'.*do not fit 'layers/0/query'"):
        load_adapters({"legal": tmp_path / "legal.lora.h5"}, wide)
    short = from_keras_nlp(llama(num_layers=2), check=False)
    with pytest.raises(ModelSourceError, match="'legal'.*the layer number"):
        load_adapters({"legal": tmp_path / "legal.lora.h5"}, short)


def test_layers_that_cannot_be_taken_are_named():
    with pytest.raises(ModelSourceError, match="token_embedding"):
        lora_from_keras_nlp(train(llama(), targets=["token_embedding", "query"]))
    mixture = family_cases.build("mixtral")
    router = mixture.transformer_layers[0]._sparse_moe_block._sparse_feedforward_gate_dense
    router.enable_lora(2)
    with pytest.raises(ModelSourceError, match=router.path):
        lora_from_keras_nlp(mixture)
    with pytest.raises(ModelSourceError, match="has no LoRA weights"):
        lora_from_keras_nlp(llama())


@pytest.mark.parametrize("content", [b"", b"not an adapter", b"\x89HDF\r\n\x1a\n"])
@pytest.mark.parametrize("name", ["x.lora.h5", "x.safetensors"])
def test_what_is_no_adapter_is_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    base = read_frozen(llama(num_layers=1))
    with pytest.raises(ModelSourceError, match=f"'legal'.*{name} is not"):
        load_adapters({"legal": path}, base)
    with pytest.raises(ModelSourceError, match="'legal'.*is not"):
        load_adapters({"legal": tmp_path / f"no-such-{name}"}, base)


def _factors(a=(24, 4, 2), b=(2, 6), dtype=np.float32, value=1.0):
    return np.full(a, value, dtype), np.full(b, value, dtype)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({}, "adds to nothing"),
        ({"layers/3/query": _factors()}, "'layers/3/query'"),
        ({"layers/0/attention_norm": _factors()}, "'layers/0/attention_norm'"),
        ({"output": _factors()}, "'output'"),
        ({"layers/0/query": _factors(a=(24, 4, 3))}, "wrong shapes"),
        ({"layers/0/query": _factors(a=(24, 2, 2), b=(2, 12))}, "wrong shapes"),
        ({"layers/0/query": _factors(a=(24, 4, 0), b=(0, 6))}, "wrong shapes"),
        ({"layers/0/query": _factors(a=(24, 8), b=(8, 6))}, "wrong shapes"),
        ({"layers/0/down": _factors()}, "wrong shapes"),
        ({"layers/0/query": _factors(dtype=np.float16)}, "float32"),
        ({"layers/0/query": _factors(value=np.nan)}, "not finite"),
    ],
)
def test_factors_that_do_not_fit_are_named(factors, words):
    base = read_frozen(llama())
    with pytest.raises(ModelSourceError, match=words):
        LoraAdapter(factors).check(base.config, base.weights)


def test_one_rank_over_all_heads_is_taken_as_well():
    """The form of Hugging Face's PEFT."""
    base = read_frozen(llama())
    draw = np.random.default_rng(3)
    a, b = (draw.normal(size=size).astype(np.float32) for size in ((24, 1, 2), (2, 24)))
    adapter = LoraAdapter({"layers/1/query": (a, b)})
    adapter.check(base.config, base.weights)
    added = adapter.merged(base.weights)["layers/1/query"] - base.weights["layers/1/query"]
    np.testing.assert_allclose(added, (a[:, 0] @ b).reshape(24, 4, 6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["", "a b", "a=b", "-a", "ä", "a" * 65, "a/b"])
def test_names_are_plain(name):
    with pytest.raises(ConfigError, match="adapter's name"):
        load_adapters({name: LoraAdapter({})}, read_frozen(llama(num_layers=1)))

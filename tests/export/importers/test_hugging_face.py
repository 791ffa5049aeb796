"""Folders of the Hugging Face Hub, against keras-nlp's own reader of such folders."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import keras_hub
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from tfkv.architecture import Rope
from tfkv.errors import ModelSourceError
from tfkv.export.importers import load
from tfkv.export.importers.families import family_of
from tfkv.export.importers.families.parity import check_parity
from tfkv.export.importers.hugging_face import from_hugging_face
from tfkv.export.importers.hugging_face_models import MODELS, Settings

# keras-nlp 0.32 reads neither the epsilon of Llama and Gemma nor Gemma's `rope_theta`, and rounds
# Mistral to float16: where it does, the folder says what keras-nlp takes anyway.
_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "hidden_act": "silu",
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "rope_theta": 10000.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
_GEMMA_2 = {
    **_GEMMA,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 16,
    "sliding_window": 7,
}
#: Name of a case to architecture, `model_type`, and what its config.json says besides the sizes.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_3": (
        "LlamaForCausalLM",
        "llama",
        {"rope_scaling": _LLAMA_3, "tie_word_embeddings": False},
    ),
    "mistral": (
        "MistralForCausalLM",
        "mistral",
        {"sliding_window": 7, "tie_word_embeddings": False, "head_dim": 8},
    ),
    "qwen_2": (
        "Qwen2ForCausalLM",
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None},
    ),
    "qwen_3": (
        "Qwen3ForCausalLM",
        "qwen3",
        {"tie_word_embeddings": False, "head_dim": 16, "use_sliding_window": False},
    ),
    "smollm_3": (
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            "tie_word_embeddings": True,
            "no_rope_layers": [1, 1, 0, 1],
            "attention_bias": False,
            "mlp_bias": False,
            "layer_types": ["full_attention"] * 4,
            "rope_scaling": None,
            "attention_dropout": 0.0,
        },
    ),
    "gemma": ("GemmaForCausalLM", "gemma", _GEMMA),
    "gemma_2": ("Gemma2ForCausalLM", "gemma2", _GEMMA_2),
}


def write(folder: pathlib.Path, architecture: str, kind: str, more: dict[str, Any]) -> pathlib.Path:
    """A folder with random weights of every tensor there is."""
    settings = {"architectures": [architecture], "model_type": kind, **_SIZES, **more}
    (folder / "config.json").write_text(json.dumps(settings))
    config = MODELS[architecture].config(
        Settings("x", settings), bool(settings["tie_word_embeddings"])
    )
    rng = np.random.default_rng(5)
    tensors = {}
    for rule in MODELS[architecture].rules(config):
        scale = 0.3 if len(rule.shape) == 1 else rule.shape[-1] ** -0.5
        value = rng.normal(size=rule.shape, scale=scale)
        if "norm" in rule.stored and not MODELS[architecture].plus_one:
            value += 1
        prefix = "" if rule.stored.startswith("lm_head") else "model."
        tensors[prefix + rule.stored] = value.astype(np.float16).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def llama(tmp_path: pathlib.Path) -> pathlib.Path:
    return write(tmp_path, *CASES["llama_3"])


def change(folder: pathlib.Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_keras_nlp_with_the_same_folder(case: str, tmp_path: pathlib.Path):
    folder = write(tmp_path, *CASES[case])
    source = load(folder)
    backbone = keras_hub.models.Backbone.from_preset(str(folder), dtype="float32")
    family, _ = family_of(backbone)
    assert check_parity(source, family, backbone) <= 1e-4


def test_fused_tensors_are_the_parts_side_by_side(llama: pathlib.Path, tmp_path_factory):
    fused = tmp_path_factory.mktemp("phi3")
    settings = json.loads((llama / "config.json").read_text())
    settings |= {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    (fused / "config.json").write_text(json.dumps(settings))
    tensors = load_file(llama / "model.safetensors")
    for layer in range(_SIZES["num_hidden_layers"]):
        for part, names in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            at = f"model.layers.{layer}.{part.partition('.')[0]}."
            rows = [tensors.pop(f"{at}{name}_proj.weight") for name in names]
            tensors[f"model.layers.{layer}.{part}.weight"] = np.concatenate(rows)
    save_file(tensors, fused / "model.safetensors")
    plain, other = from_hugging_face(llama), from_hugging_face(fused)
    assert other.config == plain.config
    for name, value in plain.weights.items():
        np.testing.assert_array_equal(other.weights[name], value, name)


def test_gemma_3_has_two_rotations_and_local_layers():
    settings = {**_SIZES, **_GEMMA_2, "num_hidden_layers": 6, "rope_theta": 1e6}
    settings |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = MODELS["Gemma3ForCausalLM"].config(Settings("x", settings), True)
    assert config.attention.windows == (7, 7, 7, 7, 7, 0)
    assert config.positions.ropes == (Rope(1e6, divisors=(8.0,)), Rope(10000.0))
    assert config.positions.of_layers == (1, 1, 1, 1, 1, 0)
    newer = {"full_attention": settings.pop("rope_scaling") | {"rope_theta": 1e6}}
    newer["sliding_attention"] = {"rope_type": "default", "rope_theta": 10000.0}
    settings |= {
        "rope_parameters": newer,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    assert MODELS["Gemma3ForCausalLM"].config(Settings("x", settings), True) == config


def test_half_precision_is_widened_exactly(llama: pathlib.Path):
    path = llama / "model.safetensors"
    halves = {name: value.astype(ml_dtypes.bfloat16) for name, value in load_file(path).items()}
    save_file(halves, path)
    source = from_hugging_face(llama)
    expected = halves["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(source.weights["token_embedding"], expected)


def test_weights_may_lie_in_several_files(llama: pathlib.Path):
    whole = from_hugging_face(llama)
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for number, some in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, llama / file)
        index |= dict.fromkeys(some, file)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    parts = from_hugging_face(llama)
    assert all(np.array_equal(parts.weights[name], value) for name, value in whole.weights.items())
    (llama / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelSourceError, match="lists the tensor"):
        from_hugging_face(llama)


def test_tokenizer_template_and_stop_tokens_come_along(llama: pathlib.Path):
    words = {"<s>": 0, "</s>": 1, "<|im_end|>": 2, "a": 3}
    Tokenizer(models.WordLevel(words, unk_token="<s>")).save(str(llama / "tokenizer.json"))
    (llama / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>", "special": True},
                "eos_token": "<|im_end|>",
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": "{{ messages }}"},
                ],
            }
        )
    )
    change(llama, eos_token_id=1)
    source = from_hugging_face(llama)
    assert source.stop_tokens == (2, 1)
    assert source.special_tokens == {"bos": "<s>", "eos": "<|im_end|>"}
    assert source.chat_template == "{{ messages }}"
    (llama / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    (llama / "chat_template.jinja").write_text("{{ newer }}")
    source = from_hugging_face(llama)
    assert (source.stop_tokens, source.chat_template) == ((1, 3, 2), "{{ newer }}")


def test_a_tokenizer_of_another_model_is_refused(llama: pathlib.Path):
    words = {str(number): number for number in range(62)}
    Tokenizer(models.WordLevel(words, unk_token="0")).save(str(llama / "tokenizer.json"))
    with pytest.raises(ModelSourceError, match=r"tokenizer\.json and config\.json disagree.*'61'"):
        from_hugging_face(llama)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 48}, r"config\.json and weights disagree: the tensor 'embed_tokens"),
        ({"num_hidden_layers": 3}, r"disagree: .* 'layers\.3\.input_layernorm\.weight'"),
        ({"num_hidden_layers": 5}, r"lacks the tensor 'layers\.4\."),
        ({"tie_word_embeddings": True, "vocab_size": "many"}, "'vocab_size' as a whole number"),
        ({"attention_bias": True}, r"lacks the tensor 'layers\.0\.self_attn\.q_proj\.bias'"),
        ({"hidden_act": "mish"}, "sets 'hidden_act' to 'mish'"),
        ({"rope_scaling": {"type": "longrope"}}, "sets 'rope_scaling'"),
        ({"architectures": ["BertModel"]}, "'BertModel'. Supported: LlamaForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"num_attention_heads": 3}, "impossible model"),
    ],
)
def test_what_disagrees_is_named(llama: pathlib.Path, values: dict[str, Any], words: str):
    change(llama, **values)
    with pytest.raises(ModelSourceError, match=words):
        from_hugging_face(llama)


def test_damaged_files_are_named(llama: pathlib.Path):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelSourceError, match=r"model\.safetensors is truncated or damaged"):
        from_hugging_face(llama)
    path.unlink()
    with pytest.raises(ModelSourceError, match=r"no \.safetensors file"):
        from_hugging_face(llama)
    (llama / "config.json").write_text("{")
    with pytest.raises(ModelSourceError, match="is not JSON"):
        load(llama)


def test_a_folder_without_a_model_says_what_it_expected(tmp_path: pathlib.Path):
    with pytest.raises(ModelSourceError, match=r"holds no config\.json"):
        load(tmp_path)


def test_a_folder_that_keras_nlp_wrote_is_read_by_it(tmp_path: pathlib.Path):
    backbone = keras_hub.models.LlamaBackbone(61, 1, 2, 16, 24, 2)
    model = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    model.save_to_preset(str(tmp_path / "preset"))
    source = load(tmp_path / "preset")
    expected = np.asarray(backbone.token_embedding.embeddings)
    np.testing.assert_array_equal(source.weights["token_embedding"], expected)

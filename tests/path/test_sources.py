"""The real model, written as `transformers` would write it, is the real model."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import save_file

from tfkv.export.importers import ModelSource, load


def write_folder(source: ModelSource, folder: pathlib.Path) -> None:
    """A folder of the Hub with a Llama, tied embeddings, weights in float16."""
    config = source.config
    width = config.hidden_dim
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary_size,
        "hidden_size": width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_epsilon,
        "rope_theta": config.rope_max_wavelength,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": source.stop_tokens[0],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(source.tokenizer_json)
    named = {f"{role}_token": text for role, text in source.special_tokens.items()}
    named["chat_template"] = source.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    stored = {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    tensors = {
        "model.embed_tokens.weight": source.weights["token_embedding"],
        "model.norm.weight": source.weights["final_norm"],
    }
    for layer in range(config.num_layers):
        old, new = f"layers/{layer}/", f"model.layers.{layer}."
        for name, place in stored.items():
            kernel = source.weights[old + name]
            tensors[f"{new}{place}.weight"] = kernel.reshape(kernel.shape[0], -1).T
        output = source.weights[f"{old}attention_output"].reshape(-1, width)
        tensors[f"{new}self_attn.o_proj.weight"] = output.T
        tensors[f"{new}input_layernorm.weight"] = source.weights[f"{old}attention_norm"]
        tensors[f"{new}post_attention_layernorm.weight"] = source.weights[f"{old}feedforward_norm"]
    halves = {name: np.ascontiguousarray(x, np.float16) for name, x in tensors.items()}
    save_file(halves, folder / "model.safetensors")


def test_a_folder_of_the_hub_is_read_as_the_model_that_was_written(
    source: ModelSource, tmp_path: pathlib.Path
):
    write_folder(source, tmp_path)
    found = load(tmp_path)
    assert found.config == source.config
    assert found.weights.keys() == source.weights.keys()
    for name, value in found.weights.items():
        np.testing.assert_array_equal(value, source.weights[name].astype(np.float16), name)
    assert found.chat_template == source.chat_template
    assert found.stop_tokens == source.stop_tokens[:1]
    both = (tokenizers.Tokenizer.from_str(one.tokenizer_json) for one in (found, source))
    ids, expected = (one.encode("It's 12 o'clock, déjà vu?").ids for one in both)
    assert ids == expected

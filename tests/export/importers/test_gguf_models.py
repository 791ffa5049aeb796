"""GGUF files of every architecture hold what the folder does that they were converted from.

Files are written as llama.cpp's converter writes them: tensors under the names of the `gguf`
package's own map, rows in pairs and scales of norms with 1 added where the converter does so.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import load_file
from test_gguf import permute
from test_hugging_face import _GEMMA_2, CASES, write
from test_sentence_piece import KINDS, TEXTS, train
from tokenizers import Tokenizer

from tfkv.errors import ModelSourceError
from tfkv.export.importers.gguf import from_gguf
from tfkv.export.importers.hugging_face import from_hugging_face

_MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi_3": (
        "Phi3ForCausalLM",
        "phi3",
        {"tie_word_embeddings": False, "sliding_window": 7, "num_key_value_heads": 4},
    ),
    "gemma_3": (
        "Gemma3ForCausalLM",
        "gemma3",
        {
            **{key: value for key, value in _GEMMA_2.items() if "softcap" not in key},
            "num_hidden_layers": 7,
            "rope_theta": 1e6,
        },
    ),
}
#: Name of a case to architecture of the file, and that of the folder with its settings.
ARCHITECTURES = {
    "llama": ("llama", ("LlamaForCausalLM", "llama", {"tie_word_embeddings": False})),
    "qwen_2": ("qwen2", CASES["qwen_2"]),
    "qwen_3": ("qwen3", CASES["qwen_3"]),
    "smollm_3": ("smollm3", ("SmolLM3ForCausalLM", "smollm3", {"tie_word_embeddings": True})),
    "phi_3": ("phi3", _MORE["phi_3"]),
    "gemma": ("gemma", CASES["gemma"]),
    "gemma_2": ("gemma2", CASES["gemma_2"]),
    "gemma_3": ("gemma3", _MORE["gemma_3"]),
}
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def converted(folder: pathlib.Path, architecture: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a file."""
    settings = json.loads((folder / "config.json").read_text())
    metadata = {
        f"{architecture}.{key}": settings[name]
        for name, key in _KEYS.items()
        if settings.get(name) is not None
    }
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, settings["num_hidden_layers"])
    heads = {
        "q_proj": settings["num_attention_heads"],
        "k_proj": settings["num_key_value_heads"],
    }
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        role = name.split(".")[-2]
        if architecture in ("llama", "smollm3") and role in heads:
            value = permute(value, heads[role])
        if architecture.startswith("gemma") and "norm" in role:
            value = value + np.float32(1)
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value
    return metadata, tensors


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_file_holds_what_the_folder_does(tmp_path, write_gguf, case):
    architecture, of_folder = ARCHITECTURES[case]
    folder = write(tmp_path, *of_folder)
    metadata, tensors = converted(folder, architecture)
    source = from_gguf(write_gguf(metadata, tensors, architecture=architecture))
    expected = from_hugging_face(folder)
    assert source.config == expected.config
    assert source.weights.keys() == expected.weights.keys()
    for name, weight in source.weights.items():
        np.testing.assert_array_equal(weight, expected.weights[name], err_msg=name)


def test_scores_of_gemma_27b_are_scaled_by_the_hidden_width_over_the_heads(tmp_path, write_gguf):
    """No file says so; llama.cpp knows that model by its 46 layers."""
    of_folder = (*CASES["gemma_2"][:2], {**_GEMMA_2, "num_hidden_layers": 46})
    metadata, tensors = converted(write(tmp_path, *of_folder), "gemma2")
    source = from_gguf(write_gguf(metadata, tensors, architecture="gemma2"))
    assert source.config.attention.query_scale == (32 // 4) ** -0.5


def test_a_window_is_refused_where_the_architecture_has_none(tmp_path, write_gguf):
    metadata, tensors = converted(write(tmp_path, *CASES["qwen_3"]), "qwen3")
    metadata["qwen3.attention.sliding_window"] = 32
    with pytest.raises(ModelSourceError, match="sliding_window"):
        from_gguf(write_gguf(metadata, tensors, architecture="qwen3"))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_a_vocabulary_of_sentencepiece_becomes_a_tokenizer(
    gguf_metadata, gguf_tensors, write_gguf, kind
):
    proto = train(**KINDS[kind])
    theirs = sentencepiece.SentencePieceProcessor(model_proto=proto)
    ids = range(theirs.vocab_size())

    def type_of(index: int) -> int:
        tests = ((theirs.is_unknown, 2), (theirs.is_control, 3), (theirs.is_byte, 6))
        return next((number for is_a, number in tests if is_a(index)), 1)

    types = [4 if theirs.id_to_piece(index) == "<tool>" else type_of(index) for index in ids]
    metadata = {
        **gguf_metadata,
        "llama.vocab_size": len(ids),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(index) for index in ids],
        "tokenizer.ggml.scores": [theirs.get_score(index) for index in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        "tokenizer.ggml.add_space_prefix": kind == "llama",
    }
    gguf_tensors["token_embd.weight"] = np.zeros((len(ids), 12), np.float32)
    source = from_gguf(write_gguf(metadata, gguf_tensors))
    tokenizer = Tokenizer.from_str(source.tokenizer_json)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == theirs.encode(text)
        assert tokenizer.encode(text).ids == [theirs.bos_id(), *theirs.encode(text)]
    assert source.stop_tokens == (theirs.eos_id(),)

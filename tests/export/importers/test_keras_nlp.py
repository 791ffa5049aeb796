import dataclasses
import json

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf
import tokenizers
from test_sentence_piece import KINDS, train

from tfkv.errors import ModelSourceError
from tfkv.export.importers import load
from tfkv.export.importers.keras_nlp import from_keras_nlp, to_keras_nlp

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def backbone(**changes) -> keras_hub.models.LlamaBackbone:
    settings = {
        "vocabulary_size": 40,
        "num_layers": 2,
        "num_query_heads": 3,
        "hidden_dim": 12,
        "intermediate_dim": 10,
        "num_key_value_heads": 1,
        **changes,
    }
    return keras_hub.models.LlamaBackbone(**settings)


def llama3_tokenizer(
    cls: type[keras_hub.tokenizers.Llama3Tokenizer] = keras_hub.tokenizers.Llama3Tokenizer,
) -> keras_hub.tokenizers.Llama3Tokenizer:
    words = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    words += ["<|start_header_id|>", "<|end_header_id|>", *"abc123.'", "Ġ", "Ċ", "ab", "Ġa", "12"]
    return cls(
        vocabulary={text: index for index, text in enumerate(words)},
        merges=["a b", "Ġ a", "1 2"],
        misc_special_tokens={"<|start_header_id|>", "<|end_header_id|>"},
    )


def causal_lm(tokenizer, **changes) -> keras_hub.models.Llama3CausalLM:
    preprocessor = keras_hub.models.Llama3CausalLMPreprocessor(tokenizer, **changes)
    settings = backbone().get_config()
    core = keras_hub.models.Llama3Backbone.from_config(settings)
    return keras_hub.models.Llama3CausalLM(core, preprocessor)


# The real model.


@pytest.fixture(scope="module")
def smollm2_backbone(smollm2):
    return to_keras_nlp(smollm2)


@pytest.mark.real_model
def test_keras_nlp_answers_with_the_imported_weights(smollm2, smollm2_backbone, smollm2_tokenizer):
    width = 32

    @tf.function
    def next_token(ids, length):
        mask = tf.sequence_mask([length], width, dtype=tf.int32)
        hidden = smollm2_backbone({"token_ids": ids, "padding_mask": mask})
        last = hidden[:, length - 1]
        return tf.argmax(smollm2_backbone.token_embedding(last, reverse=True), axis=-1)[0]

    ids = smollm2_tokenizer.encode(QUESTION).ids
    start = len(ids)
    while len(ids) < width and (len(ids) == start or ids[-1] not in smollm2.stop_tokens):
        padded = tf.constant([ids + [0] * (width - len(ids))])
        ids.append(int(next_token(padded, tf.constant(len(ids)))))
    answer = smollm2_tokenizer.decode(ids[start:], skip_special_tokens=False)
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real_model
def test_smollm2_survives_the_way_through_keras_nlp(smollm2, smollm2_backbone):
    back = from_keras_nlp(smollm2_backbone, context_length=smollm2.config.context_length)
    assert back.config == smollm2.config
    assert back.weights.keys() == smollm2.weights.keys()
    for name, value in smollm2.weights.items():
        np.testing.assert_array_equal(back.weights[name], value, err_msg=name)


# Tiny models.


@pytest.mark.parametrize("tied", [True, False])
def test_weights_move_both_ways(tiny_source, tied):
    config = dataclasses.replace(tiny_source().config, tie_embeddings=tied)
    source = tiny_source(config)
    back = from_keras_nlp(to_keras_nlp(source), context_length=config.context_length)
    assert back.config == config
    assert back.weights.keys() == source.weights.keys()
    for name, value in source.weights.items():
        np.testing.assert_array_equal(back.weights[name], value, err_msg=name)


def test_untied_logits_come_from_the_output_matrix(tiny_source):
    source = tiny_source(dataclasses.replace(tiny_source().config, tie_embeddings=False))
    hidden = np.ones((1, 1, 12), np.float32)
    logits = to_keras_nlp(source).token_embedding(hidden, reverse=True)
    np.testing.assert_allclose(logits[0, 0], source.weights["output"].sum(-1), rtol=1e-5)


def test_load_takes_a_backbone_and_a_causal_lm():
    core = backbone(rope_max_wavelength=7000, layer_norm_epsilon=1e-4, dtype="float32")
    model = keras_hub.models.LlamaCausalLM(core, preprocessor=None)
    for source in (load(core), load(model)):
        assert source.config.rope_max_wavelength == 7000.0
        assert source.config.rms_epsilon == 1e-4
        assert not source.config.tie_embeddings  # keras-nlp's default
        assert source.tokenizer_json is None
        assert source.stop_tokens == ()
    assert "LlamaCausalLM" in source.description


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_are_widened_exactly(dtype):
    model = backbone(dtype=dtype)
    value = from_keras_nlp(model).weights["token_embedding"]
    assert value.dtype == np.float32
    kept = keras.ops.convert_to_numpy(model.token_embedding.embeddings)
    np.testing.assert_array_equal(value, kept.astype(np.float32))


def test_lora_is_merged():
    model = backbone()
    model.enable_lora(rank=2)
    before = from_keras_nlp(model).weights["layers/0/query"]
    dense = model.transformer_layers[0]._self_attention_layer._query_dense
    dense.lora_kernel_b.assign(keras.ops.ones_like(dense.lora_kernel_b))
    after = from_keras_nlp(model).weights["layers/0/query"]
    assert np.abs(after - before).max() > 1e-3
    x = np.random.default_rng(0).normal(size=(1, 1, 12)).astype(np.float32)
    expected = np.einsum("btd,dnh->btnh", x, after)
    np.testing.assert_allclose(dense(x), expected, rtol=1e-4, atol=1e-6)


def test_a_double_precision_model_is_refused():
    with pytest.raises(ModelSourceError, match="token_embedding.*float32.*float64"):
        from_keras_nlp(backbone(dtype="float64"))


def test_a_quantised_model_is_refused():
    model = backbone()
    model.transformer_layers[1]._feedforward_output_dense.quantize("int8")
    with pytest.raises(ModelSourceError, match=r"layers/1/down.*quantised \(int8\)"):
        from_keras_nlp(model)


def test_a_scaling_that_keras_nlp_does_not_compute_is_refused():
    with pytest.raises(ModelSourceError, match=r"rope_position_scaling_factor.*Received: 4\.0"):
        from_keras_nlp(backbone(rope_position_scaling_factor=4.0))


def test_soft_capped_logits_are_taken():
    model = backbone()
    model.token_embedding.logit_soft_cap = 30.0
    assert from_keras_nlp(model).config.final_soft_cap == 30.0


def test_other_classes_are_refused():
    other = keras_hub.models.BertBackbone(
        vocabulary_size=10, num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=4
    )

    class Changed(keras_hub.models.LlamaBackbone):
        pass

    changed = Changed(**{**backbone().get_config(), "name": "changed"})
    for model, name in ((other, "BertBackbone"), (changed, "Changed")):
        with pytest.raises(ModelSourceError, match=f"{name} is not supported.*GPT-2, OPT, Llama"):
            load(model)


def test_heads_must_fill_the_hidden_dimension(tiny_source):
    config = dataclasses.replace(tiny_source().config, head_dim=6)
    with pytest.raises(ModelSourceError, match="hidden_dim=12, num_query_heads=3, head_dim=6"):
        to_keras_nlp(tiny_source(config))


def test_only_a_llama_becomes_a_backbone_again(tiny_source):
    config = dataclasses.replace(tiny_source().config, final_soft_cap=3.0)
    with pytest.raises(ModelSourceError, match="Only a Llama.*final_soft_cap=3"):
        to_keras_nlp(tiny_source(config))


# Tokenizers.


def test_a_llama3_tokenizer_comes_along():
    model = causal_lm(llama3_tokenizer())
    source = from_keras_nlp(model)
    converted = tokenizers.Tokenizer.from_str(source.tokenizer_json)
    for text in ("ab a", "<|start_header_id|>ab<|eot_id|>", "c.c 3", "<|eot_id|>\n"):
        expected = list(model.preprocessor.tokenizer(text))
        assert converted.encode(text, add_special_tokens=False).ids == expected, text
    assert source.stop_tokens == (1, 2)
    assert source.special_tokens == {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"}


def test_numbers_are_cut_in_threes_as_llama3_was_trained():
    converted = tokenizers.Tokenizer.from_str(
        from_keras_nlp(causal_lm(llama3_tokenizer())).tokenizer_json
    )
    assert converted.encode("1212", add_special_tokens=False).tokens == ["12", "1", "2"]
    # If keras-nlp cuts eagerly one day, the note in `from_keras_nlp` goes.
    assert len(list(llama3_tokenizer()("1212"))) == 2


def test_a_plain_byte_pair_tokenizer_cuts_as_keras_nlp_does_in_a_graph():
    words = ["<s>", *"abc123.'st", "Ġ", "Ċ", "ab", "Ġa", "12", "'s", "ĠĠ"]
    settings = {
        "vocabulary": {text: index for index, text in enumerate(words)},
        "merges": ["a b", "Ġ a", "1 2", "' s", "Ġ Ġ"],
        "unsplittable_tokens": ["<s>"],
    }
    in_graph = keras_hub.tokenizers.BytePairTokenizer(_allow_python_workflow=False, **settings)
    model = causal_lm(keras_hub.tokenizers.BytePairTokenizer(**settings))
    converted = tokenizers.Tokenizer.from_str(from_keras_nlp(model).tokenizer_json)
    for text in ("ab a", "1212 3", "ab's  a.", "c\na", "<s>ab a"):
        assert converted.encode(text).ids == list(in_graph(text)), text


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("GPT2Tokenizer", ["<|endoftext|>"]),
        ("GPTNeoXTokenizer", ["<|endoftext|>"]),
        ("OPTTokenizer", ["<pad>", "</s>"]),
    ],
)
def test_tokenizers_that_cut_as_gpt2_come_along(name, special):
    words = [*special, *"abc123.'st", "Ġ", "Ċ", "ab", "Ġa", "12", "'s", "ĠĠ"]
    settings = {
        "vocabulary": {text: index for index, text in enumerate(words)},
        "merges": ["a b", "Ġ a", "1 2", "' s", "Ġ Ġ"],
    }
    cls = getattr(keras_hub.tokenizers, name)
    in_graph = cls(_allow_python_workflow=False, **settings)
    source = from_keras_nlp(causal_lm(cls(**settings)))
    converted = tokenizers.Tokenizer.from_str(source.tokenizer_json)
    for text in ("ab a", "1212 3", "ab's  a.", "c\na", f"{special[-1]}ab a"):
        found = converted.encode(text, add_special_tokens=False).ids
        assert found == list(in_graph(text)), text
    assert source.stop_tokens == (words.index(special[-1]),)


@pytest.mark.parametrize(
    ("family", "bos", "eos"),
    [
        ("Llama", "<s>", "</s>"),
        ("Mistral", "<s>", "</s>"),
        ("Phi3", "<s>", "<|endoftext|>"),
        ("Gemma", "<bos>", "<eos>"),
    ],
)
def test_tokenizers_of_sentencepiece_come_along(family, bos, eos):
    control = {"pad_id": 3, "pad_piece": "<pad>", "bos_piece": bos, "eos_piece": eos}
    proto = train(**KINDS["llama"], **control)
    tokenizer = getattr(keras_hub.tokenizers, f"{family}Tokenizer")(proto)
    preprocessor = keras_hub.models.LlamaCausalLMPreprocessor(tokenizer, add_end_token=False)
    model = keras_hub.models.LlamaCausalLM(backbone(vocabulary_size=400), preprocessor)
    source = from_keras_nlp(model)
    converted = tokenizers.Tokenizer.from_str(source.tokenizer_json)
    for text in ("The value of x", "  two  spaces", "naïve 漢字 123"):
        found = converted.encode(text, add_special_tokens=False).ids
        assert found == list(tokenizer(text)), text
        assert converted.decode(found) == tokenizer.detokenize(found), text
        packed, _, _ = preprocessor([text], sequence_length=64)
        ids = np.asarray(packed["token_ids"])[np.asarray(packed["padding_mask"]).astype(bool)]
        assert converted.encode(text).ids == ids.tolist()
    assert source.stop_tokens == (tokenizer.end_token_id,)
    assert source.special_tokens["bos"] == bos


@pytest.mark.parametrize("add_start_token", [True, False])
def test_the_start_token_is_added_as_in_training(add_start_token):
    model = causal_lm(llama3_tokenizer(), add_start_token=add_start_token, add_end_token=False)
    converted = tokenizers.Tokenizer.from_str(from_keras_nlp(model).tokenizer_json)
    packed, _, _ = model.preprocessor(["ab ac"], sequence_length=8)
    ids = np.asarray(packed["token_ids"])[np.asarray(packed["padding_mask"]).astype(bool)]
    assert converted.encode("ab ac").ids == ids.tolist()


def test_a_tokenizer_of_another_class_stays_behind():
    class Other(keras_hub.tokenizers.Llama3Tokenizer):
        pass

    source = from_keras_nlp(causal_lm(llama3_tokenizer(Other)))
    assert source.tokenizer_json is None
    assert source.stop_tokens == (1, 2)


def test_the_converted_tokenizer_is_json():
    source = from_keras_nlp(causal_lm(llama3_tokenizer()))
    assert json.loads(source.tokenizer_json)["model"]["type"] == "BPE"

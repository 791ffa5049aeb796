"""Byte-level BPE in the graph gives the ids of the `tokenizers` library."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tfkv.errors import ModelSourceError
from tfkv.export.graph_tokenizer import GraphTokenizer

TEXT = (
    "The quick brown fox isn't 12 years old; it's 345 days and we'll see.\n"
    "    def indented(x):\n        return x + 1  # naïve café, 日本語\n\n\n"
    "\tTabs\tand\u00a0no-break spaces, don't they? ½ of ²: Ⅷ."
)
#: What decides about words: white space of every kind, digits, marks, letters beyond ASCII.
LETTERS = " \n\t\r\x0b\x85\u00a0\u2028\u3000'’abstrelvmdTHE019½²Ⅷ.,!?-_(é日😀\u0301\u200b"


def trained(digits: bool, byte_alphabet: bool = True) -> tokenizers.Tokenizer:
    """A small BPE tokenizer that has learnt its merges from TEXT."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_alphabet else []
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    # As in the graph: what a text says is never a special token.
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module", params=[False, True], ids=["gpt-2", "digits"])
def both(request):
    """The library's tokenizer, and the graph's as traced functions."""
    tokenizer = trained(request.param)
    graph = GraphTokenizer.from_json(tokenizer.to_str())
    encode = tf.function(graph.encode, input_signature=[tf.TensorSpec([None], tf.string)])
    decode = tf.function(graph.decode, input_signature=[tf.TensorSpec([None, None], tf.int32)])
    return tokenizer, encode, decode


@example(text="a<|end|>b")
@given(text=st.text(st.one_of(st.sampled_from(LETTERS), st.characters()), max_size=40))
def test_ids_are_those_of_the_library_and_come_back_as_text(both, text: str):
    tokenizer, encode, decode = both
    text = text.replace("\0", "").encode("utf-8", "ignore").decode()
    ids = encode([text])
    assert ids.to_list() == [tokenizer.encode(text).ids]
    assert decode(ids.to_tensor(-1)).numpy()[0].decode() == text


def test_texts_of_a_batch_do_not_mix(both):
    tokenizer, encode, decode = both
    texts = [TEXT, "", " ", "it's", "a" * 50, TEXT[::-1]]
    ids = encode(texts)
    assert ids.to_list() == [tokenizer.encode(text).ids for text in texts]
    assert [text.decode() for text in decode(ids.to_tensor(-1)).numpy()] == texts


def test_special_tokens_in_a_text_are_ordinary_text(both):
    tokenizer, encode, _ = both
    ids = encode(["a<|end|>b"]).to_list()[0]
    assert tokenizer.token_to_id("<|end|>") not in ids
    assert tokenizer.decode(ids) == "a<|end|>b"


def test_special_tokens_and_minus_one_are_no_text(both):
    tokenizer, encode, decode = both
    ids = encode(["word"]).to_list()[0]
    end = tokenizer.token_to_id("<|end|>")
    assert decode([[end, *ids, -1, end]]).numpy().tolist() == [b"word"]


def test_a_zero_byte_is_dropped_and_what_is_no_utf8_is_replaced(both):
    tokenizer, encode, _ = both
    assert encode([b"a\0b", b"a\xffb"]).to_list() == [
        tokenizer.encode("ab").ids,
        tokenizer.encode("a\ufffdb").ids,
    ]


def test_bytes_without_a_token_are_dropped_as_by_the_library():
    tokenizer = trained(False, byte_alphabet=False)
    graph = GraphTokenizer.from_json(tokenizer.to_str())
    texts = ["quick Z fox", "ZZZ", "日 quick"]
    assert graph.encode(texts).to_list() == [tokenizer.encode(text).ids for text in texts]


def test_a_token_that_is_not_spelt_in_bytes_is_no_text():
    data = json.loads(trained(True).to_str())
    strange = len(data["model"]["vocab"])
    data["model"]["vocab"]["日本"] = strange
    graph = GraphTokenizer.from_json(json.dumps(data))
    ids = tf.constant([[strange, *graph.encode(["ok"]).to_list()[0]]])
    assert graph.decode(ids).numpy().tolist() == [b"ok"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"normalizer": {"type": "NFC"}}, "normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer"),
        ({"pre_tokenizer": None}, "pre_tokenizer"),
        ({"decoder": None}, "decoder"),
    ],
)
def test_another_kind_of_tokenizer_is_refused_by_what_makes_it_so(change, named: str):
    data = json.loads(trained(True).to_str())
    with pytest.raises(ModelSourceError, match=f"`{named}`"):
        GraphTokenizer.from_json(json.dumps({**data, **change}))


def test_a_model_that_merges_otherwise_is_refused():
    data = json.loads(trained(True).to_str())
    data["model"]["ignore_merges"] = True
    with pytest.raises(ModelSourceError, match=r"`model\.ignore_merges`"):
        GraphTokenizer.from_json(json.dumps(data))

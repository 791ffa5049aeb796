"""Vocabularies of SentencePiece cut text as SentencePiece itself does."""

from __future__ import annotations

import io

import numpy as np
import pytest
import sentencepiece
import tokenizers

from tfkv import sample_text
from tfkv.errors import ModelSourceError
from tfkv.export.importers.sentence_piece import (
    CONTROL,
    UNKNOWN,
    Piece,
    SentencePieceVocabulary,
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces   and\ta tab, \n a line ",
    "def f(x):\n    return x ** 2  # 1234567",
    "Überraschung! naïve café, ½ ﬁ ²",
    "漢字 and emoji \U0001f600 that nobody has seen",
    "",
    " ",
    "word",
)


def train(**options) -> bytes:
    """A model of SentencePiece of 400 pieces."""
    written = io.BytesIO()
    lines = [line for line in sample_text.language_reference()[:60_000].split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=400,
        minloglevel=2,
        user_defined_symbols=["<tool>"],
        num_threads=1,
        **options,
    )
    return written.getvalue()


#: As Llama's, as Gemma's, and as SentencePiece trains by itself.
KINDS = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "plain bpe": {"model_type": "bpe"},
    "plain unigram": {"model_type": "unigram"},
}


@pytest.fixture(scope="module", params=KINDS)
def both(request) -> tuple[sentencepiece.SentencePieceProcessor, tokenizers.Tokenizer]:
    proto = train(**KINDS[request.param])
    text = SentencePieceVocabulary.from_proto(proto).to_tokenizer_json()
    theirs = sentencepiece.SentencePieceProcessor(model_proto=proto)
    return theirs, tokenizers.Tokenizer.from_str(text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_cut_as_sentencepiece_cuts_it(both, text):
    theirs, ours = both
    assert ours.encode(text).ids == theirs.encode(text)


def test_long_text_is_cut_as_sentencepiece_cuts_it(both):
    theirs, ours = both
    text = sample_text.language_reference()[100_000:130_000]
    assert ours.encode(text).ids == theirs.encode(text)


def test_ids_become_the_text_that_sentencepiece_makes_of_them(both):
    """But for what is unknown, which is left out like every special token."""
    theirs, ours = both
    known = [ids for ids in map(theirs.encode, TEXTS) if theirs.unk_id() not in ids]
    assert len(known) >= 5
    for ids in known:
        assert ours.decode(ids) == theirs.decode(ids)


def test_ids_that_no_text_gives_are_decoded_alike(both):
    """But for bytes that make no character: there each byte of the run is one that is broken."""
    theirs, ours = both
    draw = np.random.default_rng(0)
    odd = (theirs.is_control, theirs.is_byte, theirs.is_unknown)
    pieces = [index for index in range(theirs.vocab_size()) if not any(is_a(index) for is_a in odd)]
    for _ in range(50):
        ids = draw.choice(pieces, 12).tolist()
        assert ours.decode(ids) == theirs.decode(ids)


def test_control_pieces_are_parsed_and_dropped_again(both):
    theirs, ours = both
    ids = ours.encode("<s>one</s>").ids
    assert (ids[0], ids[-1]) == (theirs.bos_id(), theirs.eos_id())
    assert ours.decode(ids) == "one"


def test_the_first_piece_is_added_only_when_asked_for():
    vocabulary = SentencePieceVocabulary.from_proto(train(**KINDS["llama"]), bos="<s>")
    tokenizer = tokenizers.Tokenizer.from_str(vocabulary.to_tokenizer_json())
    plain = tokenizer.encode("one", add_special_tokens=False).ids
    assert tokenizer.encode("one").ids == [tokenizer.token_to_id("<s>"), *plain]


def test_what_is_no_model_is_refused():
    with pytest.raises(ModelSourceError, match="no SentencePiece model"):
        SentencePieceVocabulary.from_proto(b"\x0a\xff")


def test_a_model_of_words_is_refused():
    with pytest.raises(ModelSourceError, match="UNIGRAM or BPE"):
        SentencePieceVocabulary.from_proto(train(model_type="word", hard_vocab_limit=False))


def test_pieces_that_cannot_be_told_apart_are_refused():
    pieces = [Piece("<unk>", 0.0, UNKNOWN), Piece("a", -1.0), Piece("a", -2.0)]
    with pytest.raises(ModelSourceError, match="2 are distinct"):
        SentencePieceVocabulary(pieces).to_tokenizer_json()


def test_a_vocabulary_without_an_unknown_piece_is_refused():
    with pytest.raises(ModelSourceError, match="unknown"):
        SentencePieceVocabulary([Piece("<s>", 0.0, CONTROL)]).to_tokenizer_json()

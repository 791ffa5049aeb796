import pytest
import tokenizers

from tfkv.errors import ModelSourceError
from tfkv.export.importers.bpe import BpeVocabulary

MERGES = [("Ġ", "a"), ("a", "b"), ("1", "2"), ("12", "3")]


def build(**changes) -> tokenizers.Tokenizer:
    alphabet = ["<s>", *"abc123.", "Ġ", "Ċ", "Ġa", "ab", "12", "123", "<tool>", "abc"]
    tokens = {text: index for index, text in enumerate(alphabet)}
    settings = {"merges": MERGES, "special": ["<s>"], "added": ["<tool>"], **changes}
    vocabulary = BpeVocabulary(tokens=tokens, **settings)
    return tokenizers.Tokenizer.from_str(vocabulary.to_tokenizer_json())


@pytest.mark.parametrize(
    ("pre_tokenizer", "pieces"),
    [
        ("smollm", ["ab", "Ġa", "Ġ", "1", "2", "3"]),
        ("gpt-2", ["ab", "Ġa", "Ġ", "123"]),
        ("llama-bpe", ["ab", "Ġa", "Ġ", "123"]),
        ("qwen2", ["ab", "Ġa", "Ġ", "1", "2", "3"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(pre_tokenizer, pieces):
    assert build(pre_tokenizer=pre_tokenizer).encode("ab a 123").tokens == pieces


def test_llama3_cuts_long_numbers_in_threes_and_newlines_with_punctuation():
    tokenizer = build(pre_tokenizer="llama-bpe")
    words = tokenizer.pre_tokenizer.pre_tokenize_str("1234567.\n\nA B")
    assert [word for word, _ in words] == ["123", "456", "7", ".ĊĊ", "A", "ĠB"]


def test_qwen2_takes_letters_that_are_written_in_two_ways_for_one():
    tokenizer = build(pre_tokenizer="qwen2")
    assert tokenizer.normalizer.normalize_str("e\u0301") == "\xe9"
    assert build().normalizer is None


def test_special_and_added_tokens_are_single_ids():
    tokenizer = build()
    encoding = tokenizer.encode("a<s><tool>b")
    assert encoding.tokens == ["a", "<s>", "<tool>", "b"]
    assert tokenizer.decode(encoding.ids) == "a<tool>b"
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == "a<s><tool>b"


def test_the_start_token_is_added_only_when_asked_for():
    tokenizer = build(bos="<s>")
    assert tokenizer.encode("ab").tokens == ["<s>", "ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert build().encode("ab").tokens == ["ab"]


def test_a_word_that_is_a_token_is_taken_whole_only_if_merges_are_ignored():
    assert build(ignore_merges=True).encode("abc").tokens == ["abc"]
    assert build().encode("abc").tokens == ["ab", "c"]


def test_an_unknown_pre_tokenizer_is_refused():
    with pytest.raises(ModelSourceError, match=r"'tekken'.*smollm, gpt-2, llama-bpe, qwen2"):
        build(pre_tokenizer="tekken")


def test_a_merge_of_an_unknown_token_is_refused():
    with pytest.raises(ModelSourceError, match="inconsistent.*`z`"):
        build(merges=[("a", "z")])

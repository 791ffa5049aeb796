"""Byte-level BPE inside the graph, of stock TensorFlow operations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tfkv.errors import ModelSourceError

# White space as Unicode has it; RE2's \s is ASCII's.
_SPACE = r"\t-\r\x{85}\p{Z}"
#: What stands between two words that are merged apart. A byte 0 of the text itself is dropped.
_CUT = "\0"
_DIGITS = r"(\p{N})"
#: All but the last of a run of white space in front of a word is a word of its own: what the
#: look-ahead in GPT-2's pattern says, which RE2 does not have.
_INDENT = rf"([{_SPACE}]+)([{_SPACE}][^{_SPACE}\x00])"
_GPT2 = (
    r"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+"
    rf"| ?[^{_SPACE}\p{{L}}\p{{N}}\x00]+|[{_SPACE}]+)"
)


class GraphTokenizer:
    """Token ids of text and back, for servers that know nothing of tokenizers.

    The same ids as the ``tokenizers`` library gives, but that special tokens written in a text
    are ordinary text: whoever sends it cannot end his turn with them. A byte 0 is dropped, and
    what is not UTF-8 becomes U+FFFD.

    Args:
        tokens: Bytes of each id ``[V]``; empty = an id that is no text.
        bytes_to_ids: Id of each byte, int ``[256]``; −1 = a byte that is dropped.
        merges: Pairs of ids in order of rank, int ``[M, 2]``.
        merged: What each becomes, int ``[M]``.
        digits: Whether every digit is a word of its own.

    Reference:
        Sennrich et al., https://arxiv.org/abs/1508.07909; Radford et al., GPT-2, for the words.
    """

    def __init__(
        self,
        tokens: list[bytes],
        bytes_to_ids: np.ndarray,
        merges: np.ndarray,
        merged: np.ndarray,
        digits: bool,
    ) -> None:
        self._size = len(tokens)
        self._digits = digits
        keys = merges[:, 0].astype(np.int64) * self._size + merges[:, 1]
        order = np.argsort(keys)
        # What stands behind the last pair is no pair: a search always finds something.
        self._keys = tf.constant(np.append(keys[order], np.int64(self._size) ** 2))
        self._ranks = tf.constant(np.append(order, 0), tf.int32)
        self._merged = tf.constant(np.append(merged, 0), tf.int32)
        self._bytes_to_ids = tf.constant(bytes_to_ids, tf.int32)
        # One string: as many small ones would take a hundred megabytes in the copies of a graph.
        lengths = np.array([*map(len, tokens), 0])
        self._spelt = tf.constant(b"".join(tokens))
        self._lengths = tf.constant(lengths, tf.int32)
        self._starts = tf.constant(np.cumsum(lengths) - lengths, tf.int32)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a ``tokenizer.json``.

        Raises:
            ModelSourceError: The tokenizer does something that this class does not do; the
                message says what.
        """
        data = json.loads(text)
        model = data["model"]
        digits = _cuts_digits(data)
        for name in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
            _require(not model.get(name), f"model.{name}", model.get(name))
        _require(not model.get("byte_fallback"), "model.byte_fallback", True)
        _require(not model.get("ignore_merges"), "model.ignore_merges", True)
        _require(data.get("normalizer") is None, "normalizer", data.get("normalizer"))
        vocabulary: Mapping[str, int] = model["vocab"]
        added = {one["content"]: one["id"] for one in data.get("added_tokens", ())}
        tokens = [b""] * (max({**vocabulary, **added}.values()) + 1)
        letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
        for word, index in vocabulary.items():
            # What is not spelt in bytes is no text, special or not.
            if word not in added and letters.keys() >= set(word):
                tokens[index] = bytes(letters[letter] for letter in word)
        ids = [vocabulary.get(letter, -1) for letter in _byte_letters()]
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
        merges = np.array([[vocabulary[part] for part in pair] for pair in pairs], np.int64)
        merged = np.array([vocabulary["".join(pair)] for pair in pairs])
        return cls(tokens, np.array(ids), merges.reshape(-1, 2), merged, digits)

    def encode(self, text: tf.Tensor) -> tf.RaggedTensor:
        """Ids int32 ``[B, None]`` of strings ``[B]``."""
        words = self._words(text)
        ids = self._merge(self._letters(words.flat_values))
        # Words of a text, and ids of a word: one axis less.
        return tf.RaggedTensor.from_nested_row_splits(
            ids.flat_values, [words.row_splits, ids.row_splits]
        ).merge_dims(1, 2)

    def decode(self, ids: tf.Tensor) -> tf.Tensor:
        """Strings ``[B]`` of ids int32 ``[B, W]``, valid UTF-8; ids of special tokens, and −1,
        are no text."""
        known = tf.where((ids >= 0) & (ids < self._size), ids, self._size)
        starts, lengths = (tf.gather(x, known) for x in (self._starts, self._lengths))
        parts = tf.strings.substr(self._spelt, starts, lengths)
        return _valid(tf.strings.reduce_join(parts, axis=-1))

    def _words(self, text: tf.Tensor) -> tf.RaggedTensor:
        """What is merged apart, string ``[B, None]``."""
        text = tf.strings.regex_replace(_valid(text), r"\x00", "")
        if self._digits:
            text = tf.strings.regex_replace(text, _DIGITS, rf"{_CUT}\1{_CUT}")
        text = tf.strings.regex_replace(text, _INDENT, rf"\1{_CUT}\2")
        text = tf.strings.regex_replace(text, _GPT2, rf"\1{_CUT}")
        words = tf.strings.split(text, _CUT)
        return tf.ragged.boolean_mask(words, tf.strings.length(words) > 0)

    def _letters(self, words: tf.Tensor) -> tf.RaggedTensor:
        """Ids of the bytes of ``words [M]``, int32 ``[M, None]``."""
        letters = tf.strings.bytes_split(words)
        values = tf.io.decode_raw(letters.flat_values, tf.uint8)
        values = tf.cast(tf.reshape(values, [-1]), tf.int32)
        ids = letters.with_flat_values(tf.gather(self._bytes_to_ids, values))
        return tf.ragged.boolean_mask(ids, ids >= 0)

    def _merge(self, words: tf.RaggedTensor) -> tf.RaggedTensor:
        """``words [M, None]`` after all merges: the pair of the lowest rank, the first of its
        kind in a word, until no word has one."""
        none = tf.int32.max
        keys, ranks = self._keys, self._ranks

        def ranked(ids: tf.Tensor) -> tf.Tensor:
            """Rank of each id with the next one, ``[M, L − 1]``."""
            left, right = ids[:, :-1], ids[:, 1:]
            pair = tf.cast(left, tf.int64) * self._size + tf.cast(right, tf.int64)
            place = tf.searchsorted(keys, tf.reshape(pair, [-1]))
            place = tf.reshape(place, tf.shape(pair))
            found = (tf.gather(keys, place) == pair) & (right >= 0)
            return tf.where(found, tf.gather(ranks, place), none)

        def body(ids: tf.Tensor, rank: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            best = tf.reduce_min(rank, axis=1)
            first = tf.argmin(rank, axis=1, output_type=tf.int32)
            first = tf.where(best < none, first, tf.shape(ids)[1])[:, tf.newaxis]
            new = tf.gather(self._merged, tf.where(best < none, best, 0))[:, tf.newaxis]
            column = tf.range(tf.shape(ids)[1])
            later = tf.concat([ids[:, 1:], tf.fill([tf.shape(ids)[0], 1], -1)], axis=1)
            ids = tf.where(column == first, new, tf.where(column > first, later, ids))
            return ids, ranked(ids)

        # One column more than letters, so that there is a pair where there is a letter.
        ids = words.to_tensor(-1)
        ids = tf.pad(ids, [[0, 0], [0, 1]], constant_values=-1)
        ids, _ = tf.while_loop(
            lambda _, rank: tf.reduce_any(rank < none),
            body,
            (ids, ranked(ids)),
            shape_invariants=(tf.TensorShape([None, None]), tf.TensorShape([None, None])),
        )
        return tf.RaggedTensor.from_tensor(ids, padding=-1)


def _cuts_digits(data: Mapping[str, Any]) -> bool:
    """Whether digits are words of their own; checks how text is cut and put together."""
    _require(data["model"].get("type") == "BPE", "model.type", data["model"].get("type"))
    _require((data.get("decoder") or {}).get("type") == "ByteLevel", "decoder", data.get("decoder"))
    cut = data.get("pre_tokenizer") or {}
    cuts = cut.get("pretokenizers", [cut]) if cut.get("type") == "Sequence" else [cut]
    digits = len(cuts) == 2 and cuts[0] == {"type": "Digits", "individual_digits": True}
    last = cuts[-1]
    plain = last.get("type") == "ByteLevel" and last.get("use_regex", True)
    plain &= not last.get("add_prefix_space", True)
    _require(plain and (digits or len(cuts) == 1), "pre_tokenizer", cut)
    return digits


def _require(holds: object, name: str, received: object) -> None:
    if not holds:
        raise ModelSourceError(
            f"A tokenizer with `{name}` = {received!r} cannot be put into a graph: byte-level BPE "
            "that cuts text as GPT-2 or SmolLM2 does can."
        )


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte, as in GPT-2."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _valid(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.unicode_transcode(text, "UTF-8", "UTF-8")

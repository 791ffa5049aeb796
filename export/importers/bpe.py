"""Byte-level BPE vocabularies as ``tokenizer.json`` of the ``tokenizers`` library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfkv.errors import ModelSourceError
from tfkv.export.importers.tokenizer_json import to_json

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

# How text is cut into words before merging, under the names that GGUF gives them.
# "llama-bpe": https://huggingface.co/meta-llama/Meta-Llama-3-8B (tokenizer.json).
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same with each digit by itself: https://huggingface.co/Qwen/Qwen2.5-0.5B (tokenizer.json).
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe", "qwen2")


@dataclasses.dataclass(frozen=True)
class BpeVocabulary:
    """A byte-level BPE vocabulary, as read from a model file.

    Args:
        tokens: Token text (bytes mapped to printable characters as in GPT-2) to id.
        merges: Pairs in order of rank.
        special: Texts of control tokens: parsed as one id, dropped by a decode that skips
            special tokens.
        added: Texts of further tokens that are parsed whole but are ordinary text.
        pre_tokenizer: One of `PRE_TOKENIZERS`.
        add_prefix_space: Whether text gets a space in front before it is cut.
        ignore_merges: Whether a word that is a token itself is taken whole, unmerged.
        bos: Text of a token that ``encode(..., add_special_tokens=True)`` puts in front.
    """

    tokens: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    special: Sequence[str] = ()
    added: Sequence[str] = ()
    pre_tokenizer: str = "gpt-2"
    add_prefix_space: bool = False
    ignore_merges: bool = False
    bos: str | None = None

    def to_tokenizer_json(self) -> str:
        """The vocabulary as text of a ``tokenizer.json``.

        Raises:
            ModelSourceError: The pre-tokenizer is unknown, or a merge names a token that
                is not in the vocabulary.
        """
        import tokenizers
        from tokenizers import decoders, models, normalizers

        tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=self.ignore_merges))
        try:
            tokenizer.model = models.BPE(
                vocab=dict(self.tokens),
                merges=list(self.merges),
                ignore_merges=self.ignore_merges,
            )
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ModelSourceError(
                f"The BPE vocabulary is inconsistent: {error}. Expected that both parts and the "
                "result of every merge are tokens."
            ) from error
        if self.pre_tokenizer == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = self._pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        return to_json(tokenizer, self.tokens, self.special, self.added, self.bos)

    def _pre_tokenizer(self) -> PreTokenizer:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

        space = self.add_prefix_space
        if self.pre_tokenizer == "smollm":
            return Sequence(
                [Digits(individual_digits=True), ByteLevel(add_prefix_space=space, use_regex=True)]
            )
        if self.pre_tokenizer == "gpt-2":
            return ByteLevel(add_prefix_space=space, use_regex=True)
        splits = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
        if self.pre_tokenizer in splits:
            return Sequence(
                [
                    Split(Regex(splits[self.pre_tokenizer]), behavior="isolated"),
                    ByteLevel(add_prefix_space=space, use_regex=False),
                ]
            )
        raise ModelSourceError(
            f"Pre-tokenizer {self.pre_tokenizer!r} is not supported. Supported: "
            f"{', '.join(PRE_TOKENIZERS)}. Without it, text would be cut into other tokens than "
            "in training."
        )

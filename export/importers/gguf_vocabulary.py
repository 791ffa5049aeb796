"""Vocabulary and special tokens of a GGUF file."""

from __future__ import annotations

from tfkv.errors import ModelSourceError
from tfkv.export.importers.bpe import BpeVocabulary
from tfkv.export.importers.gguf_metadata import Metadata
from tfkv.export.importers.sentence_piece import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Piece,
    SentencePieceVocabulary,
)

#: Control tokens that end a turn or a document, whatever the file calls end-of-sequence.
_END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
_SPECIAL_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def read_vocabulary(
    metadata: Metadata, size: int
) -> BpeVocabulary | SentencePieceVocabulary | None:
    """The vocabulary of a file, of so many tokens; None where it has none.

    Raises:
        ModelSourceError: It is of another kind than byte-level BPE and SentencePiece's BPE, or
            inconsistent.
    """
    kind = metadata.get("tokenizer.ggml.model", str, "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ModelSourceError(
            f"{metadata.name} has a tokenizer of the kind {kind!r}. Supported: 'gpt2' (byte-level "
            "BPE) and 'llama' (SentencePiece, merged by scores)."
        )
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if not len(tokens) == len(types) == len(set(tokens)) == size:
        raise ModelSourceError(
            f"The vocabulary of {metadata.name} is inconsistent. Expected {size} distinct tokens, "
            f"each with a type. Received: {len(tokens)} tokens, {len(set(tokens))} of them "
            f"distinct, {len(types)} types."
        )
    return (_byte_level if kind == "gpt2" else _sentence_piece)(metadata, tokens, types)


def _byte_level(metadata: Metadata, tokens: list[str], types: list[int]) -> BpeVocabulary:
    if BYTE in types:
        raise ModelSourceError(
            f"{metadata.name} has byte tokens, which byte-level BPE does not: its tokenizer "
            "metadata is damaged."
        )
    pre = metadata.get("tokenizer.ggml.pre", str, "gpt-2")
    llama3 = pre == "llama-bpe"  # its defaults differ from the others'
    kinds = list(zip(tokens, types, strict=True))
    return BpeVocabulary(
        tokens={text: index for index, text in enumerate(tokens)},
        merges=_merges(metadata),
        special=[text for text, kind in kinds if kind in (UNKNOWN, CONTROL)],
        added=[text for text, kind in kinds if kind == USER_DEFINED],
        pre_tokenizer=pre,
        add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", bool, False),
        ignore_merges=llama3,
        bos=_bos(metadata, default=llama3),
    )


def _sentence_piece(
    metadata: Metadata, tokens: list[str], types: list[int]
) -> SentencePieceVocabulary:
    scores = metadata.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ModelSourceError(
            f"The vocabulary of {metadata.name} is inconsistent: {len(tokens)} tokens, "
            f"{len(scores)} scores."
        )
    return SentencePieceVocabulary(
        [Piece(*piece) for piece in zip(tokens, scores, types, strict=True)],
        add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", bool, True),
        bos=_bos(metadata, default=True),
    )


def _bos(metadata: Metadata, default: bool) -> str | None:
    """Text of the token that texts begin with, where they begin with one."""
    added = metadata.get("tokenizer.ggml.add_bos_token", bool, default)
    return special_tokens(metadata).get("bos") if added else None


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    merges = []
    for line in metadata.get("tokenizer.ggml.merges", list):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelSourceError(
                f"{metadata.name} has a malformed BPE merge. Expected two tokens with one space "
                f"between them. Received: {line!r}."
            )
        merges.append((left, right))
    return merges


def _token_id(metadata: Metadata, role: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    index, tokens = metadata.find(key), metadata.find("tokenizer.ggml.tokens")
    if index is None or tokens is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelSourceError(
            f"Metadata {key!r} of {metadata.name} must lie within the vocabulary of "
            f"{len(tokens)}. Received: {index}."
        )
    return index


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Role (``bos``, ``eos``, ...) to the text of its token."""
    ids = {name: _token_id(metadata, role) for name, role in _SPECIAL_ROLES.items()}
    tokens = metadata.find("tokenizer.ggml.tokens")
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def stop_tokens(metadata: Metadata) -> tuple[int, ...]:
    """Ids that end a turn or a document."""
    named = [_token_id(metadata, role) for role in ("eos", "eot", "eom")]
    tokens = metadata.find("tokenizer.ggml.tokens") or []
    types = metadata.find("tokenizer.ggml.token_type") or []
    ends = [
        index
        for index, (text, type_) in enumerate(zip(tokens, types, strict=False))
        if type_ in (CONTROL, USER_DEFINED) and text in _END_OF_TURN
    ]
    return tuple(dict.fromkeys(index for index in [*named, *ends] if index is not None))

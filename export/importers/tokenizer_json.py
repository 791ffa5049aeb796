"""What every ``tokenizer.json`` has, whatever kind of vocabulary it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def to_json(
    tokenizer: Tokenizer,
    ids: Mapping[str, int],
    special: Sequence[str],
    added: Sequence[str],
    bos: str | None,
) -> str:
    """A tokenizer as text of a ``tokenizer.json``, with its tokens that are parsed whole.

    Args:
        tokenizer: Has a model, and cuts and decodes.
        ids: Token text to id.
        special: Texts of control tokens, dropped by a decode that skips special tokens.
        added: Texts of further tokens that are parsed whole but are ordinary text.
        bos: Text of a token that ``encode(..., add_special_tokens=True)`` puts in front.
    """
    from tokenizers import AddedToken, processors

    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B:1"],
            special_tokens=[(bos, ids[bos])],
        )
    return tokenizer.to_str()

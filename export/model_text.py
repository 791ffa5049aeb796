"""Passages of real text as a model's token ids."""

from __future__ import annotations

import numpy as np

from tfkv import sample_text
from tfkv.errors import ConfigError
from tfkv.export.engine import PREFILL_PIECE
from tfkv.export.importers import ModelSource


def encode(model: ModelSource, text: str) -> np.ndarray:
    """Token ids of a text, int32.

    Raises:
        ConfigError: The model has no tokenizer.
    """
    from tokenizers import Tokenizer

    if model.tokenizer_json is None:
        raise ConfigError("`source` has no tokenizer, so text cannot be read through it.")
    return np.array(Tokenizer.from_str(model.tokenizer_json).encode(text).ids, np.int32)


def passages(model: ModelSource, ids: np.ndarray, count: int, tokens: int) -> list[np.ndarray]:
    """So many passages, spread evenly over a text of ``ids [M]``.

    Raises:
        ConfigError: A number is out of range, or the text is too short.
    """
    if not PREFILL_PIECE <= tokens <= model.config.context_length or count < 1:
        raise ConfigError(
            f"`tokens` must be from {PREFILL_PIECE} to {model.config.context_length}, and "
            f"`passages` at least 1. Received: tokens={tokens}, passages={count}."
        )
    return sample_text.passages(ids, count, tokens)

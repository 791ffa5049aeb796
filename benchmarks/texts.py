"""Prompts and real text that any machine with this Python has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfkv import sample_text
from tfkv.export.importers import ModelSource, load

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "List five animals that live in the desert.",
    "How do I boil an egg?",
)
_OPENINGS = (
    "Once upon a time, in a village by the sea,",
    "The main causes of the First World War were",
    "def fibonacci(n):\n",
    "Water boils at a lower temperature in the mountains because",
    "My favourite recipe for bread begins with",
)
#: Greedy decoding is compared on these: five chats and five texts to go on with.
PROMPTS = (*map(_CHAT.format, _QUESTIONS), *_OPENINGS)


@functools.cache
def model() -> ModelSource:
    """SmolLM2, read once."""
    return load("smollm2")


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return list(_tokenizer().encode(text).ids)


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    return str(_tokenizer().decode(list(tokens)))


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(model().tokenizer_json or "")


@functools.cache
def real_text() -> np.ndarray:
    """Token ids of Python's language reference: English prose with some code; int32."""
    return np.array(encode(sample_text.language_reference()), np.int32)


def passages(count: int, tokens: int) -> list[np.ndarray]:
    """So many stretches of the real text, none of which overlap."""
    return sample_text.passages(real_text(), count, tokens)

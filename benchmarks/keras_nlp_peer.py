"""keras-nlp on the same weights: the parity oracle, and the peer in speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfkv.export.importers import ModelSource
from tfkv.export.importers.keras_nlp import to_keras_nlp


class KerasNlpPeer:
    """A ``LlamaCausalLM`` whose ``generate`` is compiled with XLA, greedy.

    Args:
        source: Its weights.
    """

    def __init__(self, source: ModelSource) -> None:
        from keras_hub.models import LlamaCausalLM

        self.model = LlamaCausalLM(backbone=to_keras_nlp(source), preprocessor=None)
        self.model.compile(sampler="greedy", jit_compile=True)
        self._forward = tf.function(self._all_logits, jit_compile=True)

    def _all_logits(self, ids: tf.Tensor) -> tf.Tensor:
        backbone = self.model.backbone
        hidden = backbone({"token_ids": ids, "padding_mask": tf.ones_like(ids)})
        return backbone.token_embedding(hidden, reverse=True)

    def logits(self, tokens: Sequence[int], length: int) -> np.ndarray:
        """Logits ``[T, V]`` after each token, in one pass without a cache.

        Args:
            tokens: The text.
            length: What it is padded to, behind its end; a length is compiled once.
        """
        ids = np.zeros([1, length], np.int32)
        ids[0, : len(tokens)] = tokens
        return self._forward(tf.constant(ids)).numpy()[0, : len(tokens)]

    def generate(self, prompts: Sequence[Sequence[int] | np.ndarray], length: int) -> np.ndarray:
        """Continues prompts until prompt and answer have `length` tokens; int32 ``[B, length]``.

        A length and a batch size are compiled once.
        """
        ids = np.zeros([len(prompts), length], np.int32)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            mask[row, : len(prompt)] = 1
        inputs = {"token_ids": ids, "padding_mask": mask}
        return self.model.generate(inputs, stop_token_ids=None)["token_ids"]

    def decode_seconds(
        self, text: np.ndarray, context: int, steps: int, batch: int = 1
    ) -> tuple[float, float]:
        """Times the same compiled call with prompts of two lengths.

        It does the same prefill for both, so that the difference is decoding.

        Args:
            text: Token ids, at least `context` + `steps`.
            context: Tokens of the longer generation's prompt.
            steps: Tokens that it decodes; the shorter one decodes `few_steps` of them.
            batch: Rows.

        Returns:
            Seconds of the longer generation and of the shorter.
        """
        length = context + steps
        seconds = []
        for new in (steps, few_steps(steps)):
            prompts = [text[: length - new]] * batch
            start = time.perf_counter()
            self.generate(prompts, length)
            seconds.append(time.perf_counter() - start)
        return seconds[0], seconds[1]


def few_steps(steps: int) -> int:
    """Steps of the shorter generation."""
    return max(steps // 4, 1)


def decode_rate(seconds: Sequence[tuple[float, float]], steps: int, batch: int = 1) -> float:
    """Tokens a second of decoding alone, from the medians of `KerasNlpPeer.decode_seconds`."""
    longer, shorter = (statistics.median(column) for column in zip(*seconds, strict=True))
    return (steps - few_steps(steps)) * batch / (longer - shorter)

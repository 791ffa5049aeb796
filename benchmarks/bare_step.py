"""The compiled computation of an engine, without signatures, batching or server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfkv.export import Engine
from tfkv.export.rows import GENERATE, Admission, Request


class BareStep:
    """One session in the first slot of an engine, moved on by its `compute` alone.

    Args:
        engine: Engine in this process.
        prompt: Given tokens, at most as many as a call takes.

    Attributes:
        position: Tokens that the session holds.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self._engine = engine
        self._fresh = True
        self.position = 0
        self._run(prompt)
        self._fresh = False

    def step(self) -> int:
        """Samples one token, greedily."""
        return self._run(())

    def _run(self, given: Sequence[int]) -> int:
        call = self._arguments(given)
        answer = self._engine.compute(*call)
        self.position = int(answer.position.numpy()[0])
        return int(answer.tokens.numpy()[0, 0])

    def _arguments(self, given: Sequence[int]) -> tuple[Request, Admission, tf.Tensor, tf.Tensor]:
        request, admission, *rest = zero_arguments(self._engine, 1)
        tokens = np.zeros(request.tokens.shape, np.int32)
        tokens[0, : len(given)] = given
        request = request._replace(
            mode=tf.constant([GENERATE]),
            tokens=tf.constant(tokens),
            length=tf.constant([len(given)]),
            position=tf.constant([self.position]),
            max_new_tokens=tf.constant([1]),
            top_p=tf.ones([1]),
            repetition_penalty=tf.ones([1]),
            stop_tokens=tf.fill(request.stop_tokens.shape, -1),
        )
        return request, admission._replace(fresh=tf.constant([self._fresh])), *rest


def zero_arguments(engine: Engine, rows: int) -> Any:
    """Arguments of ``engine.compute`` for a batch size, all zero."""

    def zeros(spec: tf.TensorSpec) -> tf.Tensor:
        return tf.zeros([rows if axis is None else axis for axis in spec.shape], spec.dtype)

    compute: Any = engine.compute
    return tf.nest.map_structure(zeros, compute.input_signature)

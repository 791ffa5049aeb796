"""Reads text through an engine's own pages, for measurements."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfkv.export.engine import Engine
from tfkv.export.kept_tokens import Evicted


class EngineReader:
    """Reads through the page pool of an engine, with the functions that its artifact runs.

    Args:
        engine: The pages of its first slot are overwritten.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = tf.function(self._run, jit_compile=True, autograph=False)
        self._floor = tf.zeros([1], tf.int32)

    def start(self) -> None:
        """Forgets what was evicted; else what is read never reaches behind its own position."""
        self._floor = tf.zeros([1], tf.int32)

    def read(self, tokens: np.ndarray, position: int) -> tf.Tensor:
        """See `Reader.read`."""
        ids, at = tf.constant(tokens, tf.int32), tf.constant(position, tf.int32)
        logits, self._floor = self._step(ids, at, self._floor)
        return logits

    def _run(
        self, tokens: tf.Tensor, position: tf.Tensor, floor: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        decoder = self._engine.decoder
        weights, start = decoder.read_weights(), position[tf.newaxis]
        slot = tf.zeros([1], tf.int32)
        table = tf.range(1, self._engine.geometry.columns + 1)  # no session is about
        parts = decoder.kept.begin(decoder.read_cache(), slot, start == 0)
        # As if each piece were decoded: a policy that wants a prompt whole has read it.
        asks = Evicted(slot, table[tf.newaxis], floor, start)
        parts, floor = decoder.make_room(weights, parts, asks, tf.shape(tokens)[:1], reads_on=False)
        hidden, parts = decoder.prefill_piece(
            weights,
            parts,
            tokens,
            position + tf.range(tokens.shape[0]),
            table,
            position,
            filled=position,
            tails=self._engine.tail.tails(slot, start == 0, tf.zeros_like(slot), start, floor),
        )
        decoder.assign_cache(parts)
        return decoder.logits(weights, hidden), floor

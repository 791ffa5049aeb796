"""Reads text through an engine's own pages, for measurements."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfkv.export.engine import Engine
from tfkv.export.kept_tokens import Evicted
from tfkv.export.packed_blocks import Weights
from tfkv.export.page_pool import Parts
from tfkv.layers.policies import EvictingPolicy


class SavedPages(NamedTuple):
    """What an `EngineReader` held at some time.

    Attributes:
        parts: All of the engine's cache.
        floor: int32 ``[1]``, positions below it were evicted from pages.
    """

    parts: Parts
    floor: tf.Tensor


class EngineReader:
    """Reads through the page pool of an engine, with the functions that its artifact runs.

    Unless it is told that tokens are a prompt, a piece is read as if it were decoded: a policy
    that wants a prompt whole has read it, and one that selects pages does so for a token by itself.

    Args:
        engine: The pages of its first slot are overwritten.
    """

    def __init__(self, engine: Engine) -> None:
        policy = engine.groups.first.cache.policy
        self.engine = engine
        self._evicts = isinstance(policy, EvictingPolicy)
        whole = isinstance(policy, EvictingPolicy) and policy.whole_prompt
        self._reads_prompts_apart = whole or policy.selects
        self._step = tf.function(self._run, jit_compile=True, autograph=False)
        self._evict = tf.function(self._run_eviction, jit_compile=True, autograph=False)
        self._floor = tf.zeros([1], tf.int32)
        self._repeats = isinstance(policy, EvictingPolicy) and policy.repeats
        self._said = np.zeros([engine.groups.positions if self._repeats else 0], np.int32)

    def start(self) -> None:
        """Forgets what was evicted; else what is read never reaches behind its own position."""
        self._floor = tf.zeros([1], tf.int32)

    def read(self, tokens: np.ndarray, position: int, prompt: bool = False) -> tf.Tensor:
        """See `tfkv.evaluation.SessionReader.read`."""
        ids, at = tf.constant(tokens, tf.int32), tf.constant(position, tf.int32)
        # Most policies do not care: no second compilation for them.
        whole = prompt and self._reads_prompts_apart
        if self._repeats:
            given = np.asarray(tokens)[np.asarray(tokens) >= 0]
            self._said[position : position + len(given)] = given
        said = tf.constant(self._said)
        logits, self._floor = self._step(ids, at, self._floor, said, whole)
        return logits

    def save(self) -> SavedPages:
        """What it holds now: buffers that later steps leave alone."""
        return SavedPages(self.engine.decoder.read_cache(), self._floor)

    def resume(self, saved: SavedPages) -> None:
        """Goes back to what it held."""
        self.engine.decoder.assign_cache(saved.parts)
        self._floor = saved.floor

    def compress(self, position: int) -> None:
        """See `tfkv.evaluation.SessionReader.compress`."""
        if self._evicts:
            said = tf.constant(self._said)
            self._floor = self._evict(tf.constant([position], tf.int32), self._floor, said)

    def _tables(self) -> tuple[tf.Tensor, ...]:
        """The pages of each group of layers; no session is about."""
        return tuple(tf.range(1, group.columns + 1) for group in self.engine.groups.groups)

    def _run_eviction(self, position: tf.Tensor, floor: tf.Tensor, said: tf.Tensor) -> tf.Tensor:
        decoder, slot = self.engine.decoder, tf.zeros([1], tf.int32)
        weights, parts = decoder.read_weights(), decoder.read_cache()
        rows = Evicted(slot, self._tables()[0][tf.newaxis], floor, position)
        parts = self._repeated(weights, parts, rows, said, tf.constant([True]))
        row = Evicted(*(field[0] for field in rows))
        decoder.assign_cache(decoder.kept.evict(parts, row, weights.stacked["attention_output"]))
        return position

    def _repeated(
        self, weights: Weights, parts: Parts, rows: Evicted, said: tf.Tensor, due: tf.Tensor
    ) -> Parts:
        """See `Replay`."""
        none = tf.zeros_like(rows.start)
        tails = self.engine.tail.tails(none, rows.start < 0, none, rows.start, rows.floor)

        def tokens_at(_: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
            return tf.gather(said, places)

        return self.engine.replay(weights, parts, rows, tails, tokens_at, due)

    def _run(
        self,
        tokens: tf.Tensor,
        position: tf.Tensor,
        floor: tf.Tensor,
        said: tf.Tensor,
        prompt: bool,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        decoder = self.engine.decoder
        weights, start = decoder.read_weights(), position[tf.newaxis]
        slot, tables = tf.zeros([1], tf.int32), self._tables()
        there = tokens >= 0
        parts = decoder.kept.begin(decoder.read_cache(), slot, start == 0)
        asks = Evicted(slot, tables[0][tf.newaxis], floor, start)
        count = tf.reduce_sum(tf.cast(there, tf.int32))[tf.newaxis]
        if self._repeats and not prompt:
            due = decoder.kept.due(floor, start, count, reads_on=False)
            parts = self._repeated(weights, parts, asks, said, due)
        parts, floor = decoder.make_room(weights, parts, asks, count, reads_on=prompt)
        hidden, parts = decoder.prefill_piece(
            weights,
            parts,
            tf.where(there, tokens, 0),
            tf.where(there, position + tf.range(tokens.shape[0]), -1),
            tables,
            position,
            filled=position,
            tails=self.engine.tail.tails(slot, start == 0, tf.zeros_like(slot), start, floor),
            alone=tokens.shape[0] == 1 and not prompt,
        )
        decoder.assign_cache(parts)
        return decoder.logits(weights, hidden), floor

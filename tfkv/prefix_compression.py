"""Compresses a fixed text once, for all questions that will be asked about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfkv.causal_lm import CausalLM
from tfkv.errors import ConfigError
from tfkv.layers.store import State
from tfkv.pieces import padded_pieces

__all__ = ["CHUNK", "LEAD", "REPEAT", "PrefixCompressor"]

#: What the model is told to do before it is given its own text, as in KVzip.
REPEAT = "\n\nRepeat the previous context exactly.\n\n"

#: Tokens of the text that are repeated at a time.
CHUNK = 512

#: Tokens of the text before a chunk that lead over to it.
LEAD = 8


class PrefixCompressor:
    """Reads a text, reads it again as its own repetition, and keeps what the repetition used.

    Choose it for a document or a system prompt that many sessions begin with: what survives
    depends on no question. Begin each session with the state that `compress` returns.

    Args:
        model: Its layers keep ``kvzip(budget=...)``, with a capacity for the text and `chunk`
            tokens more.
        repeat: Token ids of `REPEAT`.
        chunk: Tokens that are repeated at a time.
        piece: Tokens read at once.
        xla: Whether to compile with XLA.

    Raises:
        ConfigError: A layer of the model does not add up attention.

    Reference:
        Kim et al., KVzip, https://arxiv.org/abs/2505.23416.
    """

    def __init__(
        self,
        model: CausalLM,
        repeat: Sequence[int],
        chunk: int = CHUNK,
        piece: int = 64,
        xla: bool = True,
    ) -> None:
        for cache in model.caches:
            if not getattr(cache.policy, "accumulates", False):
                raise ConfigError(
                    "`model` must keep a cache that adds up attention, such as 'kvzip'. "
                    f"Received: {str(cache)!r}."
                )
        self._model = model
        self._repeat = list(repeat)
        self._chunk = chunk
        self._piece = piece
        self._read = tf.function(self._read_piece, jit_compile=xla)

    def compress(self, tokens: Sequence[int] | np.ndarray) -> list[State]:
        """The state of one session, batch 1, that holds what is left of ``tokens [S]``."""
        return self._model.evict(self.weigh(tokens))

    def weigh(self, tokens: Sequence[int] | np.ndarray) -> list[State]:
        """As `compress`, before anything is evicted.

        Raises:
            ConfigError: The text is empty, or does not fit the capacity.
        """
        ids = np.asarray(tokens, np.int32)
        room = self._model.capacity - self._chunk - len(self._repeat) - LEAD
        if not 1 <= ids.size <= room:
            raise ConfigError(
                f"`tokens` must be from 1 to {room} tokens, `capacity` less a repeated chunk. "
                f"Received: {ids.size} tokens. Raise `capacity`."
            )
        state = self._feed(self._model.init_state(1), ids, 0)
        state = [
            {n: tf.zeros_like(x) if n.endswith("mass") else x for n, x in own.items()}
            for own in state
        ]
        for first in range(0, ids.size, self._chunk):
            lead = ids[max(first - LEAD, 0) : first]
            again = np.concatenate([self._repeat, lead, ids[first : first + self._chunk]])
            state = self._feed(state, again.astype(np.int32), ids.size)
        held = tf.constant([ids.size], tf.int32)
        return [{**own, "filled": held} for own in state]

    def _feed(self, state: list[State], tokens: np.ndarray, position: int) -> list[State]:
        for first, row in padded_pieces(tokens, self._piece):
            ids = tf.constant(row[np.newaxis])
            state = self._read(ids, tf.constant(position + first), state)
        return state

    def _read_piece(
        self, tokens: tf.Tensor, position: tf.Tensor, state: list[State]
    ) -> list[State]:
        positions = (position + tf.range(tokens.shape[1]))[tf.newaxis]
        return self._model.hidden_states(tokens, positions=positions, state=state)[1]

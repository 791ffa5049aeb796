"""What can be read again in sessions that are in one piece."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class SlotGeometry:
    """Limits of sessions, for the decisions of `make_plan`.

    Args:
        positions: Most tokens of a session.
        rollback: Tokens that can always be taken back; −1 = all.
        entries: Tokens up to which all can be taken back whatever `rollback` says.
    """

    positions: int
    rollback: int
    entries: int

    @classmethod
    def of(cls, stores: list, positions: int) -> SlotGeometry:
        """Of the stores of all layers.

        Raises:
            ConfigError: A policy evicts by score, or a window cannot take a token back.
        """
        for store in stores:
            if store.cache.policy.evicts:
                raise ConfigError(
                    f"{store.cache.policy.name!r} evicts by score, which sessions in one piece do "
                    f"not. Received: cache={str(store.cache)!r}. Choose 'dense', 'sliding_window' "
                    "or 'quest', or export a CausalLM's weights with `tfkv.export.export`."
                )
            if store.rollback == 0:
                raise ConfigError(
                    "A window must be able to take back a token: a repeated call reads the last "
                    f"one again. Received: cache={str(store.cache)!r} with slack=0. Make the "
                    "layer with slack=16, say."
                )
        rings = [store for store in stores if store.rollback > 0]
        rollback = min((store.rollback for store in rings), default=-1)
        entries = min((store.layout.entries for store in rings), default=positions)
        return cls(positions, rollback, entries)

    def limit(self, overflow: tf.Tensor) -> tf.Tensor:
        """Most tokens a session may hold, by its overflow choice; int32."""
        return tf.zeros_like(overflow) + self.positions

    def reversible(self, reached: tf.Tensor, floor: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        """Whether a query at `position` still finds all it sees, in a session that once held
        `reached` tokens."""
        return position >= self.earliest_reversible(reached, floor)

    def earliest_reversible(self, reached: tf.Tensor, floor: tf.Tensor) -> tf.Tensor:
        """The first position for which `reversible` holds; int32."""
        del floor
        if self.rollback < 0:
            return tf.zeros_like(reached)
        return tf.where(reached <= self.entries, 0, reached - self.rollback)

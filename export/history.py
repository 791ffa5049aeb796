"""What each session said: tokens, who chose them, and how likely they were."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfkv.export.plan import Remembered, oldest_start
from tfkv.export.rows import NO_LOGPROB
from tfkv.export.transient import TransientVariable

#: Of one remembered position: token, kind and logprob.
BYTES_PER_TOKEN = 4 + 1 + 4


class History:
    """Per-slot memory of the last `size` tokens, and how far each session is.

    A token at position p has place ``p mod size``. Row `slots` is the spare: rows that must
    change nothing are written there.

    Args:
        slots: Sessions held at once.
        size: Token positions remembered.
    """

    def __init__(self, slots: int, size: int) -> None:
        self.slots = slots
        self.size = size
        shape = (slots + 1, size)
        self.tokens = TransientVariable("history_tokens", shape, tf.int32)
        self.kinds = TransientVariable("history_kinds", shape, tf.int8)
        self.logprobs = TransientVariable("history_logprobs", shape, tf.float32)
        self.held = TransientVariable("session_held", (slots + 1,), tf.int32)
        self.filled = TransientVariable("session_filled", (slots + 1,), tf.int32)
        self.reached = TransientVariable("session_reached", (slots + 1,), tf.int32)
        self.floor = TransientVariable("session_floor", (slots + 1,), tf.int32)

    def recall(self, slot: tf.Tensor, fresh: tf.Tensor) -> Remembered:
        """What the sessions of a batch hold; a fresh one holds nothing.

        Args:
            slot: int32 ``[B]``.
            fresh: bool ``[B]``.
        """
        none = fresh | (slot == self.slots)
        held, filled, reached, floor = (
            tf.where(none, 0, tf.gather(variable.read(), slot))
            for variable in (self.held, self.filled, self.reached, self.floor)
        )
        return Remembered(
            held,
            filled,
            reached,
            floor,
            tf.gather(self.tokens.read(), slot),
            tf.cast(tf.gather(self.kinds.read(), slot), tf.int32),
            tf.gather(self.logprobs.read(), slot),
        )

    def oldest(self, reached: tf.Tensor) -> tf.Tensor:
        """Oldest position where a call may begin: the token before it is remembered, too."""
        return oldest_start(reached, self.size)

    def look(self, stored: Remembered, places: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Tokens and logprobs at ``places [B, n]``; `NO_LOGPROB` where nothing is held."""
        at = tf.math.floormod(places, self.size)
        held = (places < stored.held[:, tf.newaxis]) & (places >= 0)
        logprobs = tf.gather(stored.logprobs, at, batch_dims=1)
        return (
            tf.gather(stored.tokens, at, batch_dims=1),
            tf.where(held, logprobs, NO_LOGPROB),
        )

    def reader(self) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        """A function from slots and absolute positions ``[..., n]`` to tokens, as of now."""
        flat = tf.reshape(self.tokens.read(), [-1])
        return lambda slot, places: tf.gather(
            flat, slot[..., tf.newaxis] * self.size + places % self.size
        )

    def tokens_of(self, slot: tf.Tensor, held: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """All remembered tokens ``[B, size]``, and which places hold one."""
        filled = tf.range(self.size) < held[:, tf.newaxis]
        return tf.gather(self.tokens.read(), slot), filled

    def write(
        self,
        slot: tf.Tensor,
        places: tf.Tensor,
        tokens: tf.Tensor,
        kinds: tf.Tensor,
        logprobs: tf.Tensor,
    ) -> None:
        """Stores tokens ``[B, n]`` at positions ``[B, n]``; −1 = nowhere."""
        rows = self._rows(slot, places)
        for variable, values in (
            (self.tokens, tokens),
            (self.kinds, tf.cast(kinds, tf.int8)),
            (self.logprobs, logprobs),
        ):
            _scatter(variable, rows, values)

    def write_logprobs(self, slot: tf.Tensor, places: tf.Tensor, logprobs: tf.Tensor) -> None:
        """Stores logprobs of tokens that are held already."""
        _scatter(self.logprobs, self._rows(slot, places), logprobs)

    def publish(
        self,
        slot: tf.Tensor,
        held: tf.Tensor,
        filled: tf.Tensor,
        reached: tf.Tensor,
        floor: tf.Tensor,
    ) -> None:
        """Sets how far the sessions are; until then nobody sees what was written.

        Args:
            slot: int32 ``[B]``.
            held: int32 ``[B]``, tokens held.
            filled: int32 ``[B]``, positions whose keys are on pages.
            reached: int32 ``[B]``, most tokens the session ever held: what it overwrote in
                its ring stays lost when it is truncated.
            floor: int32 ``[B]``, positions below it were evicted by score.
        """
        rows = slot[:, tf.newaxis]
        counts = (self.held, self.filled, self.reached, self.floor)
        state = zip(counts, (held, filled, reached, floor), strict=True)
        for variable, values in state:
            variable.assign(tf.tensor_scatter_nd_update(variable.read(), rows, values))

    def copy(self, source: tf.Tensor, target: tf.Tensor) -> None:
        """Copies all that slots remember to other slots."""
        rows = target[:, tf.newaxis]
        for variable in (self.tokens, self.kinds, self.logprobs):
            value = variable.read()
            copied = tf.tensor_scatter_nd_update(value, rows, tf.gather(value, source))
            variable.assign(copied)

    def first_difference(self, first: Remembered, second: Remembered, stop: tf.Tensor) -> tf.Tensor:
        """First position below `stop` where two sessions differ, or `stop`; int32 ``[B]``.

        Where the second has ended counts as different, and what is forgotten as equal.
        """
        oldest = tf.maximum(self.oldest(first.reached), self.oldest(second.reached))
        places = oldest[:, tf.newaxis] + tf.range(self.size)
        at = places % self.size
        said = (tf.gather(side.tokens, at, batch_dims=1) for side in (first, second))
        differs = tf.not_equal(*said) | (places >= second.held[:, tf.newaxis])
        differs &= places < stop[:, tf.newaxis]
        return tf.reduce_min(tf.where(differs, places, stop[:, tf.newaxis]), axis=1)

    def _rows(self, slot: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Flat places ``[B · n, 1]``; nowhere means the spare row."""
        spare = self.slots * self.size
        rows = slot[:, tf.newaxis] * self.size + places % self.size
        return tf.reshape(tf.where(places >= 0, rows, spare), [-1, 1])


def _scatter(variable: TransientVariable, rows: tf.Tensor, values: tf.Tensor) -> None:
    flat = tf.reshape(variable.read(), [-1])
    flat = tf.tensor_scatter_nd_update(flat, rows, tf.reshape(values, [-1]))
    variable.assign(tf.reshape(flat, variable.shape))

"""Keys and values of encoded sequences, which nothing is added to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfkv.errors import CacheError, ConfigError
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cache_view import CacheView
from tfkv.layers.codecs.codec import Coded
from tfkv.layers.store import CacheStore, State


class EncodedStore(CacheStore):
    """Holds one encoded sequence for each session of the batch: written once, read by every step.

    The state is a flat dict: ``keys/<part>`` and ``values/<part>``, the codec's parts
    ``[B, K, S, ...]``, and ``given``, bool ``[B, S]``, which entries hold a token.

    Args:
        cache: Policy and codec. The policy must be ``dense``: an encoded sequence has no newest
            tokens, and every step may need any of it.
        num_key_value_heads: KV heads (axis K).
        head_dim: Width of a head (axis H).
        capacity: Most tokens of a sequence (axis S).

    Raises:
        ConfigError: A value is out of range, or the cache does what cannot be done here.
    """

    def __init__(
        self,
        cache: CacheSpec | str | Mapping[str, Any],
        num_key_value_heads: int,
        head_dim: int,
        capacity: int,
    ) -> None:
        self.cache = CacheSpec.parse(cache)
        codec = self.cache.codec
        if self.cache.policy.name != "dense":
            raise ConfigError(
                "What was encoded is kept whole, so that its policy must be 'dense'. Received: "
                f"cache={str(self.cache)!r}. Choose a codec alone, such as 'int8'."
            )
        if codec.recent or codec.tokens > 1 or codec.needs_calibration:
            raise ConfigError(
                f"{codec.name!r} needs newest tokens, or a calibration, and an encoded sequence "
                f"has neither. Received: cache={str(self.cache)!r}. Choose 'float32', 'bfloat16' "
                f"or 'int8', or a codec of few bits without exact tokens, such as "
                "'k4v4(recent=0,sinks=0)'."
            )
        if not isinstance(capacity, int) or capacity < 1:
            raise ConfigError(
                f"`capacity` must be an integer of at least 1. Received: capacity={capacity!r}."
            )
        codec.check(head_dim)
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.capacity = capacity

    def spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state."""
        lead = (batch_size, self.num_key_value_heads, self.capacity)
        stored = {
            f"{side}/{name}": tf.TensorSpec((*lead, *part.shape), part.dtype)
            for side, codec in self.cache.codec.sides().items()
            for name, part in codec.spec(self.head_dim).items()
        }
        return stored | {"given": tf.TensorSpec((batch_size, self.capacity), tf.bool)}

    def parts(self, state: State) -> list[tuple[EncodedStore, slice, State]]:
        return [(self, slice(None), state)]

    def view(self, state: State) -> CacheView:
        """What attention reads."""
        keys, values = (
            {name: state[f"{side}/{name}"] for name in codec.spec(self.head_dim)}
            for side, codec in self.cache.codec.sides().items()
        )
        places = tf.range(self.capacity)[tf.newaxis]
        return CacheView(keys, values, tf.where(state["given"], places, -1))

    def write(self, keys: Coded, values: Coded, given: tf.Tensor) -> State:
        """A state that holds these sequences, whatever was there before.

        Args:
            keys: Encoded by the cache's codec, parts ``[B, K, S, ...]``, S up to the capacity.
            values: Likewise.
            given: bool ``[B, S]``, False = padding.

        Raises:
            CacheError: They are longer than the capacity.
        """
        width = given.shape[1]
        if width is not None and width > self.capacity:
            raise CacheError(
                f"An encoded sequence must fit `capacity`={self.capacity} tokens. Received: "
                f"{width} tokens. Raise `capacity`, or encode fewer."
            )
        room = self.capacity - tf.shape(given)[1]
        state = {
            f"{side}/{name}": _padded(part, room, 2)
            for side, coded in (("keys", keys), ("values", values))
            for name, part in coded.items()
        }
        state["given"] = _padded(given, room, 1)
        batch = given.shape[0]
        return {
            name: tf.ensure_shape(state[name], [batch, *spec.shape[1:]])
            for name, spec in self.spec(1).items()
        }


def _padded(x: tf.Tensor, room: tf.Tensor, axis: int) -> tf.Tensor:
    """`x` with `room` zeros behind an axis."""
    return tf.pad(x, [[0, room if n == axis else 0] for n in range(x.shape.rank)])

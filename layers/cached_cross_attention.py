"""Attention to an encoded sequence, whose keys and values are made once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfkv.errors import CacheError
from tfkv.layers import attention, masks
from tfkv.layers.attention_heads import AttentionHeads, silenced
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cache_view import CacheView
from tfkv.layers.codecs import CODECS, CacheCodec
from tfkv.layers.continuation import Continuation
from tfkv.layers.encoded_store import EncodedStore
from tfkv.layers.keras_api import LEGACY, keras
from tfkv.layers.scoring import Scoring
from tfkv.layers.store import State

#: How a sequence that is not stored is written.
_FLOAT32 = CODECS["float32"]


@keras.saving.register_keras_serializable(package="tfkv")
class CachedCrossAttention(AttentionHeads):
    """Multi-head, grouped-query or multi-query attention of a decoder to what an encoder made.

    Choose it beside `CachedMultiHeadAttention` in the decoder of an encoder-decoder model. Keys
    and values are projected when `encoded` is given together with a state, and kept there; later
    steps give the state alone, and neither the encoder nor these projections run again. Without
    a state it is plain cross attention, for training.

    Every query sees the whole encoded sequence but its padding. A codec may write keys and values
    in fewer bits; what is kept is always all of them. Weights are named and shaped as those of
    `CachedMultiHeadAttention`, and as those of `keras.layers.MultiHeadAttention`; scores and
    softmax are float32 whatever the compute dtype.

    Args:
        num_heads: Query heads (axis N).
        key_dim: Width of a head (axis H).
        num_key_value_heads: KV heads (axis K), a divisor of `num_heads`; all of them where
            left out.
        cache: How keys and values are written: ``"float32"``, ``"int8"``,
            ``"k4v4(recent=0,sinks=0)"``, a `CacheSpec`, or what its `to_config` gives.
        capacity: Most tokens of an encoded sequence (axis S).
        use_bias: Whether the projections of queries, keys and values add a bias.
        kernel_initializer: Of the four kernels.
        use_output_bias: Whether the output projection adds one; as `use_bias` where left out.
        soft_cap: Scores are squeezed below it; 0 = they are not.
        query_scale: What queries are multiplied by; 0 = 1/√H.
        query_key_epsilon: Each head's queries and keys pass an RMSNorm with this epsilon; 0 =
            none.

    Call arguments:
        x: ``[B, T, D]``.
        encoded: ``[B, S, E]``, the encoder's output; None = the state holds it.
        state: As of `init_state` or of the call before; None or empty = no cache.
        training: Whether the call is part of training, which has no state.
        mask: bool ``[B, T]``; queries of padding give outputs that are meaningless.
        encoded_mask: bool ``[B, S]``, False = padding of the encoded sequence; where left out,
            the mask that a layer before put on `encoded`.

    Returns:
        ``(output, state)``: ``[B, T, D]`` in the compute dtype, and the state (empty where none
        was given). The output of a row without any encoded token is the output bias, or 0.

    Raises:
        ConfigError: An argument is out of range, or the cache does more than write numbers.
        CacheError: Nothing encoded is given, or more than fits. Or training with a state.

    Example:
        >>> layer = CachedCrossAttention(8, 64, 2, capacity=128)
        >>> encoded, token = tf.random.normal([1, 20, 256]), tf.random.normal([1, 1, 512])
        >>> output, state = layer(token, encoded, state=layer.init_state(batch_size=1))
        >>> output, state = layer(token, state=state)

    Reference:
        Vaswani et al., https://arxiv.org/abs/1706.03762; Ainslie et al., GQA,
        https://arxiv.org/abs/2305.13245
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        num_key_value_heads: int | None = None,
        cache: CacheSpec | str | Mapping[str, Any] = "dense",
        capacity: int = 2048,
        use_bias: bool = False,
        kernel_initializer: Any = "glorot_uniform",
        use_output_bias: bool | None = None,
        soft_cap: float = 0.0,
        query_scale: float = 0.0,
        query_key_epsilon: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_heads,
            key_dim,
            num_key_value_heads,
            use_bias,
            kernel_initializer,
            use_output_bias,
            soft_cap,
            query_scale,
            query_key_epsilon,
            **kwargs,
        )
        self.store = EncodedStore(cache, self.num_key_value_heads, key_dim, capacity)
        self.cache = self.store.cache
        self.capacity = capacity

    def build(
        self, x_shape: tuple[int | None, ...], encoded_shape: tuple[int | None, ...] | None = None
    ) -> None:
        # Keras 2 tells the first shape alone: the first call has the other.
        if encoded_shape is None:
            if LEGACY:
                return
            raise CacheError(
                "`encoded` must be given in the first call of a layer: the projections of keys "
                "and values are as wide as it is. Received: encoded=None."
            )
        self._build_heads(x_shape[-1], encoded_shape[-1])
        self.built = True

    def get_state_spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state."""
        return self.store.spec(batch_size)

    def init_state(self, batch_size: int) -> State:
        """The state of sessions that have nothing encoded."""
        return self.store.init(batch_size)

    def call(
        self,
        x: tf.Tensor,
        encoded: tf.Tensor | None = None,
        state: State | None = None,
        training: bool = False,
        mask: tf.Tensor | None = None,
        encoded_mask: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, State]:
        del mask
        if training:
            self._refuse_to_train(state)
        if not hasattr(self, "query"):
            with tf.init_scope():
                self.build(x.shape, None if encoded is None else encoded.shape)
        scope = None if state else Continuation.current()
        if scope is not None:
            before = scope.take(self, self.name)
            output, after = self._step(x, encoded if scope.encodes else None, before, encoded_mask)
            scope.give(after)
            return output, {}
        return self._step(x, encoded, state, encoded_mask)

    def _step(
        self,
        x: tf.Tensor,
        encoded: tf.Tensor | None,
        state: State | None,
        encoded_mask: tf.Tensor | None,
    ) -> tuple[tf.Tensor, State]:
        """`call` where it is settled which state counts."""
        x = tf.cast(x, self.compute_dtype)
        if encoded is None:
            if not state:
                raise CacheError(
                    "`encoded` must be given where there is no state. Received: encoded=None and "
                    "no state. Give the encoder's output, or the state of a call that had it."
                )
            return self._attend(x, self.store.view(state), self.cache.codec), state
        keys, values, given = self.project_encoded(encoded, encoded_mask)
        codec = self.cache.codec if state else _FLOAT32
        coded = codec.keys.encode(keys), codec.values.encode(values)
        if not state:
            places = tf.where(given, 0, -1)
            return self._attend(x, CacheView(*coded, places), codec), {}
        state = self.store.write(*coded, given)
        return self._attend(x, self.store.view(state), codec), state

    def project_encoded(
        self, encoded: tf.Tensor, mask: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Keys and values float32 ``[B, K, S, H]`` of ``encoded [B, S, E]``, and which of its
        tokens are no padding, bool ``[B, S]``."""
        # Beside a second tensor argument not every Keras fills in a mask by itself.
        mask = getattr(encoded, "_keras_mask", None) if mask is None else mask
        given = tf.ones(tf.shape(encoded)[:2], tf.bool) if mask is None else tf.cast(mask, tf.bool)
        given = tf.ensure_shape(given, encoded.shape[:2])
        encoded = silenced(tf.cast(encoded, self.compute_dtype), given)
        keys, values = (
            tf.transpose(self._heads_of(name, encoded), [0, 2, 1, 3]) for name in ("key", "value")
        )
        return keys, values, given

    def _attend(self, x: tf.Tensor, seen: CacheView, codec: CacheCodec) -> tf.Tensor:
        """Output ``[B, T, D]`` of queries made of ``x [B, T, D]`` over what they see."""
        queries = self._heads_of("query", x)
        grouped = attention.group_queries(queries, self.num_key_value_heads, self.query_scale)
        part = attention.attend(
            grouped,
            seen.keys,
            seen.values,
            masks.stored(seen.positions),
            codec,
            scoring=Scoring(self.soft_cap),
        )
        mixed = attention.ungroup_output(attention.normalize(part), self.num_heads)
        return self.attention_output(tf.cast(mixed, self.compute_dtype))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "cache": self.cache.to_config(),
            "capacity": self.capacity,
        }

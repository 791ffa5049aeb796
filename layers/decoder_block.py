"""One block of a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfkv.architecture import BlockOptions, read
from tfkv.errors import ConfigError
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cached_multi_head_attention import CachedMultiHeadAttention, KeysValues
from tfkv.layers.experts import Experts
from tfkv.layers.feed_forward import activate
from tfkv.layers.keras_api import keras
from tfkv.layers.layer_norm import LayerNorm
from tfkv.layers.rms_norm import RMSNorm
from tfkv.layers.store import State


@keras.saving.register_keras_serializable(package="tfkv")
class DecoderBlock(keras.layers.Layer):
    """Attention and a feed-forward layer, each after a norm and with a residual.

    Without options it is Llama's: RMSNorm, SwiGLU, no biases.

    Args:
        num_query_heads: Query heads (axis N).
        num_key_value_heads: KV heads (axis K), a divisor of `num_query_heads`.
        head_dim: Width of a head (axis H).
        intermediate_dim: Width of the feed-forward layer (axis F).
        rope_max_wavelength: RoPE base ("theta"); None = no rotation.
        rms_epsilon: Added to the mean square, or the variance, in norms.
        cache: What the cache keeps and how it is written.
        capacity: Most tokens of a session, where the policy does not bound them.
        slack: Tokens that a window keeps so that as many can be taken back.
        options: What differs from Llama; a `tfkv.architecture.BlockOptions` or a dict of its
            fields.
        share_kv_with: Name of an earlier block whose keys and values this one reads; see
            `CachedMultiHeadAttention`.

    Call arguments:
        x, positions, state, training, mask, kv, return_kv: As of `CachedMultiHeadAttention`.

    Returns:
        ``(output, state)``, or with `return_kv` three, as of `CachedMultiHeadAttention`.

    Raises:
        ConfigError: An argument is out of range.

    Reference:
        Touvron et al., Llama, https://arxiv.org/abs/2302.13971; Shazeer, GLU variants,
        https://arxiv.org/abs/2002.05202
    """

    def __init__(
        self,
        num_query_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        intermediate_dim: int,
        rope_max_wavelength: float | None = 10000.0,
        rms_epsilon: float = 1e-5,
        cache: CacheSpec | str | Mapping[str, Any] = "dense",
        capacity: int = 2048,
        slack: int = 0,
        options: BlockOptions | Mapping[str, Any] | None = None,
        share_kv_with: str | None = None,
        **kwargs: Any,
    ) -> None:
        # Keras would cast the float tensors of a state to the compute dtype.
        super().__init__(autocast=False, **kwargs)
        if not isinstance(intermediate_dim, int) or intermediate_dim < 1:
            raise ConfigError(
                "`intermediate_dim` must be an integer of at least 1. "
                f"Received: intermediate_dim={intermediate_dim!r}."
            )
        self.intermediate_dim = intermediate_dim
        self.rms_epsilon = rms_epsilon
        self.options: BlockOptions = read(BlockOptions, options or {})
        self.supports_masking = True
        norms, own = self.options.norms, self.options.attention
        self.attention_norm = self._norm("attention_norm")
        self.attention = CachedMultiHeadAttention(
            num_query_heads,
            head_dim,
            num_key_value_heads,
            rope_max_wavelength,
            cache,
            capacity,
            slack,
            use_bias=own.bias,
            use_output_bias=own.output_bias,
            rope=self.options.rope,
            alibi_scale=self.options.alibi_scale,
            window=self.options.window,
            soft_cap=own.soft_cap,
            query_scale=own.query_scale,
            query_key_epsilon=own.query_key_epsilon,
            share_kv_with=share_kv_with,
            dtype=self.dtype_policy,
            name="attention",
        )
        self.attention.shared_name = self.name
        self.feedforward_norm = self._norm("feedforward_norm")
        if norms.post_attention:
            self.post_attention_norm = self._norm("post_attention_norm")
        if norms.post_feedforward:
            self.post_feedforward_norm = self._norm("post_feedforward_norm")

    def _norm(self, name: str) -> keras.layers.Layer:
        cls = RMSNorm if self.options.norms.kind == "rms" else LayerNorm
        return cls(self.rms_epsilon, dtype=self.dtype_policy, name=name)

    def build(self, input_shape: tuple[Any, ...]) -> None:
        hidden_dim, options = input_shape[-1], self.options
        if options.experts is not None:
            activation = options.feed_forward.activation
            self.experts = Experts(
                options.experts, activation, dtype=self.dtype_policy, name="experts"
            )
            self.experts.build(input_shape)
        else:
            if options.feed_forward.gated:
                self.gate = self._dense(self.intermediate_dim, "gate")
                self.gate.build(input_shape)
            self.up = self._dense(self.intermediate_dim, "up")
            self.down = self._dense(hidden_dim, "down")
            self.up.build(input_shape)
            self.down.build((*input_shape[:-1], self.intermediate_dim))
        for layer in (self.attention_norm, self.attention, self.feedforward_norm):
            layer.build(input_shape)
        if options.norms.post_attention:
            self.post_attention_norm.build(input_shape)
        if options.norms.post_feedforward:
            self.post_feedforward_norm.build(input_shape)
        self.built = True

    def _dense(self, units: int, name: str) -> keras.layers.Dense:
        bias = self.options.feed_forward.bias
        return keras.layers.Dense(units, use_bias=bias, dtype=self.dtype_policy, name=name)

    def get_state_spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state."""
        return self.attention.get_state_spec(batch_size)

    def init_state(self, batch_size: int) -> State:
        """The state of empty sessions."""
        return self.attention.init_state(batch_size)

    def call(
        self,
        x: tf.Tensor,
        positions: tf.Tensor | None = None,
        state: State | None = None,
        training: bool = False,
        mask: tf.Tensor | None = None,
        kv: KeysValues | None = None,
        return_kv: bool = False,
    ) -> tuple[tf.Tensor, State] | tuple[tf.Tensor, State, KeysValues]:
        mask = getattr(x, "_keras_mask", None) if mask is None else mask
        x = tf.cast(x, self.compute_dtype)
        attended, *rest = self.attention(
            self.attention_norm(x),
            positions=positions,
            state=state,
            training=training,
            mask=mask,
            kv=kv,
            return_kv=return_kv,
        )
        if self.options.norms.post_attention:
            attended = self.post_attention_norm(attended)
        if self.options.parallel_residual:
            return (x + attended + self.feed_forward(x), *rest)
        x = x + attended
        return (x + self.feed_forward(x), *rest)

    def feed_forward(self, x: tf.Tensor) -> tf.Tensor:
        """What the feed-forward layer adds to ``x [B, T, D]``."""
        y = self.feedforward_norm(x)
        if self.options.experts is not None:
            y = self.experts(y)
        elif self.options.feed_forward.gated:
            y = self.down(activate(self.gate(y), self.up(y), self.options.feed_forward.activation))
        else:
            y = self.down(activate(self.up(y), None, self.options.feed_forward.activation))
        return self.post_feedforward_norm(y) if self.options.norms.post_feedforward else y

    def get_config(self) -> dict[str, Any]:
        attention = self.attention
        return {
            **super().get_config(),
            "num_query_heads": attention.num_heads,
            "num_key_value_heads": attention.num_key_value_heads,
            "head_dim": attention.key_dim,
            "intermediate_dim": self.intermediate_dim,
            "rope_max_wavelength": attention.rope_max_wavelength,
            "rms_epsilon": self.rms_epsilon,
            "cache": attention.cache.to_config(),
            "capacity": attention.capacity,
            "slack": attention.slack,
            "options": dataclasses.asdict(self.options),
            "share_kv_with": attention.share_kv_with,
        }

"""What layers of attention have in common: heads, and the projections into and out of them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfkv.errors import CacheError, ConfigError
from tfkv.layers.keras_api import LEGACY, keras
from tfkv.layers.normalization import rms_normalize
from tfkv.layers.rms_norm import RMSNorm


class AttentionHeads(keras.layers.Layer):
    """Projections of queries, keys, values and of what the heads saw, named and shaped as in
    keras-nlp; a base class, not a layer to use.

    Args:
        num_heads: Query heads (axis N).
        key_dim: Width of a head (axis H).
        num_key_value_heads: KV heads (axis K), a divisor of `num_heads`; all of them where None.
        use_bias: Whether the projections of queries, keys and values add a bias.
        kernel_initializer: Of the kernels.
        use_output_bias: Whether the output projection adds one; as `use_bias` where None.
        soft_cap: Scores are squeezed below it; 0 = they are not.
        query_scale: What queries are multiplied by; 0 = 1/√H.
        query_key_epsilon: Each head's queries and keys pass an RMSNorm with this epsilon; 0 =
            none.

    Raises:
        ConfigError: An argument is out of range, or Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        num_key_value_heads: int | None,
        use_bias: bool,
        kernel_initializer: Any,
        use_output_bias: bool | None,
        soft_cap: float,
        query_scale: float,
        query_key_epsilon: float,
        **kwargs: Any,
    ) -> None:
        # Keras would cast the float tensors of a state to the compute dtype.
        super().__init__(autocast=False, **kwargs)
        _require_tensorflow()
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.use_output_bias = use_bias if use_output_bias is None else use_output_bias
        self.soft_cap = soft_cap
        self.query_scale = query_scale or key_dim**-0.5
        self.query_key_epsilon = query_key_epsilon
        self.supports_masking = True
        self._check_heads()

    def _check_heads(self) -> None:
        heads, shared = self.num_heads, self.num_key_value_heads
        for name, value in (("num_heads", heads), ("num_key_value_heads", shared)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"`{name}` must be an integer of at least 1. Received: {name}={value!r}."
                )
        if heads % shared:
            raise ConfigError(
                f"`num_heads` must be a multiple of num_key_value_heads={shared}. "
                f"Received: num_heads={heads}."
            )
        self._check_not_negative("soft_cap", "query_scale", "query_key_epsilon")

    def _check_not_negative(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 0:
                value = getattr(self, name)
                raise ConfigError(f"`{name}` must not be below 0. Received: {name}={value!r}.")

    def _build_heads(self, hidden_dim: int | None, key_value_dim: int | None) -> None:
        """Makes the projections.

        Args:
            hidden_dim: Width of the input (axis D).
            key_value_dim: Width of what keys and values are made of; None = of nothing here.
        """
        head_shape = (None, None, self.num_heads, self.key_dim)
        self.query = self._project("btd,dnh->btnh", head_shape[1:], "nh", "query")
        self.query.build((None, None, hidden_dim))
        if key_value_dim is not None:
            head_shape_kv = (None, self.num_key_value_heads, self.key_dim)
            self.key = self._project("btd,dkh->btkh", head_shape_kv, "kh", "key")
            self.value = self._project("btd,dkh->btkh", head_shape_kv, "kh", "value")
            for projection in (self.key, self.value):
                projection.build((None, None, key_value_dim))
        self.attention_output = self._project(
            "btnh,nhd->btd", (None, hidden_dim), "d", "attention_output"
        )
        self.attention_output.build(head_shape)
        if self.query_key_epsilon:
            names = ("query_norm",) if key_value_dim is None else ("query_norm", "key_norm")
            for name in names:
                norm = RMSNorm(self.query_key_epsilon, dtype=self.dtype_policy, name=name)
                norm.build((None, None, None, self.key_dim))
                setattr(self, name, norm)

    def _project(
        self, equation: str, output_shape: tuple[int | None, ...], bias_axes: str, name: str
    ) -> keras.layers.EinsumDense:
        biased = self.use_output_bias if name == "attention_output" else self.use_bias
        config = keras.initializers.serialize(self.kernel_initializer)
        return keras.layers.EinsumDense(
            equation,
            output_shape=output_shape,
            bias_axes=bias_axes if biased else None,
            kernel_initializer=keras.initializers.deserialize(config),
            dtype=self.dtype_policy,
            name=name,
        )

    def _heads_of(self, projection: str, x: tf.Tensor) -> tf.Tensor:
        """Heads ``[B, T, heads, H]`` that a projection makes of ``x [B, T, D]``, in float32."""
        heads = tf.cast(getattr(self, projection)(x), tf.float32)
        if self.query_key_epsilon and projection != "value":
            scale = tf.convert_to_tensor(getattr(self, f"{projection}_norm").scale)
            heads = rms_normalize(heads, scale, self.query_key_epsilon)
        return heads

    @staticmethod
    def _refuse_to_train(state: Any) -> None:
        if state:
            raise CacheError(
                "`state` must be None in training: codes have no gradient. Received: "
                "training=True and a state. Leave out `state`, or pass training=False."
            )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "num_key_value_heads": self.num_key_value_heads,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "use_output_bias": self.use_output_bias,
            "soft_cap": self.soft_cap,
            "query_scale": self.query_scale,
            "query_key_epsilon": self.query_key_epsilon,
        }


def silenced(x: tf.Tensor, given: tf.Tensor) -> tf.Tensor:
    """``x [B, T, D]`` with zeros where ``given [B, T]`` is False: a weight of 0 does not silence
    what is not finite."""
    return tf.where(given[..., tf.newaxis], x, tf.zeros_like(x))


def _require_tensorflow() -> None:
    backend = "tensorflow" if LEGACY else keras.backend.backend()
    if backend != "tensorflow":
        raise ConfigError(
            "tfkv layers need Keras on TensorFlow: set KERAS_BACKEND=tensorflow before Keras is "
            f"imported. Received: backend={backend!r}."
        )

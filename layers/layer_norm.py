"""Layer normalisation as a Keras layer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.keras_api import KEEPS_DTYPE, keras
from tfkv.layers.normalization import layer_normalize


@keras.saving.register_keras_serializable(package="tfkv")
class LayerNorm(keras.layers.Layer):
    """Takes the mean of the last axis away, divides by its standard deviation, scales each
    channel and adds a bias.

    The statistics are taken in float32 whatever the compute dtype is, by the same
    `layer_normalize` that exported decoders call.

    Args:
        epsilon: Added to the variance.

    Call arguments:
        x: ``[..., D]``.

    Returns:
        Tensor of the shape of `x`, in the compute dtype.

    Reference:
        Ba et al., https://arxiv.org/abs/1607.06450
    """

    def __init__(self, epsilon: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not epsilon > 0:
            raise ConfigError(f"`epsilon` must be greater than 0. Received: epsilon={epsilon!r}.")
        self.epsilon = float(epsilon)
        self.supports_masking = True

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        shape = (input_shape[-1],)
        self.scale = self.add_weight(name="scale", shape=shape, initializer="ones", **KEEPS_DTYPE)
        self.bias = self.add_weight(name="bias", shape=shape, initializer="zeros", **KEEPS_DTYPE)
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        scale, bias = tf.convert_to_tensor(self.scale), tf.convert_to_tensor(self.bias)
        return layer_normalize(x, scale, bias, self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}

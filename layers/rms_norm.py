"""Root-mean-square normalisation as a Keras layer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.keras_api import KEEPS_DTYPE, keras
from tfkv.layers.normalization import rms_normalize


@keras.saving.register_keras_serializable(package="tfkv")
class RMSNorm(keras.layers.Layer):
    """Divides by the root mean square of the last axis and scales each channel.

    The statistics are taken in float32 whatever the compute dtype is, by the same
    `rms_normalize` that exported decoders call.

    Args:
        epsilon: Added to the mean square.

    Call arguments:
        x: ``[..., D]``.

    Returns:
        Tensor of the shape of `x`, in the compute dtype.

    Reference:
        Zhang and Sennrich, https://arxiv.org/abs/1910.07467
    """

    def __init__(self, epsilon: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not epsilon > 0:
            raise ConfigError(f"`epsilon` must be greater than 0. Received: epsilon={epsilon!r}.")
        self.epsilon = float(epsilon)
        self.supports_masking = True

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(
            name="scale", shape=(input_shape[-1],), initializer="ones", **KEEPS_DTYPE
        )
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return rms_normalize(x, tf.convert_to_tensor(self.scale), self.epsilon)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}

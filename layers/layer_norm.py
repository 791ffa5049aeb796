"""Layer normalisation as a Keras layer."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.keras_api import KEEPS_DTYPE, keras
from tfkv.layers.norm import Norm
from tfkv.layers.normalization import layer_normalize


@keras.saving.register_keras_serializable(package="tfkv")
class LayerNorm(Norm):
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

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        shape = (input_shape[-1],)
        self.bias = self.add_weight(name="bias", shape=shape, initializer="zeros", **KEEPS_DTYPE)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        scale, bias = tf.convert_to_tensor(self.scale), tf.convert_to_tensor(self.bias)
        return layer_normalize(x, scale, bias, self.epsilon)

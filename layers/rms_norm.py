"""Root-mean-square normalisation as a Keras layer."""

from __future__ import annotations

import tensorflow as tf

from tfkv.layers.keras_api import keras
from tfkv.layers.norm import Norm
from tfkv.layers.normalization import rms_normalize


@keras.saving.register_keras_serializable(package="tfkv")
class RMSNorm(Norm):
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

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return rms_normalize(x, tf.convert_to_tensor(self.scale), self.epsilon)

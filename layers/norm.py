"""What layers that normalise have in common: an epsilon, and a scale for each channel."""

from __future__ import annotations

from typing import Any

from tfkv.errors import ConfigError
from tfkv.layers.keras_api import KEEPS_DTYPE, keras


class Norm(keras.layers.Layer):
    """A layer that normalises the last axis and scales each channel.

    Args:
        epsilon: What the statistic that it divides by is kept away from 0 by.

    Raises:
        ConfigError: The epsilon is not above 0.
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

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "epsilon": self.epsilon}

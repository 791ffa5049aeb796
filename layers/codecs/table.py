"""Numbers that a calibration found, as a value that can be compared, written down and read."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import tensorflow as tf

from tfkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Table:
    """A float32 array of fixed shape; TensorFlow takes it wherever it takes a tensor.

    Args:
        shape: Of the array.
        data: Its numbers, float32 in the machine's order of bytes, last axis first.

    Raises:
        ConfigError: There are more numbers, or fewer, than the shape says.
    """

    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != 4 * math.prod(self.shape):
            raise ConfigError(
                f"A table of shape {self.shape} takes {4 * math.prod(self.shape)} bytes. "
                f"Received: {len(self.data)}."
            )

    @classmethod
    def of(cls, array: Any) -> Self:
        """The numbers of a NumPy array."""
        return cls(tuple(array.shape), array.astype("float32").tobytes())

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        numbers = memoryview(self.data).cast("f").tolist()
        return tf.constant(numbers, dtype or tf.float32, self.shape, name or "table")

    def to_config(self) -> dict[str, Any]:
        """It as JSON can hold it."""
        return {"shape": list(self.shape), "float32": base64.b64encode(self.data).decode()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads what `to_config` wrote."""
        return cls(tuple(config["shape"]), base64.b64decode(config["float32"]))

"""A codec of what a linear map makes of each KV head's numbers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.codecs.codec import Codec, Coded, PartSpec
from tfkv.layers.products import times


class ProjectedCodec(Codec):
    """Codes ``z = (x - mean) down`` by another codec, and reads ``x ≈ mean + z upᵀ``; each KV
    head has a map of its own.

    Nothing is rebuilt for a dot: ``q·x = (q up)·z + q·mean``, and the map and the mean meet a
    query once for all keys. Values are mixed as they are coded, and mapped back once.

    Args:
        inner: How z is coded.
        rank: Width of z (axis R); None = that of a head.
        down: ``[..., K, H, R]``, whatever TensorFlow takes for a tensor; None = not known yet,
            then it only says what it takes.
        up: ``[..., K, H, R]``.
        mean: ``[..., K, H]``; None = 0.

    Call arguments:
        Numbers are ``[..., K, S, H]`` here: the KV heads are the third axis from behind.
    """

    rotate = True

    def __init__(
        self, inner: Codec, rank: int | None, down: Any = None, up: Any = None, mean: Any = None
    ) -> None:
        self.inner = inner
        self.rank = rank
        self.name = f"projected_{inner.name}"
        self._down, self._up, self._mean = down, up, mean

    def check(self, head_dim: int) -> None:
        rank = self.mixed_width(head_dim)
        if rank > head_dim:
            raise ConfigError(f"`rank` must be at most head_dim={head_dim}. Received: rank={rank}.")
        self.inner.check(rank)

    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        return self.inner.spec(self.mixed_width(head_dim))

    def mixed_width(self, head_dim: int) -> int:
        return head_dim if self.rank is None else self.rank

    def encode(self, x: tf.Tensor) -> Coded:
        x = tf.cast(x, tf.float32)
        if self._mean is not None:
            x -= self._row_of_heads(self._mean, x.dtype)
        return self.inner.encode(times(x, _tensor(self._down, x.dtype)))

    def decode(self, coded: Coded) -> tf.Tensor:
        x = self._mapped_back(self.inner.decode(coded))
        return x if self._mean is None else x + self._row_of_heads(self._mean, x.dtype)

    def prepare(self, queries: tf.Tensor) -> tf.Tensor:
        asked = self.inner.prepare(times(queries, _tensor(self._up, queries.dtype)))
        if self._mean is None:
            return asked
        mean = self._row_of_heads(self._mean, queries.dtype)
        return tf.concat([asked, tf.reduce_sum(queries * mean, axis=-1, keepdims=True)], axis=-1)

    def finish(self, output: tf.Tensor) -> tf.Tensor:
        return self._mapped_back(self.inner.finish(output))

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        if self._mean is None:
            return self.inner.scores(queries, coded, columns)
        # What the mean adds is the same for all keys of this code, and not for keys that are
        # read exactly.
        asked, of_mean = queries[..., :-1], queries[..., -1:]
        return self.inner.scores(asked, coded, columns) + of_mean

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        if self._mean is not None:
            raise ConfigError("A codec of values has no mean: weights of 0 must give 0.")
        return self.inner.mix(weights, coded)

    def _mapped_back(self, z: tf.Tensor) -> tf.Tensor:
        return times(z, _tensor(self._up, z.dtype), transpose_b=True)

    @staticmethod
    def _row_of_heads(table: Any, dtype: tf.DType) -> tf.Tensor:
        """``[..., K, H]`` beside numbers ``[..., K, S, H]``."""
        return _tensor(table, dtype)[..., tf.newaxis, :]


def _tensor(table: Any, dtype: tf.DType) -> tf.Tensor:
    if table is None:
        raise ConfigError("This codec has no tables yet. Make a calibration with `tfkv calibrate`.")
    return tf.cast(tf.convert_to_tensor(table), dtype)

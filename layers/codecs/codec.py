"""How a stored number is written: the interface of every codec."""

from __future__ import annotations

import abc
import math
from typing import NamedTuple

import tensorflow as tf

#: Tensors of an encoded block by part name, each ``[A, K, S, ...]``.
Coded = dict[str, tf.Tensor]


class PartSpec(NamedTuple):
    """Shape behind the ``[A, K, S]`` axes, and dtype, of one part of a code."""

    shape: tuple[int, ...]
    dtype: tf.DType


class Codec(abc.ABC):
    """Encodes keys and values one token and KV head at a time.

    A codec is stateless and pure. Its `scores` and `mix` work on the code itself, so no
    dequantised copy of a cache ever exists.

    Attributes:
        name: Its name in a cache string.
    """

    name: str

    @abc.abstractmethod
    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        """The parts of a code of one token and KV head, by name."""

    @abc.abstractmethod
    def encode(self, x: tf.Tensor) -> Coded:
        """Codes of ``x [..., H]``; each part is ``[..., *part shape]``."""

    @abc.abstractmethod
    def decode(self, coded: Coded) -> tf.Tensor:
        """The float32 numbers that the code stands for, ``[..., H]``."""

    @abc.abstractmethod
    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        """Dot products of ``queries [A, K, Q, H]`` with coded keys, ``[A, K, Q, S]``.

        Args:
            queries: Grouped queries.
            coded: The keys, parts ``[A, K, S, ...]``.
            columns: Whether the parts are ``[A, K, ..., S]`` instead, a token a column: that
                product is several times as fast on the CPU.
        """

    @abc.abstractmethod
    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        """Coded values weighted by ``weights [A, K, Q, S]``, ``[A, K, Q, H]``."""

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes that one token takes in one KV head of keys, or of values; exact."""
        return sum(math.prod(part.shape) * part.dtype.size for part in self.spec(head_dim).values())

    def round_trip(self, x: tf.Tensor) -> tf.Tensor:
        """What ``x`` will read as once stored, in x's dtype."""
        return tf.cast(self.decode(self.encode(x)), x.dtype)

"""How a stored number is written: the interface of every codec."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import tensorflow as tf

from tfkv.errors import ConfigError

#: Tensors of an encoded block by part name, each ``[A, K, S, ...]``.
Coded = dict[str, tf.Tensor]


class PartSpec(NamedTuple):
    """Shape behind the ``[A, K, S]`` axes, and dtype, of one part of a code.

    Neighbouring tokens may share an entry of it: then its third axis is that much shorter.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    tokens: int = 1


def code_of_heads(coded: Coded, heads: slice) -> Coded:
    """The code of some KV heads."""
    return {name: part[:, heads] for name, part in coded.items()}


class Dots(Protocol):
    """What attention needs: a `Codec` of both sides, or a `CacheCodec`."""

    def prepare(self, queries: tf.Tensor) -> tf.Tensor: ...

    def finish(self, output: tf.Tensor) -> tf.Tensor: ...

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor: ...

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor: ...


class Codec(abc.ABC):
    """Encodes keys, values or both, one token and KV head at a time.

    A codec is stateless and pure. Its `scores` and `mix` work on the code itself, so no
    dequantised copy of a cache ever exists.

    Attributes:
        name: What it is called.
        rotate: Whether numbers are rotated before they are coded, so that queries have to be,
            too, and mixed values rotated back.
        tokens: Neighbouring tokens that are coded together; see `ChannelGroups`.
    """

    name: str
    rotate = False
    tokens = 1

    def check(self, head_dim: int) -> None:
        """Raises `ConfigError` where heads of this width cannot be written."""
        del head_dim

    @abc.abstractmethod
    def spec(self, head_dim: int) -> dict[str, PartSpec]:
        """The parts of a code of one token and KV head, by name."""

    def mixed_width(self, head_dim: int) -> int:
        """Width of what `mix` gives, before `finish`."""
        return head_dim

    @abc.abstractmethod
    def encode(self, x: tf.Tensor) -> Coded:
        """Codes of ``x [..., H]``; each part is ``[..., *part shape]``."""

    @abc.abstractmethod
    def decode(self, coded: Coded) -> tf.Tensor:
        """The float32 numbers that the code stands for, ``[..., H]``."""

    def prepare(self, queries: tf.Tensor) -> tf.Tensor:
        """Queries ``[..., H]`` as `scores` wants them; once for all keys."""
        return queries

    def finish(self, output: tf.Tensor) -> tf.Tensor:
        """What `mix` gave ``[..., H]``, as it is outside the code; once for all values, since
        it is linear."""
        return output

    @abc.abstractmethod
    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        """Dot products of ``queries [A, K, Q, H]`` with coded keys, ``[A, K, Q, S]``.

        Args:
            queries: Grouped queries, after `prepare`.
            coded: The keys, parts ``[A, K, S, ...]``.
            columns: Whether the parts are ``[A, K, ..., S]`` instead, a token a column: that
                product is several times as fast on the CPU.
        """

    @abc.abstractmethod
    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        """Coded values weighted by ``weights [A, K, Q, S]``, ``[A, K, Q, H]``; `finish` it."""

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes that one token takes in one KV head of one side; exact."""
        parts = self.spec(head_dim).values()
        of_group = (math.prod(p.shape) * p.dtype.size * self.tokens // p.tokens for p in parts)
        return sum(of_group) // self.tokens

    def round_trip(self, x: tf.Tensor) -> tf.Tensor:
        """What ``x`` will read as once stored, in x's dtype."""
        return tf.cast(self.decode(self.encode(x)), x.dtype)


@dataclasses.dataclass(frozen=True)
class CacheCodec:
    """How a cache writes its keys and how its values: not always the same way, since keys
    are far more sensitive.

    The newest tokens and the first ones, which most attention goes to, can be kept as they are
    beside their codes. A query reads a token exactly if it is less than `recent` positions
    behind, or one of the `sinks`; it makes no difference how a text was cut. Where the exact
    numbers are gone, after tokens were taken back or in a session that began with shared
    pages, it reads the codes.

    Args:
        name: Its name in a cache string.
        keys: Codec of the keys.
        values: Codec of the values.
        recent: Newest tokens that a query reads exactly, itself included.
        sinks: First tokens that every query reads exactly.
        tables: What a calibration has given it; see `CalibratedCodec`.

    Raises:
        ConfigError: A number is out of range.

    Reference:
        Recent tokens in full precision: KIVI, https://arxiv.org/abs/2402.02750.
    """

    #: What a cache string may say of it.
    ARGUMENTS: ClassVar[tuple[str, ...]] = ("recent", "sinks")
    needs_calibration: ClassVar[bool] = False

    name: str
    keys: Codec
    values: Codec
    recent: int = 0
    sinks: int = 0
    tables: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("recent", "sinks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"`{name}` must be at least 0. Received: {name}={value!r}.")
        if self.sinks and not self.recent:
            raise ConfigError(
                f"`sinks` of a codec need `recent` of at least 1. Received: sinks={self.sinks}, "
                "recent=0."
            )
        if self.recent < self.tokens != 1:
            raise ConfigError(
                f"`recent` must be at least {self.tokens} where a codec codes {self.tokens} tokens "
                f"together: they wait for each other. Received: {self.name}(recent={self.recent})."
            )

    @property
    def tokens(self) -> int:
        """Neighbouring tokens that either side codes together."""
        return max(codec.tokens for codec in self.sides().values())

    @property
    def longest_chunk(self) -> int | None:
        """Most tokens that can be read at once; None = any number. Where some are coded
        together, a query may only read codes of groups that were full before its chunk."""
        return self.recent - self.tokens + 1 if self.tokens > 1 else None

    @property
    def exact_entries(self) -> int:
        """Tokens of a session that are kept exactly as well."""
        return self.recent + self.sinks

    def sides(self) -> dict[str, Codec]:
        """Both, by the name of the side."""
        return {"keys": self.keys, "values": self.values}

    def bind(self, tables: Any, layer: int | None) -> Self:
        """The codec with what a calibration says of one layer, or of all where that is None.

        Args:
            tables: See `CodecTables`.
            layer: Which.
        """
        del tables, layer
        return self

    def with_tables(self, tables: Mapping[str, Any]) -> Self:
        """The codec with other tables, where it has any."""
        del tables
        return self

    def check_bound(self) -> None:
        """Raises `ConfigError` where it needs tables of a calibration and has none."""

    def of_layers(self, layer: tf.Tensor) -> Self:
        """The codec of one layer, or of that of each row, ``layer [] or [A]``, where the tables
        of all are stacked."""
        del layer
        return self

    def of_heads(self, heads: slice) -> Self:
        """The codec of some KV heads."""
        del heads
        return self

    def check(self, head_dim: int) -> None:
        """Raises `ConfigError` where heads of this width cannot be written."""
        for codec in self.sides().values():
            codec.check(head_dim)

    @property
    def rotate(self) -> bool:
        """Whether either side is rotated."""
        return self.keys.rotate or self.values.rotate

    def prepare(self, queries: tf.Tensor) -> tf.Tensor:
        """See `Codec.prepare`."""
        return self.keys.prepare(queries)

    def finish(self, output: tf.Tensor) -> tf.Tensor:
        """See `Codec.finish`."""
        return self.values.finish(output)

    def scores(self, queries: tf.Tensor, coded: Coded, columns: bool = False) -> tf.Tensor:
        """See `Codec.scores`."""
        return self.keys.scores(queries, coded, columns)

    def mix(self, weights: tf.Tensor, coded: Coded) -> tf.Tensor:
        """See `Codec.mix`."""
        return self.values.mix(weights, coded)

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes that keys and values of one token take in one KV head; exact."""
        return sum(codec.bytes_per_token(head_dim) for codec in self.sides().values())

    def exact_bytes(self, head_dim: int) -> int:
        """Bytes of a session in one KV head for what is kept exactly as well, in float32."""
        return self.exact_entries * 2 * 4 * head_dim

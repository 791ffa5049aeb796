"""Codecs whose maps come from a calibration of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.codecs.codec import CacheCodec, Codec
from tfkv.layers.codecs.table import Table


class CodecTables(Protocol):
    """What a calibration knows of keys, values and queries. Arrays are NumPy's, of one layer
    ``[K, ...]``, or of all ``[L, K, ...]`` where `layer` is None."""

    def low_rank(self, rank: int, layer: int | None) -> Mapping[str, Any]:
        """The maps of `LowRank` to so many dimensions."""

    def block_gtq(
        self, bits: float, segment: int, sensitivity: str, layer: int | None
    ) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """The bits of each segment of `BlockGTQ`, the same in all heads, and its tables."""


@dataclasses.dataclass(frozen=True)
class CalibratedCodec(CacheCodec):
    """A `CacheCodec` with tables for each KV head: of one layer, or of all of them, stacked.

    Without tables it only says what it takes. `bind` gives it those of a calibration.

    Args:
        recent: See `CacheCodec`.
        sinks: See `CacheCodec`.
        tables: By name, ``[..., K, ...]``, `Table` or whatever TensorFlow takes for a tensor.

    Raises:
        ConfigError: A number is out of range.
    """

    needs_calibration: ClassVar[bool] = True

    name: str = dataclasses.field(init=False, default="")
    keys: Codec = dataclasses.field(init=False, compare=False)
    values: Codec = dataclasses.field(init=False, compare=False)
    recent: int = 128
    sinks: int = 4

    def __post_init__(self) -> None:
        keys, values = self.make_sides()
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "values", values)
        super().__post_init__()

    def make_sides(self) -> tuple[Codec, Codec]:
        """The codecs of keys and of values, of what is known so far."""
        raise NotImplementedError

    def check_bound(self) -> None:
        if not self.tables:
            raise ConfigError(
                f"{self.name!r} needs tables of a calibration, which only a whole model has. Make "
                "one with `tfkv calibrate`, and pass it as `calibration`."
            )

    def of_layers(self, layer: tf.Tensor) -> Self:
        return self.with_tables({n: tf.gather(t, layer) for n, t in self.tables.items()})

    def of_heads(self, heads: slice) -> Self:
        # Not a tensor of the graph in which a layer happens to be made.
        with tf.init_scope():
            tables = {n: tf.convert_to_tensor(t)[heads] for n, t in self.tables.items()}
        return self.with_tables(tables)

    def with_tables(self, tables: Mapping[str, Any]) -> Self:
        return dataclasses.replace(self, tables=dict(tables))


def as_tables(arrays: Mapping[str, Any]) -> dict[str, Table]:
    """NumPy arrays as tables."""
    return {name: Table.of(array) for name, array in arrays.items()}

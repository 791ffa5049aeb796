"""Keys and values in fewer dimensions than a head has."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from tfkv.errors import ConfigError
from tfkv.layers.codecs.calibrated_codec import CalibratedCodec, CodecTables, as_tables
from tfkv.layers.codecs.codec import Codec
from tfkv.layers.codecs.floating import FloatCodec
from tfkv.layers.codecs.int8 import Int8Codec
from tfkv.layers.codecs.integer_blocks import IntegerBlocks
from tfkv.layers.codecs.projected_codec import ProjectedCodec


@dataclasses.dataclass(frozen=True)
class LowRank(CalibratedCodec):
    """Each KV head's keys and values in the `rank` directions that matter most to what reads
    them, those directions in few bits.

    Choose it where heads are wide for what they say. In small models they are not: four bits
    of all dimensions lose less than eight bits of half of them.

    Directions are eigenvectors of second moments from the calibration: of keys, about their
    mean, as the queries of the head weigh them (so the error of scores is least); of values, as
    the output projection weighs them. Keys are projected as they are stored, after RoPE: a
    query meets the map once, and no key is rebuilt. The paper projects them before RoPE, which
    needs fewer directions, and rebuilds and turns each stored key in each step.

    Args:
        rank: Directions (axis R), at most a head's width.
        bits: Of a direction: 16 (float16), 8 or 4 (rotated).
        recent: See `CacheCodec`.
        sinks: See `CacheCodec`.
        tables: Of a calibration: ``keys/down``, ``keys/up``, ``values/down`` and ``values/up``
            ``[..., K, H, R]``, ``keys/mean [..., K, H]``.

    Raises:
        ConfigError: A number is out of range.

    Reference:
        Chang et al., Palu, https://arxiv.org/abs/2407.21118.
    """

    ARGUMENTS: ClassVar[tuple[str, ...]] = ("rank", "bits", "recent", "sinks")

    name: str = dataclasses.field(init=False, default="low_rank")
    rank: int = 32
    bits: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ConfigError(f"`rank` must be at least 1. Received: rank={self.rank!r}.")
        if self.bits not in (4, 8, 16):
            raise ConfigError(f"`bits` must be 4, 8 or 16. Received: bits={self.bits!r}.")
        super().__post_init__()

    def make_sides(self) -> tuple[Codec, Codec]:
        inner: dict[int, Codec] = {
            4: IntegerBlocks(4, rotate=True),
            8: Int8Codec(),
            16: FloatCodec("float16"),
        }

        def side(name: str) -> Codec:
            maps = (self.tables.get(f"{name}/{table}") for table in ("down", "up", "mean"))
            return ProjectedCodec(inner[self.bits], self.rank, *maps)

        return side("keys"), side("values")

    def bind(self, tables: CodecTables, layer: int | None) -> Self:
        return self.with_tables(as_tables(tables.low_rank(self.rank, layer)))

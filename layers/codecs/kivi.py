"""KIVI: keys by channel over groups of tokens, values by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

from tfkv.layers.codecs.channel_groups import ChannelGroups
from tfkv.layers.codecs.codec import CacheCodec
from tfkv.layers.codecs.integer_blocks import IntegerBlocks


@dataclasses.dataclass(frozen=True)
class Kivi(CacheCodec):
    """Keys in groups of neighbouring tokens, with a scale and a zero for each channel; values
    token by token, in blocks of 32 channels.

    Choose it where four bits of `int4` cost too much quality and a rotation (`k4v4`) is not
    wanted; two bits only for models whose heads are wide and many. It does not go with
    policies that keep tokens one by one.

    Its argument ``group`` is the number of tokens that share a scale of the keys, the paper's
    group size; the newest `recent` tokens stay exact, its residual length. Unlike the paper's
    code, which flushes the residual as a whole, a token is read from its code once it is
    `recent` positions behind, whatever the length of the session.

    Reference:
        https://arxiv.org/abs/2402.02750
    """

    @classmethod
    def of(cls, bits: int, recent: int, sinks: int) -> Self:
        """The codec of so many bits on both sides, in groups of 32."""
        return cls(f"kivi{bits}", ChannelGroups(bits), IntegerBlocks(bits), recent, sinks)

    def arguments(self) -> dict[str, int]:
        return {**super().arguments(), "group": self.tokens}

    def changed(self, arguments: Mapping[str, int]) -> Self:
        new = {**self.arguments(), **arguments}
        keys = ChannelGroups(self.bits, new["group"])
        return dataclasses.replace(self, keys=keys, recent=new["recent"], sinks=new["sinks"])

    @property
    def bits(self) -> int:
        """Of a code."""
        return int(self.name.removeprefix("kivi"))

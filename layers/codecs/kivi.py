"""KIVI: keys by channel over groups of tokens, values by token."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfkv.layers.codecs.channel_groups import ChannelGroups
from tfkv.layers.codecs.codec import CacheCodec, Codec
from tfkv.layers.codecs.integer_blocks import IntegerBlocks


@dataclasses.dataclass(frozen=True)
class Kivi(CacheCodec):
    """Keys in groups of neighbouring tokens, with a scale and a zero for each channel; values
    token by token, in blocks of 32 channels.

    Choose it where four bits of `int4` cost too much quality and a rotation (`k4v4`) is not
    wanted; two bits only for models whose heads are wide and many. It does not go with
    policies that keep tokens one by one.

    Unlike the paper's code, which flushes its residual as a whole, a token is read from its
    code once it is `recent` positions behind, whatever the length of the session.

    Args:
        name: ``kivi4`` or ``kivi2``, by the bits of both sides.
        recent: See `CacheCodec`; the paper's residual length.
        sinks: See `CacheCodec`.
        group: Tokens that share a scale of the keys; the paper's group size.

    Raises:
        ConfigError: A number is out of range.

    Reference:
        https://arxiv.org/abs/2402.02750
    """

    ARGUMENTS: ClassVar[tuple[str, ...]] = ("recent", "sinks", "group")

    keys: Codec = dataclasses.field(init=False, compare=False)
    values: Codec = dataclasses.field(init=False, compare=False)
    group: int = 32

    def __post_init__(self) -> None:
        bits = int(self.name.removeprefix("kivi"))
        object.__setattr__(self, "keys", ChannelGroups(bits, self.group))
        object.__setattr__(self, "values", IntegerBlocks(bits))
        super().__post_init__()

"""The string form of a cache: policy, then codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from tfkv.errors import ConfigError
from tfkv.layers.codecs import CODECS, CacheCodec
from tfkv.layers.codecs.table import Table
from tfkv.layers.named_calls import NamedCall, known, lookup, read_sum
from tfkv.layers.policies import POLICIES, CachePolicy


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache keeps and how it writes it.

    Args:
        policy: Retention policy.
        codec: Storage codec.

    Raises:
        ConfigError: The two do not go together; it names what does.

    Example:
        >>> str(CacheSpec.parse("sliding_window(window=512)+int8"))
        'sliding_window(window=512)+int8'
        >>> str(CacheSpec.parse("k4v4(recent=64)"))
        'dense+k4v4(recent=64)'
    """

    policy: CachePolicy
    codec: CacheCodec

    def __post_init__(self) -> None:
        if self.policy.evicts and self.codec.tokens > 1:
            raise ConfigError(
                f"{self.policy.name!r} keeps tokens one by one, and {self.codec.name!r} codes "
                f"{self.codec.tokens} of them together. Choose 'int4' or 'k4v4' with it, or "
                f"'dense' or 'sliding_window' with {self.codec.name!r}. Received: "
                f"cache={str(self)!r}."
            )
        if self.policy.selects and self.policy.together % self.codec.tokens:
            raise ConfigError(
                f"`page_size` of {self.policy.name!r} must be a multiple of the "
                f"{self.codec.tokens} tokens that {self.codec.name!r} codes together. Received: "
                f"cache={str(self)!r}."
            )

    @classmethod
    def parse(cls, text: str | CacheSpec | Mapping[str, Any]) -> Self:
        """Reads ``policy(argument=value)+codec(argument=value)``; either half may be left out.

        A mapping of `to_config` brings the tables of a calibrated codec with it.

        Raises:
            ConfigError: The text is malformed, or a name is unknown; it suggests one.
        """
        if isinstance(text, cls):
            return text
        if isinstance(text, Mapping):
            spec = cls.parse(text["cache"])
            tables = {name: Table.from_config(one) for name, one in text["tables"].items()}
            return dataclasses.replace(spec, codec=spec.codec.with_tables(tables))
        halves = _halves(str(text))
        (name, arguments), (codec, codec_arguments) = halves[0], halves[-1]
        if len(halves) == 1:
            lookup({**POLICIES, **CODECS}, name, "cache policy or codec")
            if name in CODECS:
                name, arguments = "dense", {}
            else:
                codec, codec_arguments = "float32", {}
        policy_type = lookup(POLICIES, name, "cache policy")
        fields = [field.name for field in dataclasses.fields(policy_type)]
        policy = policy_type(**known(arguments, name, fields))
        plain = lookup(CODECS, codec, "cache codec")
        changed = known(codec_arguments, plain.name, list(plain.ARGUMENTS))
        return cls(policy, dataclasses.replace(plain, **changed))

    def changed(self, text: str) -> Self:
        """This cache with the policy, the codec, or both, that a cache string names.

        Raises:
            ConfigError: As of `parse`.
        """
        other, halves = type(self).parse(text), _halves(text)
        if len(halves) == 2:
            return other
        side = "codec" if halves[0][0] in CODECS else "policy"
        return dataclasses.replace(self, **{side: getattr(other, side)})

    def __str__(self) -> str:
        usual = CODECS[self.codec.name]
        given = [
            f"{name}={getattr(self.codec, name)!r}".replace(" ", "")
            for name in self.codec.ARGUMENTS
            if getattr(self.codec, name) != getattr(usual, name)
        ]
        arguments = f"({','.join(given)})" if given else ""
        return f"{self.policy}+{self.codec.name}{arguments}"

    def to_config(self) -> str | dict[str, Any]:
        """What `parse` reads, for the configuration of a Keras layer: the string, and the tables
        of a calibrated codec where it has some."""
        tables = {name: table.to_config() for name, table in self.codec.tables.items()}
        return {"cache": str(self), "tables": tables} if tables else str(self)

    def bytes_per_token(self, num_layers: int, num_key_value_heads: int, head_dim: int) -> int:
        """Bytes that one stored token takes in all layers, keys and values; exact."""
        return num_layers * num_key_value_heads * self.codec.bytes_per_token(head_dim)


def _halves(text: str) -> list[NamedCall]:
    """Name and arguments of what stands before and behind the plus sign; one, or two."""
    form = "policy(name=value,...)+codec, for example 'sliding_window(window=512)+int8'"
    return read_sum(text, "cache", form)

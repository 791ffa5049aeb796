"""The string form of a cache: policy, then codec."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
from typing import Any, Self

from tfkv.errors import ConfigError
from tfkv.layers.codecs import CODECS, CacheCodec
from tfkv.layers.policies import POLICIES, CachePolicy

_PATTERN = re.compile(
    r"^\s*(?P<name>\w+)\s*(?:\((?P<args>[^()]*)\))?\s*(?:\+\s*(?P<codec>\w+))?\s*$"
)


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache keeps and how it writes it.

    Args:
        policy: Retention policy.
        codec: Storage codec.

    Example:
        >>> str(CacheSpec.parse("sliding_window(window=512)+int8"))
        'sliding_window(window=512)+int8'
    """

    policy: CachePolicy
    codec: CacheCodec

    @classmethod
    def parse(cls, text: str | CacheSpec) -> Self:
        """Reads ``policy(argument=value)+codec``; either half may be left out.

        Raises:
            ConfigError: The text is malformed, or a name is unknown; it suggests one.
        """
        if isinstance(text, cls):
            return text
        match = _PATTERN.match(str(text))
        if match is None:
            raise ConfigError(
                "`cache` must read policy(name=value,...)+codec, for example "
                f"'sliding_window(window=512)+int8'. Received: cache={text!r}."
            )
        name, arguments, codec = match["name"], match["args"], match["codec"]
        if codec is None and arguments is None:
            _lookup({**POLICIES, **CODECS}, name, "policy or codec")
            if name in CODECS:
                name, codec = "dense", name
        policy_type = _lookup(POLICIES, name, "policy")
        policy = _build(policy_type, _arguments(arguments or "", text))
        return cls(policy, _lookup(CODECS, codec or "float32", "codec"))

    def __str__(self) -> str:
        return f"{self.policy}+{self.codec.name}"

    def bytes_per_token(self, num_layers: int, num_key_value_heads: int, head_dim: int) -> int:
        """Bytes that one stored token takes in all layers, keys and values; exact."""
        return num_layers * num_key_value_heads * self.codec.bytes_per_token(head_dim)


def _lookup(table: dict[str, Any], name: str, kind: str) -> Any:
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"Unknown cache {kind} {name!r}.{hint} Known: {', '.join(table)}.")


def _arguments(text: str, whole: str | CacheSpec) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            equals = ""
        if not equals:
            raise ConfigError(f"Expected name=value, received {item!r} in cache={str(whole)!r}.")
    return arguments


def _build(policy_type: type[CachePolicy], arguments: dict[str, Any]) -> CachePolicy:
    known = [field.name for field in dataclasses.fields(policy_type)]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            takes = ", ".join(known) or "no arguments"
            raise ConfigError(f"{policy_type.name!r} has no {name!r}.{hint} It takes: {takes}.")
    return policy_type(**arguments)

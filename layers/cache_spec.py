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
    r"^\s*(?P<name>\w+)\s*(?:\((?P<args>[^()]*)\))?\s*"
    r"(?:\+\s*(?P<codec>\w+)\s*(?:\((?P<codec_args>[^()]*)\))?)?\s*$"
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
        >>> str(CacheSpec.parse("k4v4(recent=64)"))
        'dense+k4v4(recent=64)'
    """

    policy: CachePolicy
    codec: CacheCodec

    @classmethod
    def parse(cls, text: str | CacheSpec) -> Self:
        """Reads ``policy(argument=value)+codec(argument=value)``; either half may be left out.

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
        name, arguments = match["name"], match["args"] or ""
        codec, codec_arguments = match["codec"], match["codec_args"] or ""
        if codec is None:
            _lookup({**POLICIES, **CODECS}, name, "policy or codec")
            if name in CODECS:
                name, arguments, codec, codec_arguments = "dense", "", name, arguments
        policy_type = _lookup(POLICIES, name, "policy")
        fields = [field.name for field in dataclasses.fields(policy_type)]
        policy = policy_type(**_known(_arguments(arguments, text), name, fields))
        plain = _lookup(CODECS, codec or "float32", "codec")
        changed = _known(_arguments(codec_arguments, text), plain.name, ["recent", "sinks"])
        return cls(policy, dataclasses.replace(plain, **changed))

    def __str__(self) -> str:
        usual = CODECS[self.codec.name]
        given = [
            f"{name}={getattr(self.codec, name)}"
            for name in ("recent", "sinks")
            if getattr(self.codec, name) != getattr(usual, name)
        ]
        arguments = f"({','.join(given)})" if given else ""
        return f"{self.policy}+{self.codec.name}{arguments}"

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


def _known(arguments: dict[str, Any], owner: str, known: list[str]) -> dict[str, Any]:
    """The arguments, if a policy or codec takes them.

    Raises:
        ConfigError: It does not; it suggests one that it takes.
    """
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            takes = ", ".join(known) or "no arguments"
            raise ConfigError(f"{owner!r} has no {name!r}.{hint} It takes: {takes}.")
    return arguments

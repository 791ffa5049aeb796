"""The string form of a cache: policy, then codec."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Self

from tfkv.errors import ConfigError
from tfkv.layers.codecs import CODECS, CacheCodec
from tfkv.layers.codecs.table import Table
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
            _lookup({**POLICIES, **CODECS}, name, "policy or codec")
            if name in CODECS:
                name, arguments = "dense", {}
            else:
                codec, codec_arguments = "float32", {}
        policy_type = _lookup(POLICIES, name, "policy")
        fields = [field.name for field in dataclasses.fields(policy_type)]
        policy = policy_type(**_known(arguments, name, fields))
        plain = _lookup(CODECS, codec, "codec")
        changed = _known(codec_arguments, plain.name, list(plain.ARGUMENTS))
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


def _lookup(table: dict[str, Any], name: str, kind: str) -> Any:
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"Unknown cache {kind} {name!r}.{hint} Known: {', '.join(table)}.")


def _halves(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of what stands before and behind the plus sign; one, or two.

    The text is read as a Python expression, of which only names, calls with literal keyword
    arguments, and one sum are allowed.
    """
    malformed = ConfigError(
        "`cache` must read policy(name=value,...)+codec, for example "
        f"'sliding_window(window=512)+int8'. Received: cache={text!r}."
    )
    try:
        whole = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise malformed from None
    nodes = [whole]
    if isinstance(whole, ast.BinOp) and isinstance(whole.op, ast.Add):
        nodes = [whole.left, whole.right]
    halves = []
    for node in nodes:
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(call.func, ast.Name):
            raise malformed
        arguments = {}
        for keyword in call.keywords:
            try:
                arguments[str(keyword.arg)] = ast.literal_eval(keyword.value)
            except ValueError:
                raise ConfigError(
                    f"Expected name=value, received {ast.unparse(keyword)!r} in cache={text!r}."
                ) from None
        if call.args:
            raise ConfigError(
                f"Expected name=value, received {ast.unparse(call.args[0])!r} in cache={text!r}."
            )
        halves.append((call.func.id, arguments))
    return halves


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

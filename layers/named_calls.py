"""Strings such as ``name(argument=value)``: how caches and speculation are asked for."""

from __future__ import annotations

import ast
import difflib
from typing import Any

from tfkv.errors import ConfigError

#: A name, and its arguments.
NamedCall = tuple[str, dict[str, Any]]


def read_sum(text: str, field: str, form: str) -> list[NamedCall]:
    """Name and arguments of what stands before and behind the plus sign; one, or two.

    The text is read as a Python expression, of which only names, calls with literal keyword
    arguments, and one sum are allowed.

    Args:
        text: What was given.
        field: Whose value it is, for errors.
        form: How it must read, with an example, for errors.

    Raises:
        ConfigError: The text is malformed.
    """
    malformed = ConfigError(f"`{field}` must read {form}. Received: {field}={text!r}.")
    try:
        whole = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise malformed from None
    nodes = [whole]
    if isinstance(whole, ast.BinOp) and isinstance(whole.op, ast.Add):
        nodes = [whole.left, whole.right]
    calls = []
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
                    f"Expected name=value, received {ast.unparse(keyword)!r} in {field}={text!r}."
                ) from None
        if call.args:
            raise ConfigError(
                f"Expected name=value, received {ast.unparse(call.args[0])!r} in {field}={text!r}."
            )
        calls.append((call.func.id, arguments))
    return calls


def lookup(table: dict[str, Any], name: str, kind: str) -> Any:
    """What a name stands for.

    Raises:
        ConfigError: Nothing; it suggests a name that is like it.
    """
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(table)}.")


def known(arguments: dict[str, Any], owner: str, names: list[str]) -> dict[str, Any]:
    """The arguments, if their owner takes them.

    Raises:
        ConfigError: It does not; it suggests one that it takes.
    """
    for name in arguments:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            takes = ", ".join(names) or "no arguments"
            raise ConfigError(f"{owner!r} has no {name!r}.{hint} It takes: {takes}.")
    return arguments

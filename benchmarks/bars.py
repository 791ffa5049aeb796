"""The bars that figures are held against, as ``figures.tsv`` lists them."""

from __future__ import annotations

import ast
import csv
import dataclasses
import math
import operator
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

BARS_FILE = pathlib.Path(__file__).with_name("figures.tsv")

HOLDS, SHORT, REPORT = "holds", "FALLS SHORT", "report"

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
}
_BAR = re.compile(r"^(?P<relation><=|>=|=)\s*(?P<expression>\S.*)$")
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_CALLS: dict[str, Callable[[float], float]] = {"ceil": math.ceil, "floor": math.floor}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What a measuring function found.

    Args:
        value: The figure, in the unit of its bar.
        names: Values that the bar's expression speaks of, such as ``weights``.
        note: What a reader should see beside it.
    """

    value: float
    names: Mapping[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Bar:
    """One row of the table: what a figure must reach.

    Args:
        name: ``issue.figure``.
        text: ``report``, or a relation and an expression: ``<= 1.3*weights+pool``.
        unit: Of the figure.
        issue: Whose promise it is.
        how: How it is measured.

    Raises:
        ValueError: The text is neither.
    """

    name: str
    text: str
    unit: str
    issue: str
    how: str = ""

    def __post_init__(self) -> None:
        if self.text != REPORT:
            _parse(self._match["expression"])

    @property
    def _match(self) -> re.Match[str]:
        match = _BAR.match(self.text)
        if match is None:
            raise ValueError(
                f"The bar of {self.name} must be 'report', or one of <=, >=, = and an "
                f"expression. Received: {self.text!r}."
            )
        return match

    def limit(self, names: Mapping[str, float]) -> float | None:
        """The number to reach; None where the bar is ``report`` or a name has no value."""
        if self.text == REPORT:
            return None
        try:
            return evaluate(self._match["expression"], names)
        except KeyError:
            return None

    def verdict(self, measurement: Measurement | None) -> str:
        """``holds``, ``FALLS SHORT`` or ``report``; what is missing or not a number is short."""
        if measurement is None or not math.isfinite(measurement.value):
            return SHORT
        if self.text == REPORT:
            return REPORT
        limit = self.limit(measurement.names)
        if limit is None:
            return SHORT
        holds = _COMPARE[self._match["relation"]](measurement.value, limit)
        return HOLDS if holds else SHORT

    @classmethod
    def from_row(cls, row: Mapping[str, str]) -> Self:
        """A bar of a row of ``figures.tsv``."""
        return cls(row["name"], row["bar"].strip(), row["unit"], row["issue"], row["how"] or "")


def read_bars(path: pathlib.Path = BARS_FILE) -> list[Bar]:
    """All bars, in the order of the file.

    Raises:
        ValueError: A bar cannot be read, or a name stands there twice.
    """
    with path.open(encoding="utf-8", newline="") as lines:
        bars = [Bar.from_row(row) for row in csv.DictReader(lines, delimiter="\t")]
    _require_unique(bar.name for bar in bars)
    return bars


def _require_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"Figure {name!r} has two bars; expected one.")
        seen.add(name)


def evaluate(expression: str, names: Mapping[str, float]) -> float:
    """Value of an arithmetic expression over names.

    Args:
        expression: Numbers, names, ``+ - * /``, parentheses, ``ceil()`` and ``floor()``.
        names: Their values.

    Raises:
        KeyError: A name has no value.
        ValueError: Anything else stands in it.
    """
    return _value(_parse(expression), names)


def _parse(expression: str) -> ast.expr:
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"Not an arithmetic expression: {expression!r}.") from error
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(
                f"{type(node).__name__} has no place in the bar {expression!r}: expected "
                "numbers, names, + - * /, ceil() and floor()."
            )
    return tree


_ALLOWED = (
    *(ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.USub, ast.Call),
    *_BINARY,
)


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return float(names[name])
        case ast.UnaryOp(operand=operand):
            return -_value(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=call), args=[argument]) if call in _CALLS:
            return float(_CALLS[call](_value(argument, names)))
    raise ValueError(f"Not part of an arithmetic bar: {ast.unparse(node)!r}.")


def as_json(bar: Bar, measurement: Measurement | None) -> dict[str, Any]:
    """One figure as data."""
    names = dict(measurement.names) if measurement else {}
    return {
        "name": bar.name,
        "value": measurement.value if measurement else None,
        "unit": bar.unit,
        "bar": bar.text,
        "limit": bar.limit(names),
        "verdict": bar.verdict(measurement),
        "names": names,
        "note": measurement.note if measurement else "",
    }

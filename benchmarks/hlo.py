"""Reading XLA's optimised HLO: what it copies does not depend on noise."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r"^(ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%?(?P<name>[\w.\-]+) = (?P<dtype>\w+)\[(?P<shape>[\d,]*)\]\S* (?P<op>[\w\-]+)\("
)
_OPERANDS = re.compile(r"\((?P<names>%[\w.\-]+(, %[\w.\-]+)*)\)")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_BODIES = re.compile(r"\bbody=%?([\w.\-]+)")
_MOVES = ("copy", "transpose")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction with an array as its result.

    Args:
        name: Its name.
        computation: Where it stands: a loop's body, a fusion, the entry.
        op: ``copy``, ``fusion``, ...
        dtype: Of the result.
        shape: Of the result.
        calls: Computation of a fusion, empty otherwise.
        operands: Names of what it reads, where they are written without their types.
    """

    name: str
    computation: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    calls: str = ""
    operands: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of the result."""
        return math.prod(self.shape)


def instructions(hlo_text: str) -> Iterator[Instruction]:
    """All instructions of a module whose result is one array."""
    computation = ""
    for line in hlo_text.splitlines():
        if found := _INSTRUCTION.match(line):
            shape = tuple(int(axis) for axis in found["shape"].split(",") if axis)
            calls = _CALLS.search(line) if found["op"] == "fusion" else None
            operands = _OPERANDS.match(line, found.end() - 1)
            yield Instruction(
                found["name"],
                computation,
                found["op"],
                found["dtype"],
                shape,
                calls[1] if calls else "",
                tuple(operands["names"].replace("%", "").split(", ")) if operands else (),
            )
        elif found := _COMPUTATION.match(line):
            computation = found["name"]


def large_copies(
    hlo_text: str, elements: int, ignore_axes: frozenset[int] = frozenset()
) -> list[Instruction]:
    """Copies and transposes that write at least so many elements.

    A copy inside a fusion counts where the fusion's own result is that large: otherwise it is
    only an order of reading.

    Args:
        hlo_text: Optimised HLO, as text.
        elements: Least size that counts.
        ignore_axes: Lengths of axes that no cache has, such as the vocabulary; arrays with
            one of them do not count.

    Returns:
        The instructions, fusions among them, in the module's order.
    """
    everything = list(instructions(hlo_text))
    fused = {item.calls for item in everything if item.calls}

    def large(item: Instruction) -> bool:
        return item.elements >= elements and not ignore_axes & set(item.shape)

    moving = {item.computation for item in everything if item.op in _MOVES and large(item)}
    return [
        item
        for item in everything
        if large(item)
        and (
            (item.op in _MOVES and item.computation not in fused)
            or (item.op == "fusion" and item.calls in moving)
        )
    ]


def reshaped_operands(hlo_text: str, elements: int = 1) -> list[Instruction]:
    """Fused products of a matrix with a vector that they read through another shape.

    XLA's CPU backend then computes an index for each element of the vector, once for each row
    of the matrix: that took a product with a weight matrix five times as long. Axes of length
    1 are no other shape.

    Args:
        hlo_text: Optimised HLO, as text.
        elements: Least size of the matrix; smaller ones do not count.

    Returns:
        The products.
    """
    everything = {(item.computation, item.name): item for item in instructions(hlo_text)}
    fused = {item.calls for item in everything.values() if item.calls}

    def axes(item: Instruction) -> list[int]:
        return [axis for axis in item.shape if axis != 1]

    def reshapes(item: Instruction) -> bool:
        if item.op != "bitcast":
            return False
        source = everything.get((item.computation, item.operands[0]))
        return source is not None and source.op == "parameter" and axes(source) != axes(item)

    def operands(item: Instruction) -> list[Instruction]:
        found = (everything.get((item.computation, name)) for name in item.operands)
        return [operand for operand in found if operand is not None]

    return [
        item
        for item in everything.values()
        if item.op == "dot"
        and item.computation in fused
        and max((operand.elements for operand in operands(item)), default=0) >= elements
        and reshapes(min(operands(item), key=lambda operand: operand.elements))
    ]


def fusions_a_layer(hlo_text: str, elements: int) -> int:
    """Fusions that each turn of the loop over layers runs, those of loops inside it not counted.

    Args:
        hlo_text: Optimised HLO, as text.
        elements: Of a product that only this loop computes, within a fusion or not.

    Raises:
        ValueError: No loop computes such a product, or several do.
    """
    bodies = set(_BODIES.findall(hlo_text))
    inside: dict[str, list[Instruction]] = {}
    for item in instructions(hlo_text):
        inside.setdefault(item.computation, []).append(item)

    def computes(item: Instruction) -> bool:
        products = inside.get(item.calls, []) if item.calls else [item]
        return any(one.op == "dot" and one.elements == elements for one in products)

    found = [body for body in bodies if any(map(computes, inside.get(body, [])))]
    if len(found) != 1:
        raise ValueError(f"{len(found)} loops compute a product of {elements} numbers, not one.")
    return sum(item.op == "fusion" for item in inside[found[0]])

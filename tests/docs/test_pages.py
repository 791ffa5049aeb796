"""Links lead somewhere, commands and snippets fit the code, tables name what there is."""

from __future__ import annotations

import ast
import importlib
import json
import pathlib
import re

import pytest
import typer.main

from tfkv.cli import app
from tfkv.config import EngineConfig
from tfkv.manifest import signature_table, text_signature

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "docker" / "README.md"])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
MAX_DECISION_LINES = 25

pages = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def blocks(page: pathlib.Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def anchors(page: pathlib.Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pages
def test_links_lead_somewhere(page: pathlib.Path):
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_commands_exist(page: pathlib.Path):
    """Commands of `tfkv` and their options, targets of `make`, in blocks and in lines."""
    commands = typer.main.get_command(app).commands
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    # Messages that the pages quote have an ellipsis where they vary.
    inline = [code for code in re.findall(r"`([^`\n]+)`", text) if "…" not in code]
    code = re.sub(r'"[^"\n]*"', "", "\n".join(inline + blocks(page, "sh")))
    for name, rest in re.findall(r"^ *tfkv ([a-z]+)\b([^\n#|]*)", code, re.MULTILINE):
        assert name in commands, name
        known = {o for p in commands[name].params for o in (*p.opts, *p.secondary_opts)}
        used = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))
        assert used <= known | {"--help"}, (name, used - known)
    for words in re.findall(r"^ *make ([^\n#]*)", code, re.MULTILINE):
        named = {word for word in words.split() if re.fullmatch(r"[a-z-]+", word)}
        assert named <= targets, words


@pages
def test_python_snippets_import_what_there_is(page: pathlib.Path):
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tfkv"):
                module = importlib.import_module(str(node.module))
                assert all(alias.name in module.__all__ for alias in node.names)


def test_readme_calls_name_every_input():
    """REST has no defaults."""
    specs = {**signature_table(EngineConfig()), "generate_text": text_signature()}
    bodies = [
        json.loads(re.search(r"-d '(.*)'", block, re.DOTALL).group(1))
        for block in blocks(ROOT / "README.md", "sh")
        if "curl" in block
    ]
    assert [body["signature_name"] for body in bodies] == ["generate_text", "generate"]
    for body in bodies:
        for sent in body.get("instances") or [body["inputs"]]:
            assert set(sent) == set(specs[body["signature_name"]].inputs)


def test_readme_tables_name_every_policy_and_codec():
    from tfkv.layers.codecs import CODECS
    from tfkv.layers.policies import POLICIES

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in (*POLICIES, *CODECS):
        assert re.search(rf"^\| `{name}` ", text, re.MULTILINE), name


def test_readme_bytes_are_those_of_the_model():
    from tfkv.layers.cache_spec import CacheSpec

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", text, re.MULTILINE)
    assert len(rows) >= 4
    for codec, size in rows:
        spec = CacheSpec.parse(f"dense+{codec}")
        assert spec.bytes_per_token(30, 3, 64) == int(size.replace(",", ""))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "decisions").glob("0*.md")))
def test_decisions_are_short_and_listed(page: pathlib.Path):
    index = (page.parent / "README.md").read_text(encoding="utf-8")
    assert f"]({page.name})" in index
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(f"# {page.name[:4]}: ")
    assert len(lines) <= MAX_DECISION_LINES or page.name.startswith("0001")


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index

"""The reference pages and what fills them."""

from __future__ import annotations

import importlib.util
import pathlib
import types

import pytest


@pytest.fixture(scope="session")
def reference_tables(root: pathlib.Path) -> types.ModuleType:
    """The script that writes the pages' tables."""
    path = root / "tools" / "reference_tables.py"
    spec = importlib.util.spec_from_file_location("reference_tables", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def contract(root: pathlib.Path) -> str:
    """Text of the contract's page."""
    return (root / "docs" / "contract.md").read_text(encoding="utf-8")

"""Makes `benchmarks` importable without putting the repository root on the path."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

_PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"

if "benchmarks" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "benchmarks", _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)

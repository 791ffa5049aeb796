"""What every test shares."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import pytest

# Compiling inside an example takes seconds, and a red run must be red again.
hypothesis.settings.register_profile("tfkv", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tfkv")

# `benchmarks` can be imported without the repository root on the path.
_BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
if "benchmarks" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "benchmarks", _BENCHMARKS / "__init__.py", submodule_search_locations=[str(_BENCHMARKS)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The repository's root folder."""
    return pathlib.Path(__file__).resolve().parent.parent

"""What every test shares."""

from __future__ import annotations

import os
import pathlib

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis
import pytest

# Compiling inside an example takes seconds, and a red run must be red again.
hypothesis.settings.register_profile("tfkv", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tfkv")


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The repository's root folder."""
    return pathlib.Path(__file__).resolve().parent.parent

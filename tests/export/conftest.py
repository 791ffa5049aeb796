"""Artifacts of a tiny model, exported once a run, and callers that look after them."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.append(str(pathlib.Path(__file__).parent))
sys.path.append(str(pathlib.Path(__file__).parent.parent / "tfkv"))

import tiny_model
from tiny_artifacts import ENGINES, Caller, loaded_when_asked, write

from tfkv.export import LoadedArtifact


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Version directories by name of `ENGINES`, written when first asked for."""

    class Exports(dict):
        def __missing__(self, name: str) -> pathlib.Path:
            root = tmp_path_factory.mktemp(name)
            self[name] = write(tiny_model.source(), root, ENGINES[name])
            return self[name]

    return Exports()


@pytest.fixture(scope="session")
def loaded(exported) -> Iterator[dict[str, LoadedArtifact]]:
    """Artifacts by name of `ENGINES`, loaded when first asked for."""

    with loaded_when_asked(exported.__getitem__) as loads:
        yield loads


@pytest.fixture
def caller_of(loaded):
    """Makes callers; behind the test their artifacts must be sound and empty."""
    callers = []

    def make(name: str) -> Caller:
        callers.append(Caller(loaded[name]))
        return callers[-1]

    yield make
    sound = [caller.stats()["integrity"] for caller in callers]
    for caller in callers:
        caller.close_all()
    assert sound == [0] * len(callers)
    for caller in callers:
        stats = caller.stats()
        assert (stats["integrity"], stats["slots_used"], stats["pages_used"]) == (0, 0, 0)


@pytest.fixture
def plain(caller_of) -> Caller:
    """Dense float32, not compiled: the quickest to load."""
    return caller_of("plain")


@pytest.fixture
def compiled(caller_of) -> Caller:
    """As `plain`, compiled with XLA."""
    return caller_of("compiled")


@pytest.fixture
def fair(caller_of) -> Caller:
    """Prefills 256 tokens a batch, 64 of long prompts where others wait."""
    return caller_of("fair")


@pytest.fixture
def window(caller_of) -> Caller:
    """Sliding window of 20 with 3 sinks; remembers 160 tokens."""
    return caller_of("window")


@pytest.fixture
def int8(caller_of) -> Caller:
    """Dense int8, compiled."""
    return caller_of("int8")

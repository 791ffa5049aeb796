"""The demo's parts, without a model."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from tfkv import __version__, demo, terminal
from tfkv.config import DecoderConfig
from tfkv.manifest import MANIFEST_PATH, Manifest, signature_table
from tfkv.serving import server_process

MANIFEST = Manifest(
    model=DecoderConfig(1000, 2, 64, 4, 2, 16, 128),
    engine=demo.ENGINE,
    signatures=signature_table(demo.ENGINE),
    fingerprint="f",
    bytes_per_token=1,
    bytes_per_session=1,
    positions=1,
    tfkv_version=__version__,
)


def write(directory, manifest):
    (directory / MANIFEST_PATH).parent.mkdir(parents=True)
    (directory / MANIFEST_PATH).write_text(manifest.to_json(), encoding="utf-8")
    (directory / "saved_model.pb").touch()


@pytest.fixture
def exports(monkeypatch):
    """Calls of the exporter, which writes nothing."""
    calls = []

    def export(source, directory, engine, *, progress):
        calls.append((source, directory, engine))
        return directory / "9"

    monkeypatch.setattr(terminal, "load_tensorflow", lambda: None)
    monkeypatch.setitem(sys.modules, "tfkv.export", types.SimpleNamespace(export=export))
    return calls


def test_a_second_run_reuses_the_artifact(tmp_path, exports):
    write(tmp_path / "1", MANIFEST)
    assert demo.prepare(tmp_path) == tmp_path / "1"
    assert exports == []


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        dataclasses.replace(MANIFEST, tfkv_version="0.0.0"),
        dataclasses.replace(MANIFEST, engine=dataclasses.replace(demo.ENGINE, slots=3)),
    ],
    ids=["none", "version", "engine"],
)
def test_an_artifact_that_does_not_fit_is_replaced(tmp_path, exports, manifest):
    if manifest is not None:
        write(tmp_path / "1", manifest)
    assert demo.prepare(tmp_path) == tmp_path / "9"
    assert exports == [("smollm2", tmp_path, demo.ENGINE)]


def test_main_reports_errors_without_a_traceback(monkeypatch, tmp_path, exports, capsys):
    monkeypatch.setattr(server_process, "_command", lambda *_: [sys.executable, "-c", "exit(4)"])
    assert demo.main(["--directory", str(tmp_path)]) == 1
    assert "Error: The server ended with exit code 4" in capsys.readouterr().err

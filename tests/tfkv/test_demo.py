"""The demo's parts, without a model."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from tfkv import __version__, demo, terminal
from tfkv.config import DecoderConfig
from tfkv.errors import ServerError
from tfkv.manifest import MANIFEST_PATH, Manifest, signature_table

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


READY = "print('Serving tfkv: gRPC 127.0.0.1:4321, REST 127.0.0.1:4322', flush=True)"
WAIT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"


def use(monkeypatch, code):
    monkeypatch.setattr(demo, "_command", lambda _: [sys.executable, "-c", code])


def test_serving_gives_the_target_and_ends_the_server(monkeypatch, tmp_path):
    use(monkeypatch, f"{WAIT.format(code=0)}\nprint('hello')\n{READY}\ntime.sleep(60)")
    with demo.serving(tmp_path) as target:
        assert target == "127.0.0.1:4321"


def test_serving_reports_another_exit_code(monkeypatch, tmp_path):
    use(monkeypatch, f"{WAIT.format(code=3)}\n{READY}\ntime.sleep(60)")
    with pytest.raises(ServerError, match="exit code 3 after SIGTERM"), demo.serving(tmp_path):
        pass


def test_serving_reports_a_server_that_did_not_start(monkeypatch, tmp_path):
    use(monkeypatch, "raise SystemExit(4)")
    with pytest.raises(ServerError, match="exit code 4 before"), demo.serving(tmp_path):
        pytest.fail("must not get here")


def test_serving_kills_a_server_that_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_SHUTDOWN_SECONDS", 0.2)
    stays = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    use(monkeypatch, f"{stays}\n{READY}\ntime.sleep(60)")
    with pytest.raises(ServerError, match="killed"), demo.serving(tmp_path):
        pass


def test_serving_ends_the_server_when_the_talk_fails(monkeypatch, tmp_path):
    use(monkeypatch, f"{READY}\nimport time; time.sleep(60)")
    with pytest.raises(KeyError), demo.serving(tmp_path):
        raise KeyError


def test_main_reports_errors_without_a_traceback(monkeypatch, tmp_path, exports, capsys):
    use(monkeypatch, "raise SystemExit(4)")
    assert demo.main(["--directory", str(tmp_path)]) == 1
    assert "Error: The server ended with exit code 4" in capsys.readouterr().err

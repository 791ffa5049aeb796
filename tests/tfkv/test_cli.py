"""The `tfkv` command, without a model."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import re
import subprocess
import sys
import types
import urllib.request

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tfkv import __version__, cli, inspection, presets, terminal
from tfkv.agreement import Agreement, PromptAgreement
from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import ConfigError, ModelSourceError, ServerError
from tfkv.manifest import MANIFEST_PATH, STATS, TOKENIZER_PATH, Manifest, signature_table

COMMANDS = [
    *("export", "serve", "generate", "chat", "inspect", "plan", "eval"),
    *("verify", "presets", "stats", "metrics", "sessions"),
]


def run(*arguments, **options):
    return CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(
        cli.app, list(map(str, arguments)), **options
    )


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def no_tensorflow(monkeypatch):
    """Commands that would load TensorFlow, with a stand-in for what they call."""
    monkeypatch.setattr(terminal, "load_tensorflow", lambda keras=True: None)


@pytest.fixture
def artifact(tmp_path):
    """A model directory with the files that `inspect` reads."""
    engine = EngineConfig(slots=3, capacity=128, decode_chunk=4)
    manifest = Manifest(
        model=DecoderConfig(1000, 2, 64, 4, 2, 16, 128),
        engine=engine,
        signatures=signature_table(engine, (7, 9)),
        fingerprint="0123abcd",
        bytes_per_token=1024,
        bytes_per_session=131_072,
        positions=128,
        stop_tokens=(7, 9),
        chat_template="{{ messages }}",
        source="made by hand [test]",
        tfkv_version=__version__,
    )
    version = tmp_path / "model" / "3"
    (version / MANIFEST_PATH).parent.mkdir(parents=True)
    (version / "variables").mkdir()
    (version / "variables" / "variables.data-00000-of-00001").write_bytes(b"x" * 5000)
    (version / "saved_model.pb").write_bytes(b"y" * 100)
    (version / MANIFEST_PATH).write_text(manifest.to_json(), encoding="utf-8")
    (version / TOKENIZER_PATH).write_text("{}", encoding="utf-8")
    return version


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--help" in plain(result.output)
    assert command in plain(run("--help").output)


def test_export_options_are_those_of_the_engine():
    """A new field of `EngineConfig` needs an option, with the same default."""
    text = plain(run("export", "--help").output)
    others = {
        "head_budgets": "--calibration",
        "layer_caches": "--layer-cache",
        "repeat": "--cache",
    }
    for field in dataclasses.fields(EngineConfig):
        assert others.get(field.name, f"--{field.name.replace('_', '-')}") in text


def test_version():
    assert run("--version").output.strip() == __version__


@pytest.mark.parametrize("where", ["version", "model"])
def test_inspect_shows_model_cache_and_bytes(artifact, where):
    result = run("inspect", artifact if where == "version" else artifact.parent)
    assert result.exit_code == 0, result.output
    text = plain(result.stdout)
    for expected in (
        "made by hand [test]",
        "0123abcd",
        "dense+float32",
        "1.0 KiB",
        "131,072",
        "128.0 KiB",
        "393,216",
        "5,000",
        *signature_table(EngineConfig()),
    ):
        assert expected in text


def test_plan_says_how_many_sessions_fit(artifact, no_tensorflow):
    arguments = ("plan", artifact, "--memory", "1GB", "--cache", "k8v4", "--context", "100")
    data = json.loads(run(*arguments, "--json").stdout)
    # Two layers and two KV heads of 16: 16 codes of 8 bits and a pair of float16, then of 4.
    assert (data["key_bytes"], data["value_bytes"]) == (4 * 20, 4 * 12)
    assert data["session_pages"] == 2
    assert data["peak_bytes"] <= 10**9 < data["peak_bytes"] + data["session_bytes"]
    table = run(*arguments).stdout
    assert f"{data['sessions']:,} sessions" in table
    assert f"{data['swap_peak_bytes']:,}" in table


def test_plan_adds_up_layers_that_differ(artifact, no_tensorflow):
    arguments = ("plan", artifact, "--memory", "1GB", "--cache", "k8v4", "--context", "100")
    arguments += ("--layer-cache", "1=float32")
    data = json.loads(run(*arguments, "--json").stdout)
    assert (data["key_bytes"], data["value_bytes"]) == (2 * (20 + 64), 2 * (12 + 64))
    assert data["cache"] == "dense+k8v4; 1=float32"
    assert "dense+k8v4; 1=float32" in run(*arguments).stdout
    refused = run(*arguments, "--layer-cache", "2=int8")
    assert refused.exit_code == 1
    assert "The model has layers 0 to 1" in plain(refused.stderr)


def test_plan_refuses_what_is_no_size(artifact, no_tensorflow):
    result = run("plan", artifact, "--memory", "much")
    assert result.exit_code == 1
    assert "`--memory` must be a size such as 2GB" in plain(result.output)


def test_eval_refuses_a_text_that_is_none(no_tensorflow, tmp_path):
    odd = tmp_path / "odd.txt"
    odd.write_bytes(b"\xff\xfe")
    options = ("--cache", "int8", "--out", tmp_path / "out", "--text")
    result = run("eval", "smollm2", *options, odd)
    assert result.exit_code == 1
    assert "`--text` must be UTF-8" in plain(result.output)
    assert run("eval", "smollm2", *options, tmp_path / "none.txt").exit_code == 2


def test_eval_refuses_a_task_that_is_none(no_tensorflow, tmp_path):
    result = run("eval", "smollm2", "--cache", "int8", "--out", tmp_path, "--task", "needles")
    assert result.exit_code == 1
    assert "of needle, passkey" in plain(result.output)


@pytest.fixture
def verified(no_tensorflow, monkeypatch):
    """What `tfkv verify` found, without systems: half of four tokens are equal."""
    from tfkv import consistency

    seen = {}

    def check(*arguments, progress, **options):
        seen.update(arguments=arguments, **options)
        progress("answers", 1, 1)
        similarity = 0.9 if options["meaning"] else None
        found = PromptAgreement("why?", "so", "thus", 4, 2, 2, 0.02, 0.03, 4, 3, similarity)
        return Agreement("full", "small", (found,))

    monkeypatch.setattr(consistency, "check_consistency", check)
    return seen


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--no-meaning"], 0, ""),
        (["--min-similarity", 0.9], 0, ""),
        ([], 2, "Not held: similarity is 0.9, expected at least 0.95."),
        (["--no-meaning", "--max-kl", 0.02, "--min-agreement", 50], 0, ""),
        (["--no-meaning", "--max-kl", 0.01], 2, "Not held: KL is 0.02 nats, expected at most 0.01"),
        (["--no-meaning", "--min-first-divergence", 3], 2, "Not held: first divergence is 2"),
        (["--max-kl", -1], 1, "Error: `max_kl` must be from 0"),
    ],
)
def test_verify_exits_with_2_where_a_limit_does_not_hold(verified, options, code, sentence):
    result = run("verify", "full", "small", *options)
    assert result.exit_code == code
    assert sentence in plain(result.stderr)
    assert ("small against full" in plain(result.stdout)) == (code != 1)


def test_verify_prints_json_of_prompts_limits_and_what_is_broken(verified, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("why?\n", encoding="utf-8")
    options = ("--prompts", prompts, "--raw", "--model", "smollm2", "--max-new-tokens", 4)
    result = run("verify", "full", "small", *options, "--json")
    data = json.loads(result.stdout)
    assert data["overall"] == {
        "agreement_percent": 50,
        "first_divergence": 2,
        "kl": 0.02,
        "same_top_percent": 75,
        "similarity": 0.9,
    }
    assert data["limits"]["min_similarity"] == 0.95
    assert data["broken"] == ["similarity is 0.9, expected at least 0.95"]
    assert verified["arguments"] == ("full", "small", "smollm2", ["why?"])
    assert (verified["chat"], verified["max_new_tokens"]) == (False, 4)


def test_a_table_of_agreement_fits_80_columns():
    row = ("word " * 20, "", "", 128, 12, 12, 1e-3, 1e-2, 128, 120, 0.95)
    found = Agreement("full", "small", (PromptAgreement(*row),))
    console = Console(width=80, file=io.StringIO())
    console.print(terminal.agreement_table(found))
    text = console.file.getvalue()
    for shown in ("word word word word…", "9.4 %", "1.00e-03", "93.8 %", "0.950"):
        assert shown in text


def test_calibrations_that_cannot_be_used_are_refused(tmp_path):
    odd = tmp_path / "odd.txt"
    odd.write_bytes(b"\xff\xfe")
    result = run("calibrate", "smollm2", tmp_path / "out.json", "--text", odd)
    assert result.exit_code == 1
    assert "`--text` must be UTF-8" in plain(result.output)
    missing = run("export", "smollm2", tmp_path / "a", "--calibration", tmp_path / "none.json")
    assert missing.exit_code == 2
    other = tmp_path / "other.json"
    other.write_text('{"fingerprint": "f", "tokens": 2048, "passages": 1, "tables": {}}')
    given = ("--cache", "ada_kv", "--calibration", other)
    refused = run("export", "smollm2", tmp_path / "a", *given)
    assert refused.exit_code == 1
    assert "made with other weights" in plain(refused.output)


def test_inspect_shows_layers_that_differ(artifact):
    path = artifact / MANIFEST_PATH
    manifest = json.loads(path.read_text())
    manifest["engine"]["layer_caches"] = ["0=int8"]
    path.write_text(json.dumps(manifest))
    assert "dense+float32; 0=int8" in plain(run("inspect", artifact).stdout)


def test_inspect_json_is_the_manifest_and_the_bytes(artifact):
    result = run("inspect", artifact, "--json")
    facts = json.loads(result.stdout)
    manifest = Manifest.from_json(json.dumps(facts["manifest"]))
    assert manifest == Manifest.read(artifact)
    assert facts["version"] == "3"
    assert facts["tokenizer"]
    assert not facts["warmup"]
    assert facts["bytes"] == {
        "disk": sum(p.stat().st_size for p in artifact.rglob("*") if p.is_file()),
        "weights": 5000,
        "token": 1024,
        "session": 131_072,
        "sessions": 393_216,
    }


def test_inspect_signature_shows_every_input_and_output(artifact):
    result = run("inspect", artifact, "--signature", "generate")
    text = plain(result.stdout)
    spec = signature_table(EngineConfig())["generate"]
    for name in (*spec.inputs, *spec.outputs):
        assert re.search(rf"\b{name}\b", text)
    assert "[B, T]" in text
    assert "required" in text


def test_inspect_unknown_signature(artifact):
    result = run("inspect", artifact, "--signature", "nope")
    assert result.exit_code == 1
    assert "No signature 'nope'. The artifact has: generate" in plain(result.stderr)


def test_errors_are_one_line_with_exit_code_1(tmp_path):
    result = run("inspect", tmp_path / "missing")
    assert result.exit_code == 1
    assert result.stdout == ""
    lines = plain(result.stderr).strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert "holds no SavedModel version" in lines[0]
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(tmp_path):
    command = [sys.executable, "-m", "tfkv", "--debug", "inspect", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "ArtifactError" in result.stderr


def test_a_damaged_manifest_is_an_error_not_a_traceback(artifact):
    (artifact / MANIFEST_PATH).write_text("{", encoding="utf-8")
    result = run("inspect", artifact)
    assert result.exit_code == 1
    assert "is not a tfkv manifest" in plain(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "x.gguf", "out", "--slots", 0], "`slots` must be at least 1"),
        (["export", "x.gguf", "out", "--batch-sizes", "4,2"], "`batch_sizes` must be ascending"),
        (["export", "x.gguf", "out", "--batch-sizes", "a"], "`--batch-sizes` must be numbers"),
        (["export", "x.gguf", "out", "--adapter", "a.h5"], "`--adapter` must be name=file"),
        (["export", "x.gguf", "out", "--adapter", "=a.h5"], "`--adapter` must be name=file"),
        (["export", "x", "out", "--adapter", "a=b", "--adapter", "a=c"], "each name once"),
        (["serve", "x", "--batching-parameters-file", "y"], "needs `--enable-batching`"),
        (["chat", "--artifact", "missing"], "holds no SavedModel version"),
        (["chat"], "needs a chat template"),
    ],
)
def test_wrong_values(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in plain(result.stderr)


def test_export_hands_options_to_the_exporter(no_tensorflow, monkeypatch, tmp_path):
    seen = {}

    def export(source, out_dir, engine, *, calibration, adapters, progress):
        progress("verify", 2, 2)
        seen.update(source=source, engine=engine, calibration=calibration, adapters=adapters)
        return out_dir / "1"

    monkeypatch.setitem(sys.modules, "tfkv.export", types.SimpleNamespace(export=export))
    arguments = ["--cache", "dense+int8", "--slots", 2, "--batch-sizes", "1,2", "--no-xla"]
    table = tmp_path / "calibration.json"
    table.write_text("{}")
    arguments += ["--calibration", table]
    arguments += ["--layer-cache", "0-1=float32", "--layer-cache", "3=k4v4"]
    arguments += ["--adapter", "legal=a=b.lora.h5", "--adapter", "medical=m.safetensors"]
    result = run("export", "smollm2", tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(tmp_path / "out" / "1")
    assert "Verifying: 2/2" in result.stderr
    assert (seen["source"], seen["calibration"]) == ("smollm2", table)
    assert seen["adapters"] == {"legal": "a=b.lora.h5", "medical": "m.safetensors"}
    assert seen["engine"] == EngineConfig(
        cache="dense+int8",
        slots=2,
        batch_sizes=(1, 2),
        xla=False,
        layer_caches=("0-1=float32", "3=k4v4"),
    )


@pytest.fixture
def exported(no_tensorflow, monkeypatch):
    """The engines that `tfkv export` was asked for, without exports."""
    engines = []

    def export(source, out_dir, engine, *, calibration, adapters, progress):
        engines.append(engine)
        return out_dir / "1"

    monkeypatch.setitem(sys.modules, "tfkv.export", types.SimpleNamespace(export=export))
    return engines


@pytest.mark.parametrize("name", presets.PRESETS)
def test_export_takes_all_of_a_preset(exported, tmp_path, name):
    for arguments in (("--preset", name, "smollm2", tmp_path), ("smollm2", tmp_path)):
        result = run("export", *arguments)
        assert result.exit_code == 0, result.output
    assert exported == [presets.get(name).engine(), EngineConfig()]


def test_options_that_are_given_win_over_a_preset(exported, tmp_path):
    options = ("--cache", "dense+float32", "--preset", "code", "--batch-sizes", "1,2")
    assert run("export", "smollm2", tmp_path, *options).exit_code == 0
    code = presets.get("code").engine()
    (engine,) = exported
    assert engine == dataclasses.replace(code, cache="dense+float32", batch_sizes=(1, 2))


def test_an_unknown_preset_is_refused_with_the_nearest(exported, tmp_path):
    result = run("export", "smollm2", tmp_path, "--preset", "chatt")
    assert result.exit_code == 1
    assert "no preset 'chatt'. Did you mean 'chat'?" in plain(result.stderr)
    assert exported == []


def test_presets_are_shown_with_their_caches():
    text, data = plain(run("presets").stdout), json.loads(run("presets", "--json").stdout)
    assert [entry["name"] for entry in data] == list(presets.PRESETS)
    for entry in data:
        assert entry["name"] in text
        assert entry["cache"] == presets.get(entry["name"]).cache
        assert entry["cache"] in text


def test_an_export_that_fails(no_tensorflow, monkeypatch, tmp_path):
    def export(*_, **__):
        raise ModelSourceError("Unsupported architecture [gpt].")

    monkeypatch.setitem(sys.modules, "tfkv.export", types.SimpleNamespace(export=export))
    result = run("export", "x.gguf", tmp_path)
    assert result.exit_code == 1
    assert plain(result.stderr).strip() == "Error: Unsupported architecture [gpt]."


@pytest.mark.parametrize(("module", "extra"), [("tensorflow", "export,serve"), ("gguf", "export")])
def test_a_missing_extra_is_named(no_tensorflow, monkeypatch, module, extra, tmp_path):
    def export(*_, **__):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setitem(sys.modules, "tfkv.export", types.SimpleNamespace(export=export))
    result = run("export", "x.gguf", tmp_path)
    assert result.exit_code == 1
    assert f"pip install 'tfkv[{extra}]'" in plain(result.stderr)


def test_no_server_is_one_line():
    result = run("stats", "--target", "127.0.0.1:1", "--timeout", "0.5")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in plain(result.stderr)
    assert "Traceback" not in result.stderr


def test_the_command_starts_without_tensorflow():
    code = (
        "import sys; import tfkv.cli, tfkv.demo, tfkv.inspection; "
        "print([m for m in ('tensorflow', 'keras', 'grpc', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("level", ["0", "2"])
def test_tensorflow_starts_silently_unless_asked(level, tmp_path):
    fake = (
        "import logging, os, types; os.write(2, b'noise'); "
        "get_logger = lambda: logging.getLogger('tensorflow'); get_logger().setLevel('INFO'); "
        "config = types.SimpleNamespace(list_physical_devices=lambda kind: os.write(2, b'GPU'))"
    )
    (tmp_path / "tensorflow.py").write_text(fake, encoding="utf-8")
    code = (
        "import os, tfkv.terminal as t; t.load_tensorflow(); os.write(2, b'after'); "
        "import logging; print(logging.getLogger('tensorflow').getEffectiveLevel())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": level},
        capture_output=True,
        text=True,
    )
    assert result.stderr == ("noiseafter" if level == "0" else "after")
    assert int(result.stdout) == (logging.INFO if level == "0" else logging.WARNING)


def test_a_server_starts_without_keras():
    code = (
        "import sys, tfkv.terminal as t; t.load_tensorflow(keras=False); "
        "import tfkv.serving.server; "
        "print('keras' in sys.modules); import keras; print(keras.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "keras"], result.stderr


class FakeGeneration:
    def __init__(self, pieces):
        self._pieces = pieces
        self.closed = False
        self.result = types.SimpleNamespace(
            prompt_tokens=4,
            tokens=[1, 2],
            time_to_first_token=0.05,
            tokens_per_second=30.0,
            finish=types.SimpleNamespace(name="STOP"),
        )

    def __iter__(self):
        for piece in self._pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def close(self):
        self.closed = True


class FakeSession:
    def __init__(self, client):
        self.client = client
        self.messages = []
        self.position = 0
        self.replays = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.log.append("close")

    def start(self, prompt, sampling):
        self.client.log.append(("start", prompt, sampling.temperature))
        return FakeGeneration(["an ", "answer"])

    def chat(self, line, *, system, **sampling):
        self.client.log.append(("chat", line, system))
        self.messages.append(line)
        self.position += 10
        return FakeGeneration(self.client.answers.pop(0))


class FakeClient:
    log: list
    answers: list
    asked: dict
    model = "m"
    chat_template = object()
    manifest = None

    def __init__(self, target, model, *, artifact=None, timeout, retry=None):
        type(self).log = [(target, model)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def session(self, **asked):
        type(self).asked = asked
        return FakeSession(self)

    def stats(self):
        return {"slots": 8, "epoch": 12}

    def predict(self, signature, inputs):
        if self.answers:
            raise self.answers.pop()
        return {name: np.array([value]) for name, value in self.stats().items()}


@pytest.fixture
def client(monkeypatch):
    import tfkv.serving

    monkeypatch.setitem(vars(tfkv.serving), "Client", FakeClient)
    return FakeClient


def test_generate_streams_to_standard_output(client):
    result = run("generate", "Hi [b]", "--temperature", 0.5, "--stats", "--model", "m")
    assert result.stdout == "an answer\n"
    assert "30.0 tokens/s" in plain(result.stderr)
    prompt = [{"role": "user", "content": "Hi [b]"}]
    assert client.log == [("127.0.0.1:8500", "m"), ("start", prompt, 0.5), "close"]


def test_generate_raw_ids_and_standard_input(client):
    run("generate", "Once", "--raw")
    assert client.log[1][1] == "Once"
    run("generate", "1, 2 3", "--ids")
    assert client.log[1][1] == (1, 2, 3)
    run("generate", "-", "--raw", input="from a pipe")
    assert client.log[1][1] == "from a pipe"


def test_chat_turns_and_commands(client):
    client.answers = [["one"], ["two"], ["three"]]
    lines = "hello\n\nagain\n/stats\n/what\n/reset\nnew\n/quit\nnever\n"
    result = run("chat", "--system", "Be brief.", input=lines)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == ["one", "two", "three"]
    assert client.log[1:] == [
        ("chat", "hello", "Be brief."),
        ("chat", "again", None),
        "close",
        ("chat", "new", "Be brief."),
        "close",
    ]
    notes = plain(result.stderr)
    assert "session: 20 tokens" in notes
    assert "slots: 8" in notes
    assert "No command /what" in notes


@pytest.mark.parametrize("command", [("generate", "Hi"), ("chat",)])
def test_sessions_get_the_adapter_that_was_asked_for(client, command):
    run(*command, "--adapter", "legal", input="/quit\n")
    assert client.asked["adapter"] == "legal"
    run(*command, input="/quit\n")
    assert client.asked["adapter"] == ""


def test_chat_goes_on_after_an_error_and_after_ctrl_c(client):
    client.answers = [["a", ModelSourceError("lost")], ["b", KeyboardInterrupt()], ["c"]]
    result = run("chat", input="x\ny\nz\n")
    assert result.exit_code == 0
    assert result.stdout.split() == ["a", "b", "c"]
    assert "Error: lost" in plain(result.stderr)


def test_stats_table_and_json(client):
    text = plain(run("stats").stdout)
    assert re.search(rf"slots\s+8\s+{STATS['slots']}", text)
    assert json.loads(run("stats", "--json").stdout) == {"slots": 8, "epoch": 12}


class PageShelf:
    """A server that keeps one page a session, by tenant and name."""

    pages: dict = {}

    def __init__(self, target, model, *, tenant="", timeout):
        self.tenant = tenant

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def predict(self, signature, inputs, timeout=None):
        key = (inputs["tenant"][0], inputs["session_id"][0])
        if signature == "restore":
            self.pages[key] = dict(inputs)
        status = np.array([0 if key in self.pages else 3])
        return self.pages.get(key, {}) | {"status": status, "detail": np.array([0])}


def test_sessions_are_dumped_and_loaded(monkeypatch, tmp_path):
    import tfkv.serving

    monkeypatch.setitem(vars(tfkv.serving), "Client", PageShelf)
    numbers = np.arange(4, dtype=np.int32)[np.newaxis]
    page = {name: numbers for name in ("tokens", "kinds", "logprobs")}
    page["page_bytes"] = np.array([b"keys and values"], object)
    page |= {name: np.array([3]) for name in ("held", "filled")}
    PageShelf.pages = {
        (b"one", name): page | {"fingerprint": np.array([b"f"], object)} for name in (b"a/b", b"c")
    }
    result = run("sessions", "dump", tmp_path / "kept", "a/b", "c", "--tenant", "one")
    assert result.exit_code == 0
    assert result.stdout.count(": 3 tokens") == 2
    PageShelf.pages = {}
    result = run("sessions", "load", tmp_path / "kept", "--tenant", "two", "--ttl-ms", "7")
    assert result.stdout.splitlines() == ["a/b: 3 tokens", "c: 3 tokens"]
    assert set(PageShelf.pages) == {(b"two", b"a/b"), (b"two", b"c")}
    assert all(page["ttl_ms"] == [7] for page in PageShelf.pages.values())
    refused = run("sessions", "dump", tmp_path / "kept", "nobody")
    assert refused.exit_code == 1
    assert "UNKNOWN" in refused.stderr


def test_metrics_once(client):
    client.answers = []
    result = run("metrics", "--once", "--target", "h:1")
    assert result.exit_code == 0
    assert "\ntfkv_slots 8.0\n" in result.stdout
    assert client.log == [("h:1", "tfkv")]
    client.answers = [ServerError("gone")]
    result = run("metrics", "--once")
    assert result.exit_code == 1
    assert "\ntfkv_up 0.0\n" in result.stdout


def test_metrics_serves_until_told_to_end():
    command = [sys.executable, "-m", "tfkv", "metrics", "--port", "0", "--target", "127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().removeprefix("Metrics: ").strip()
            with urllib.request.urlopen(address, timeout=10) as reply:
                assert b"\ntfkv_up 0.0\n" in reply.read()
            process.terminate()
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1000", 1000), ("2GB", 2 * 10**9), ("1.5 MiB", 3 * 2**19), ("4k", 4000)],
)
def test_sizes(text, size):
    assert cli._bytes("--pool", text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "2 apples", "3iB"])
def test_wrong_sizes(text):
    with pytest.raises(ConfigError, match="`--pool` must be a size"):
        cli._bytes("--pool", text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1024.0 GiB")]
)
def test_human_bytes(count, text):
    assert terminal.human_bytes(count) == text


def test_cache_bytes_stop_at_what_is_reserved(artifact):
    manifest = Manifest.read(artifact)
    assert terminal.cache_bytes(manifest, 10) == (10_240, 131_072)
    assert terminal.cache_bytes(manifest, 10_000) == (131_072, 131_072)
    assert inspection.measure(artifact, manifest)["token"] == 1024

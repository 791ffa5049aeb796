"""What an export writes, proves and leaves behind."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
import tiny_model
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import prediction_log_pb2
from tiny_artifacts import ENGINES
from tiny_model import CONFIG, WEIGHTS, greedy, text

from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import ArtifactError, ConfigError, ExportError
from tfkv.export import LoadedArtifact, export, exporter
from tfkv.manifest import MANIFEST_PATH, WARMUP_PATH, Manifest, signature_table

WEIGHT_BYTES = sum(value.nbytes for value in WEIGHTS.values())


def tree_bytes(path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_variables_are_stored_once_and_the_pool_not_at_all(exported):
    """keras #23553: export stores every variable twice."""
    variables = tree_bytes(exported["plain"] / "variables")
    assert WEIGHT_BYTES <= variables < WEIGHT_BYTES + 10_000
    stored = tf.train.list_variables(str(exported["plain"] / "variables" / "variables"))
    sizes = sum(
        int(np.prod(shape)) * 4 for name, shape in stored if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
    )
    assert sizes == WEIGHT_BYTES


def test_graph_holds_no_weights(exported):
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((exported["plain"] / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    constants = [node.attr["value"].tensor.ByteSize() for node in nodes if node.op == "Const"]
    smallest = 4 * CONFIG.num_layers * CONFIG.hidden_dim**2  # the stacked output projections
    assert max(constants) < smallest


def test_version_directory_holds_what_a_server_looks_for(exported):
    version = exported["plain"]
    assert version.name == "1"
    assert (version / "saved_model.pb").exists()
    assert (version / WARMUP_PATH).exists()
    assert (version / MANIFEST_PATH).exists()
    assert [path.name for path in version.parent.iterdir()] == ["1"]
    assert version.stat().st_mode & 0o755 == 0o755, "a server is another user"


def test_manifest_round_trips_and_says_what_was_exported(exported):
    manifest = Manifest.read(exported["plain"])
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.model == CONFIG
    assert manifest.engine == ENGINES["plain"]
    page_bytes = 16 * manifest.bytes_per_token
    table = signature_table(ENGINES["plain"], (tiny_model.STOP,), page_bytes)
    assert manifest.signatures == table
    assert manifest.bytes_per_token == 2 * CONFIG.num_layers * 2 * 8 * 4
    assert manifest.bytes_per_session == 96 * manifest.bytes_per_token
    assert (manifest.positions, manifest.rollback) == (512, -1)
    assert manifest.chunk_invariant


def test_window_manifest_names_its_rollback(exported):
    manifest = Manifest.read(exported["window"])
    assert manifest.rollback == 96 - 20
    assert manifest.bytes_per_session == 112 * manifest.bytes_per_token


def test_foreign_or_newer_manifest_is_refused(exported, tmp_path):
    with pytest.raises(ArtifactError, match="No manifest at"):
        Manifest.read(tmp_path)
    data = json.loads((exported["plain"] / MANIFEST_PATH).read_text())
    with pytest.raises(ArtifactError, match="format version 99"):
        Manifest.from_json(json.dumps({**data, "format_version": 99}))
    with pytest.raises(ArtifactError, match="not a tfkv manifest"):
        Manifest.from_json("{}")


def test_fingerprint_follows_weights_and_cache(exported):
    prints = {name: Manifest.read(exported[name]).fingerprint for name in ("plain", "window")}
    source = tiny_model.source()
    assert exporter._fingerprint(source, ENGINES["plain"]) == prints["plain"]
    assert prints["plain"] != prints["window"]
    changed = {**WEIGHTS, "final_norm": WEIGHTS["final_norm"] + np.float32(1e-6)}
    other = dataclasses.replace(source, weights=changed)
    assert exporter._fingerprint(other, ENGINES["plain"]) != prints["plain"]
    mixed = dataclasses.replace(ENGINES["plain"], layer_caches=("0=int8",))
    assert exporter._fingerprint(source, mixed) != prints["plain"]


@pytest.fixture
def small_engine() -> EngineConfig:
    """The least that exports: the quickest, too."""
    return EngineConfig(
        slots=1, capacity=4, page_size=2, decode_chunk=3, prefill_tokens=8, batch_sizes=(1,),
        scan_pages=1, xla=False,
    )  # fmt: skip


def test_versions_count_up(tmp_path, monkeypatch, small_engine):
    monkeypatch.setattr(exporter, "verify", lambda *_: None)
    written = []

    def write(model, config, tables, adapters, stage, report):
        (stage / "saved_model.pb").touch()

    monkeypatch.setattr(exporter, "_write", write)
    (tmp_path / "7").mkdir()
    (tmp_path / "notes.txt").touch()
    for _ in range(3):
        written.append(export(tiny_model.source(), tmp_path, small_engine).name)
    assert written == ["8", "9", "10"]


def test_smallest_engine_exports_and_verifies(tmp_path, small_engine):
    version = export(tiny_model.source(), tmp_path, small_engine)
    with LoadedArtifact(version) as artifact:
        answer = artifact.call(
            "generate", session_id=["s"], tokens=[text(2)], length=[2], position=[0],
            max_new_tokens=[2],
        )  # fmt: skip
        assert list(answer["tokens"][0][:2]) == greedy(text(2), 2)
        for _ in range(3):
            answer = artifact.call(
                "generate", session_id=["s"], tokens=[[]], length=[0], position=[-1], overflow=[2]
            )
        assert answer["status"][0] == 0
        sees = tiny_model.sliding_pages(4, 2)
        assert list(answer["tokens"][0]) == greedy(text(2), 11, sees)[8:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_what_the_tests_export_answers_as_its_keras_model(name, exported):
    exporter.verify(tiny_model.source(), exported[name], lambda *_: None)


@pytest.mark.parametrize("damage", ["other weights", "wrong status"])
def test_failed_verification_leaves_nothing(tmp_path, monkeypatch, small_engine, damage):
    source = tiny_model.source()
    if damage == "other weights":
        other = dataclasses.replace(source, weights=tiny_model.make_weights(seed=1))
        verify = exporter.verify
        monkeypatch.setattr(exporter, "verify", lambda _, *rest: verify(other, *rest))
        match = "logits differ"
    else:
        monkeypatch.setattr(LoadedArtifact, "call", lambda *_, **__: {"status": np.array([7])})
        match = "OVERFLOW, expected OK"
    with pytest.raises(ExportError, match=match):
        export(source, tmp_path, small_engine)
    assert list(tmp_path.iterdir()) == []


def test_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, small_engine):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(tf.saved_model, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        export(tiny_model.source(), tmp_path, small_engine)
    assert list(tmp_path.iterdir()) == []


def test_progress_reaches_the_end_of_every_stage(tmp_path, monkeypatch, small_engine):
    seen = {}
    monkeypatch.setattr(exporter, "_write", lambda *_: None)
    monkeypatch.setattr(exporter, "verify", lambda *_: None)
    export(
        tiny_model.source(), tmp_path, small_engine,
        progress=lambda stage, done, total: seen.update({stage: (done, total)}),
    )  # fmt: skip
    assert seen["import"] == (1, 1)


def test_history_shorter_than_a_call_is_refused():
    with pytest.raises(ConfigError, match="`history` must be 0 or at least"):
        EngineConfig(history=100, prefill_tokens=128, decode_chunk=8)


def test_two_loads_have_different_epochs_and_share_nothing(exported, plain):
    with LoadedArtifact(exported["plain"]) as other:
        session = plain.name()
        plain.generate(session, text(5))
        stats = other.call("stats", session_id=[""])
        assert stats["epoch"][0] != plain.stats()["epoch"]
        assert stats["slots"][0] == 8, "levels that never change are there from the start"
        assert stats["slots_used"][0] == 0
        answer = other.call(
            "generate", session_id=[session], tokens=[[5]], length=[1], position=[13]
        )
        assert answer["status"][0] == 3
        assert answer["epoch"][0] == stats["epoch"][0]


def test_warmup_covers_all_signatures_and_batches_and_leaves_nothing(exported, plain):
    """What a server replays at load: no session, no page, no counter remains."""
    before = plain.stats()
    seen = set()
    for record in tf.data.TFRecordDataset(str(exported["plain"] / WARMUP_PATH)):
        log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
        request = log.predict_log.request
        inputs = {key: tf.make_ndarray(value) for key, value in request.inputs.items()}
        name = request.model_spec.signature_name
        seen.add((name, len(inputs["session_id"])))
        answer = plain.artifact.call(name, **inputs)
        assert set(answer) == set(plain.artifact.manifest.signatures[name].outputs)
    after = plain.stats()
    batched = {(name, size) for name in ("generate", "decode", "score") for size in (1, 2, 4)}
    assert batched <= seen
    assert {name for name, _ in seen} == set(plain.artifact.manifest.signatures)
    assert {k: v for k, v in after.items() if k != "uptime_ms"} == {
        k: v for k, v in before.items() if k != "uptime_ms"
    }


def test_tied_embeddings_are_stored_once(tmp_path, monkeypatch, small_engine):
    monkeypatch.setattr(exporter, "verify", lambda *_: None)
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    weights = tiny_model.make_weights(config)
    source = tiny_model.source(config=config, weights=weights)
    version = export(source, tmp_path, small_engine)
    size = sum(value.nbytes for value in weights.values())
    assert size <= tree_bytes(version / "variables") < size + 10_000


def test_model_and_engine_that_do_not_fit_are_refused_before_writing(tmp_path):
    with pytest.raises(ConfigError, match="at least two pages"):
        export(tiny_model.source(), tmp_path, EngineConfig(capacity=64, page_size=64))
    assert list(tmp_path.iterdir()) == []
    assert isinstance(CONFIG, DecoderConfig)

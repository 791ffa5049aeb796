"""The written contract: names, dtypes, defaults, broadcasting, and shapes that are refused."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tiny_model import greedy, text

from tfkv.errors import Status
from tfkv.export.warmup import warmup_inputs
from tfkv.manifest import STATS, signature_table
from tfkv.serving.server.call_error import CallError
from tfkv.serving.server.session_runner import SessionRunner


@pytest.fixture(scope="module")
def definitions(exported):
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((exported["plain"] / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0].signature_def


def test_signatures_have_the_inputs_and_outputs_of_the_contract(definitions, loaded):
    manifest = loaded["plain"].manifest
    table = signature_table(manifest.engine, (2,), 16 * manifest.bytes_per_token)
    calls = {"generate", "decode", "score", "truncate", "fork", "close", "stats"}
    assert set(table) == calls | {"attention", "snapshot", "restore"}
    sizes_of = {"V": 97, "T": -1, "heads": 4, "entries": 96}
    for name, spec in table.items():
        definition = definitions[name]
        assert set(definition.inputs) == set(spec.inputs)
        assert set(definition.outputs) == set(spec.outputs)
        for side, specs in ((definition.inputs, spec.inputs), (definition.outputs, spec.outputs)):
            for key, tensor in side.items():
                assert tf.as_dtype(tensor.dtype).name == specs[key].dtype, (name, key)
                sizes = [dim.size for dim in tensor.tensor_shape.dim]
                axes = [sizes_of.get(axis, axis) for axis in specs[key].shape]
                assert sizes == [-1, *axes], (name, key)


def test_every_optional_input_has_its_default_in_the_signature(definitions, loaded):
    for name, spec in loaded["plain"].manifest.signatures.items():
        optional = {key for key, tensor in spec.inputs.items() if tensor.default is not None}
        assert set(definitions[name].defaults) == optional
        for key in optional:
            value = tf.make_ndarray(definitions[name].defaults[key])
            assert value.shape[0] == 1
            expected = spec.inputs[key].default
            if isinstance(expected, str):
                assert value[0] == expected.encode()
            else:
                np.testing.assert_array_equal(value[0], expected)


def test_one_value_serves_all_rows(plain):
    prompts = [text(5, n) for n in range(3)]
    names = [plain.name() for _ in prompts]
    answer = plain.generate(names, prompts, [0], max_new_tokens=[3])
    assert list(answer["count"]) == [3, 3, 3]
    for row, prompt in enumerate(prompts):
        assert list(answer["tokens"][row][:3]) == greedy(prompt, 3)
    same = plain.artifact.call(
        "generate", session_id=[b"x", b"y"], tokens=[[7, 8]], length=[2], position=[0]
    )
    plain.sessions |= {("", "x"), ("", "y")}
    assert list(same["tokens"][0]) == list(same["tokens"][1]) == greedy([7, 8], 8)


@pytest.fixture
def raw(plain, loaded):
    """Calls past the checks that Python makes, as a gRPC client can."""
    artifact = loaded["plain"]
    runner = SessionRunner(artifact._session)

    def call(signature: str, **changed: object) -> dict[str, np.ndarray]:
        spec = artifact.manifest.signatures[signature]
        definition = artifact._signatures[signature]
        inputs = warmup_inputs(spec, 2)
        inputs["session_id"] = np.array([plain.name(), plain.name()], object)
        plain.sessions |= {("", name) for name in inputs["session_id"]}
        if "tokens" in inputs:
            inputs |= {"tokens": np.full([2, 1], 5, np.int32), "length": np.ones(2, np.int32)}
        for key, value in changed.items():
            dtype = object if spec.inputs[key].dtype == "string" else spec.inputs[key].dtype
            inputs[key] = np.array(value, dtype)
        names = list(definition.outputs)
        fetches = tuple(definition.outputs[name].name for name in names)
        feeds = {definition.inputs[key].name: value for key, value in inputs.items()}
        return dict(zip(names, runner.run(feeds, fetches), strict=True))

    return call


WRONG = [
    ("length", [1, 1, 1], "length"),
    ("length", [[1, 1]], "length"),
    ("length", 1, "length"),
    ("position", [0, 0, 0], "position"),
    ("tokens", [5, 6], "tokens"),
    ("tokens", [[[5]], [[6]]], "tokens"),
    ("tokens", [[5], [6], [7]], "tokens"),
    ("temperature", [0.0, 0.0, 0.0], "temperature"),
    ("temperature", [], "temperature"),
    ("tenant", ["a", "b", "c"], "tenant"),
    ("stop_tokens", [-1, -1], "stop_tokens"),
    ("stop_tokens", [[-1] * 7] * 2, "stop_tokens"),
    ("session_id", [["a", "b"]], "session_id"),
    ("seed", [[1], [2]], "seed"),
]


@pytest.mark.parametrize(("name", "value", "named"), WRONG)
def test_wrong_shape_is_an_error_that_names_the_input(raw, plain, name, value, named):
    before = plain.stats()
    with pytest.raises(CallError, match=f"`{named}`"):
        raw("generate", **{name: value})
    assert plain.counted(before) == {}
    assert list(raw("generate")["status"]) == [Status.OK] * 2


@pytest.mark.parametrize("signature", ["decode", "score", "truncate", "close", "stats"])
def test_every_signature_checks_its_shapes(raw, signature):
    with pytest.raises(CallError, match="`session_id`"):
        raw(signature, session_id=[["a"], ["b"]])


def test_more_rows_than_the_largest_batch_are_an_error_that_harms_nobody(raw, plain):
    before = plain.stats()
    with pytest.raises(CallError, match=r"\b5\b.*\b4\b|\b4\b.*\b5\b"):
        raw("generate", session_id=["a"] * 5, tokens=[[5]], length=[1], position=[0], **ONES)
    assert plain.counted(before) == {}
    assert list(raw("generate")["status"]) == [Status.OK] * 2


ONES = {
    "tenant": [""], "adapter": [""], "max_new_tokens": [8], "temperature": [0.0], "top_p": [1.0],
    "min_p": [0.0], "repetition_penalty": [1.0], "top_k": [0], "seed": [0], "overflow": [0],
    "pin": [0], "ttl_ms": [0], "stop_tokens": [[-1] * 8],
}  # fmt: skip


def test_no_rows_give_no_rows(raw, plain):
    before = plain.stats()
    empty = {"session_id": [], "tokens": np.zeros([0, 1]), "length": [], "position": []}
    answer = raw("generate", **empty, **ONES)
    assert answer["tokens"].shape == (0, 8)
    assert all(len(value) == 0 for value in answer.values())
    assert raw("stats", session_id=[])["slots"].shape == (0,)
    assert raw("close", session_id=[], tenant=[])["status"].shape == (0,)
    assert plain.counted(before) == {}


def test_no_token_columns_at_all_is_an_empty_prompt(raw):
    answer = raw("generate", tokens=np.zeros([2, 0]), length=[0, 0])
    assert list(answer["status"]) == [Status.EMPTY] * 2


def test_stats_answers_each_row_with_all_counters(plain):
    answer = plain.artifact.call("stats", session_id=[b"", b"x", b"y"])
    assert set(answer) == {*STATS, "epoch"}
    for value in answer.values():
        assert value.shape == (3,)
        assert value.dtype == np.int64
        assert len(set(value)) == 1


def test_levels_follow_what_sessions_hold(plain):
    names = [plain.name(), plain.name()]
    plain.generate(names, [text(17), text(5)], count=0)
    stats = plain.stats()
    assert (stats["slots"], stats["slots_used"]) == (8, 2)
    assert (stats["pages"], stats["pages_used"]) == (8 * 6, 2)
    assert stats["bytes_used"] == 2 * 16 * plain.artifact.manifest.bytes_per_token
    assert stats["bytes_pool"] == 49 * 16 * plain.artifact.manifest.bytes_per_token
    plain.generate(names[0], text(1, 3), 17, count=1)
    assert plain.stats()["pages_used"] == 3
    plain.truncate(names[0], 3)
    assert plain.stats()["pages_used"] == 2
    plain.close(names)
    assert plain.stats()["pages_used"] == 0


def test_signatures_called_at_once_are_not_put_into_one_batch(loaded):
    """Their queues had one name: a batch of both failed with INTERNAL, and took all its rows."""
    artifact = loaded["plain"]
    failed = []

    def call(signature: str, number: int) -> None:
        for turn in range(10):
            name = f"at-once-{signature}-{number}-{turn}"
            answer = artifact.call(
                signature, session_id=[name], tokens=[[5, 6, 7]], length=[3], position=[0]
            )
            artifact.call("close", session_id=[name])
            if answer["status"][0] not in (Status.OK, Status.FULL):
                failed.append(answer)

    names = [
        (signature, number) for signature in ("generate", "decode", "score") for number in "ab"
    ]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        for done in [pool.submit(call, *name) for name in names]:
            done.result()
    assert not failed

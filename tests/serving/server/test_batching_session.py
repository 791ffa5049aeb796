"""``--enable_batching`` goes wrong here as it does on the real server."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.serving.server import BatchingParameters

F = np.float32
PADDED = BatchingParameters(
    max_batch_size=8,
    batch_timeout_micros=500_000,
    allowed_batch_sizes=(4, 8),
    num_batch_threads=4,
)


def _inputs(*names: bytes) -> dict[str, np.ndarray]:
    return {"sid": np.array(names, object), "x": np.arange(len(names)).astype(F)}


def _answer(call: Any) -> dict[str, np.ndarray]:
    return {key: tf.make_ndarray(value) for key, value in call.result().outputs.items()}


def _error(call: Any) -> tuple[str, str]:
    error = call.exception()
    assert isinstance(error, grpc.RpcError)
    return error.code().name, error.details()


def _pair(caller: Any, first: Any, second: Any, signature: str = "", **options: Any) -> list[Any]:
    """Two calls of one batch, in this order."""
    calls = [caller.start(signature, first, **options)]
    time.sleep(0.1)
    return [*calls, caller.start(signature, second)]


@pytest.fixture(scope="module")
def batched(model_dir: pathlib.Path, serve: Any) -> Any:
    with serve(model_dir, batching=PADDED) as caller:
        yield caller


def test_a_lone_row_is_run_four_times(batched: Any) -> None:
    """TFS batching: copies of a live row change state unless the graph masks them."""
    before = batched.predict("", _inputs(b"a"))
    after = batched.predict("", _inputs(b"a"))
    assert after["batch"][0] == b"a,a,a,a"
    assert after["total"] - before["total"] == 4


def test_padding_repeats_the_first_row_of_the_last_call(batched: Any) -> None:
    calls = _pair(batched, _inputs(b"a1", b"a2"), _inputs(b"b1", b"b2", b"b3"))
    first, second = map(_answer, calls)
    assert first["batch"].tolist() == [b"a1,a2,b1,b2,b3,b1,b1,b1"] * 2
    assert second["y"].tolist() == [0, 2, 4]
    assert first["total"][0] == second["total"][0]


def test_different_widths_fail_every_member(batched: Any) -> None:
    calls = _pair(batched, {"x": np.ones((1, 2), F)}, {"x": np.ones((1, 3), F)}, "wide")
    for call in calls:
        code, text = _error(call)
        assert code == "FAILED_PRECONDITION"
        assert text.startswith("Tensors with name 'wide_x:0' from different tasks have different")


def test_variable_length_padding_repeats_the_first_element(
    model_dir: pathlib.Path, serve: Any
) -> None:
    """tensorflow/serving #1279: hence the artifact's explicit `length`."""
    parameters = BatchingParameters(
        max_batch_size=8, batch_timeout_micros=500_000, pad_variable_length_inputs=True
    )
    with serve(model_dir, batching=parameters) as caller:
        calls = _pair(caller, {"x": np.array([[5, 1]], F)}, {"x": np.ones((1, 4), F)}, "wide")
        first, second = map(_answer, calls)
        assert first["same"].tolist() == [[5, 1, 5, 5]]
        assert second["sum"].tolist() == [4]


def test_a_wrong_dtype_fails_its_neighbours(batched: Any) -> None:
    wrong = {**_inputs(b"b"), "x": np.array([1], np.int32)}
    for call in _pair(batched, _inputs(b"a"), wrong):
        assert _error(call) == (
            "INTERNAL",
            "Tensor concat operation failed: INVALID_ARGUMENT: Cannot concatenate tensors that "
            "have different data types. Got float and int32.",
        )
    code, text = _error(batched.start("", wrong))
    assert code == "INVALID_ARGUMENT" and text.endswith("to be float but int32 is provided")


def test_a_failing_graph_fails_every_member(batched: Any) -> None:
    calls = _pair(batched, {"x": np.array([1], F)}, {"x": np.array([-1], F)}, "long_error")
    assert [_error(call)[0] for call in calls] == ["INVALID_ARGUMENT"] * 2


def test_another_output_filter_is_another_queue(batched: Any) -> None:
    calls = [
        batched.start("", _inputs(b"a"), outputs=("batch",)),
        batched.start("", _inputs(b"b"), outputs=("batch", "y")),
    ]
    assert [_answer(call)["batch"][0] for call in calls] == [b"a,a,a,a", b"b,b,b,b"]


def test_scalar_outputs_fail_after_the_run(batched: Any, refused: Any) -> None:
    assert refused(batched.predict, "scalar", {"x": np.ones(1, F)}) == (
        "FAILED_PRECONDITION",
        "Batched output tensor has 0 dimensions",
    )


def test_rows_that_do_not_fit(batched: Any, refused: Any) -> None:
    assert refused(batched.predict, "loops_done", {"x": np.ones(9, F)}) == (
        "INVALID_ARGUMENT",
        "Task size 9 is larger than maximum input batch size 8",
    )
    assert refused(batched.predict, "loops_done", {"x": np.ones((), F)}) == (
        "INVALID_ARGUMENT",
        "Batching Run() input tensors must have at least one dimension",
    )
    uneven = {"sid": np.array([b"a"], object), "x": np.ones(2, F)}
    assert refused(batched.predict, "", uneven) == (
        "INVALID_ARGUMENT",
        "Batching Run() input tensors must have equal 0th-dimension size",
    )


def test_a_call_with_zero_rows_waits_for_company(batched: Any) -> None:
    empty = batched.start("loops_done", {"x": np.zeros(0, F)})
    time.sleep(1.0)
    assert not empty.done()
    assert len(batched.predict("loops_done", {"x": np.ones(1, F)})["loops"]) == 1
    assert _answer(empty)["loops"].shape == (0,)


def test_an_expired_call_runs_if_a_mate_is_alive(batched: Any) -> None:
    calls = _pair(batched, _inputs(b"expired"), _inputs(b"alive"), timeout=0.15)
    assert _error(calls[0])[0] == "DEADLINE_EXCEEDED"
    assert _answer(calls[1])["batch"][0].startswith(b"expired,alive")


def test_an_expired_call_alone_does_not_run(batched: Any) -> None:
    before = batched.predict("", _inputs(b"a"))["total"][0]
    assert _error(batched.start("", _inputs(b"a"), timeout=0.1))[0] == "DEADLINE_EXCEEDED"
    time.sleep(0.6)
    assert batched.predict("", _inputs(b"a"))["total"][0] == before + 4


def test_queue_full_is_unavailable(model_dir: pathlib.Path, serve: Any, refused: Any) -> None:
    parameters = BatchingParameters(max_batch_size=1, max_enqueued_batches=1, num_batch_threads=1)
    with serve(model_dir, batching=parameters) as caller:
        call = {"seconds": np.array([1.0], F)}
        running = caller.start("slow", call)
        time.sleep(0.3)
        waiting = caller.start("slow", {"seconds": np.array([0.0], F)})
        time.sleep(0.2)
        assert refused(caller.predict, "slow", call) == (
            "UNAVAILABLE",
            "The batch scheduling queue to which this task was submitted is full",
        )
        assert caller.predict("loops_done", {"x": np.ones(1, F)})  # another queue
        assert _answer(running) and _answer(waiting)


def test_parameters_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "batching.txt"
    path.write_text(
        "# as TensorFlow Serving reads it\n"
        "max_batch_size { value: 8 }\nbatch_timeout_micros { value: 500 }\n"
        "max_enqueued_batches { value: 3 }\nnum_batch_threads { value: 2 }\n"
        "allowed_batch_sizes: 4\nallowed_batch_sizes : 8\npad_variable_length_inputs: true\n"
    )
    assert BatchingParameters.read(path) == BatchingParameters(8, 500, 3, 2, (4, 8), True)
    assert BatchingParameters.from_text("") == BatchingParameters()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_batch: 3", "Not a batching parameters file"),
        ("max_batch_size { value: 8 } allowed_batch_sizes: 4", "must match `max_batch_size`"),
        (
            "max_batch_size { value: 4 } allowed_batch_sizes: 8 allowed_batch_sizes: 4",
            "monotonically increasing",
        ),
        ("max_batch_size { value: 0 }", "must be at least 1"),
    ],
)
def test_bad_parameters(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        BatchingParameters.from_text(text)


def test_missing_parameters_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read"):
        BatchingParameters.read(tmp_path / "none.txt")

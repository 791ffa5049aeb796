"""Versions come and go while calls are under way; warmup comes first."""

from __future__ import annotations

import pathlib
import shutil
import threading
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import get_model_status_pb2

from tfkv.errors import ServerError
from tfkv.serving.server import Server

STATE = get_model_status_pb2.ModelVersionStatus
POLL = 0.05
INPUTS = {"sid": np.array([b"a"], object), "x": np.array([1.0], np.float32)}


def _states(caller: Any) -> dict[int, int]:
    return {entry.version: entry.state for entry in caller.status()}


def _add(version: pathlib.Path, own_dir: pathlib.Path, number: int) -> None:
    """A version directory appears complete, by rename."""
    staging = own_dir / f"tmp-{number}"
    shutil.copytree(version, staging)
    staging.rename(own_dir / str(number))


def test_swap_under_load_loses_no_call(
    own_dir: pathlib.Path, other_version: pathlib.Path, serve: Any, refused: Any, until: Any
) -> None:
    """TFS version swap: the new version starts with a state of its own."""
    with serve(own_dir, poll_seconds=POLL) as caller:
        caller.predict("", INPUTS)
        seen: list[int] = []
        failures: list[grpc.RpcError] = []
        stop = threading.Event()

        def hammer() -> None:
            while not stop.is_set():
                try:
                    seen.append(int(caller.predict("", INPUTS)["version"][0]))
                except grpc.RpcError as error:
                    failures.append(error)

        threads = [threading.Thread(target=hammer) for _ in range(4)]
        for thread in threads:
            thread.start()
        long_call = caller.start("slow", {"seconds": np.array([3.0], np.float32)})
        _add(other_version, own_dir, 2)
        until(lambda: 2 in seen)
        assert _states(caller) == {2: STATE.AVAILABLE, 1: STATE.UNLOADING}
        assert refused(caller.predict, "", INPUTS, version=1) == (
            "NOT_FOUND",
            "Servable not found for request: Specific(m, 1)",
        )
        assert tf.make_ndarray(long_call.result().outputs["version"]) == [1]  # it was drained
        until(lambda: _states(caller) == {2: STATE.AVAILABLE, 1: STATE.END})
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert seen[0] == 1 and seen[-1] == 2


def test_a_broken_version_is_reported_once_and_the_old_one_serves(
    own_dir: pathlib.Path, other_version: pathlib.Path, serve: Any, until: Any
) -> None:
    loads: list[str] = []
    with serve(
        own_dir, poll_seconds=POLL, progress=lambda stage, done, total: loads.append(stage)
    ) as caller:
        assert loads == ["load", "load"]
        (own_dir / "2").mkdir()
        until(lambda: _states(caller).get(2) == STATE.END)
        entry = next(e for e in caller.status() if e.version == 2)
        assert entry.status.error_code != 0 and "SavedModel" in entry.status.error_message
        assert caller.predict("", INPUTS)["version"] == [1]
        threading.Event().wait(5 * POLL)
        assert loads == ["load"] * 3  # not tried again
        _add(other_version, own_dir, 3)
        until(lambda: _states(caller).get(3) == STATE.AVAILABLE)
        assert caller.predict("", INPUTS)["version"] == [2]


def test_rollback_and_empty_directory(
    own_dir: pathlib.Path, other_version: pathlib.Path, serve: Any, refused: Any, until: Any
) -> None:
    _add(other_version, own_dir, 2)
    with serve(own_dir, poll_seconds=POLL) as caller:
        assert caller.predict("", INPUTS)["version"] == [2]
        (own_dir / "2").rename(own_dir / "gone")
        until(lambda: _states(caller) == {1: STATE.AVAILABLE, 2: STATE.END})
        assert caller.predict("", INPUTS)["total"] == [1]  # fresh state
        (own_dir / "1").rename(own_dir / "gone too")
        until(lambda: _states(caller)[1] == STATE.END)
        assert refused(caller.predict, "", INPUTS) == (
            "NOT_FOUND",
            "Servable not found for request: Latest(m)",
        )


def test_one_version_directory_can_be_served(model_dir: pathlib.Path, serve: Any) -> None:
    with serve(model_dir / "1") as caller:
        assert _states(caller) == {1: STATE.AVAILABLE}


def test_start_without_a_version(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ServerError, match=r"No versions of servable m found under base path"):
        Server(tmp_path, "m", port=0, rest_port=0).start()


def test_warmup_runs_in_order_before_the_version_is_available(
    own_dir: pathlib.Path, serve: Any, write_warmup: Any, caller: Any
) -> None:
    """Warmup changes state, as on the real server: the artifact must undo it."""
    requests = [
        caller.request("", {**INPUTS, "sid": np.array([name], object)}, name="other")
        for name in (b"w1", b"w2", b"w1")
    ]
    write_warmup(own_dir / "1", requests)
    steps: list[tuple[int, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "warmup":
            steps.append((done, total))

    with serve(own_dir, progress=progress) as own:
        assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
        answer = own.predict("", {**INPUTS, "sid": np.array([b"w1"], object)})
        assert answer["before"] == [3] and answer["total"] == [4]
        page = own.http("/monitoring/prometheus/metrics")[1]
        assert ':tensorflow:serving:request_count{model_name="m",status="OK"} 1\n' in page


def test_a_failing_warmup_keeps_the_version_loading(
    own_dir: pathlib.Path,
    other_version: pathlib.Path,
    serve: Any,
    write_warmup: Any,
    caller: Any,
    until: Any,
) -> None:
    with serve(own_dir, poll_seconds=POLL) as own:
        staged = own_dir / "staged"
        shutil.copytree(other_version, staged)
        write_warmup(staged, [caller.request("nosig", INPUTS)])
        staged.rename(own_dir / "2")
        until(lambda: any(e.status.error_code for e in own.status()))
        entry = next(e for e in own.status() if e.version == 2)
        assert entry.state == STATE.LOADING
        assert entry.status.error_message == 'Serving signature key "nosig" not found.'
        assert own.predict("", INPUTS)["version"] == [1]


def test_the_first_version_must_warm_up(
    own_dir: pathlib.Path, write_warmup: Any, caller: Any
) -> None:
    write_warmup(own_dir / "1", [caller.request("nosig", INPUTS)])
    with pytest.raises(ServerError, match="FAILED_PRECONDITION.*nosig"):
        Server(own_dir, "m", port=0, rest_port=0).start()


@pytest.mark.parametrize("damage", ["truncated", "too many"])
def test_damaged_warmup_files(
    own_dir: pathlib.Path, write_warmup: Any, caller: Any, damage: str
) -> None:
    request = caller.request("loops_done", {"x": np.array([1.0], np.float32)})
    write_warmup(own_dir / "1", [request] * (1001 if damage == "too many" else 1))
    path = own_dir / "1/assets.extra/tf_serving_warmup_requests"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-3])
    wanted = "exceeds the maximum" if damage == "too many" else "DATA_LOSS"
    with pytest.raises(ServerError, match=wanted):
        Server(own_dir, "m", port=0, rest_port=0).start()

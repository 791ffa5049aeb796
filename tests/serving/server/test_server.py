"""Start, stop, signals: calls under way are answered before the server goes."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf

from tfkv.serving.server import Server

PROGRAM = textwrap.dedent(
    """
    import sys
    from tfkv.serving.server import Server, run

    def ready(server):
        print("READY", server.port, server.rest_port, flush=True)

    run(Server(sys.argv[1], "m", port=0, rest_port=0), grace=20, on_ready=ready)
    print("DRAINED", flush=True)
    """
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_drain_calls_of_both_faces(
    model_dir: pathlib.Path, number: signal.Signals, caller: Any
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model_dir)], stdout=subprocess.PIPE, text=True
    )
    try:
        while not (line := process.stdout.readline()).startswith("READY"):
            assert process.poll() is None, "the server ended before it was ready"
        port, rest_port = map(int, line.split()[1:])
        other = type(caller)(f"127.0.0.1:{port}", rest_port)
        call = other.start("slow", {"seconds": np.array([1.5], np.float32)})
        rest: list[Any] = []
        body = {"signature_name": "slow", "instances": [1.5]}
        thread = threading.Thread(
            target=lambda: rest.append(other.http("/v1/models/m:predict", body))
        )
        thread.start()
        time.sleep(0.5)
        process.send_signal(number)
        time.sleep(0.3)
        late = other.start("slow", {"seconds": np.array([0.0], np.float32)}, timeout=5)
        assert late.exception().code() == grpc.StatusCode.UNAVAILABLE
        assert tf.make_ndarray(call.result().outputs["version"]) == [1]
        thread.join()
        assert rest == [(200, {"predictions": [1]})]
        assert process.wait(20) == 0
        assert "DRAINED" in process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_signal_while_loading_ends_the_process(model_dir: pathlib.Path) -> None:
    program = PROGRAM.replace("port=0, rest_port=0", "port=0, rest_port=0, progress=busy")
    program = program.replace(
        "run(Server", "def busy(*_):\n    print('LOADING', flush=True); time.sleep(9)\n\nrun(Server"
    )
    with subprocess.Popen(
        [sys.executable, "-c", "import time\n" + program, str(model_dir)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "LOADING\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM


def test_wait_and_stop_twice(model_dir: pathlib.Path) -> None:
    server = Server(model_dir, "m", port=0, rest_port=0, poll_seconds=0).start()
    assert not server.wait(0.05)
    server.stop()
    assert server.wait(0.05)
    server.stop()


def test_without_rest(model_dir: pathlib.Path) -> None:
    with Server(model_dir, "m", port=0, rest_port=None, poll_seconds=0) as server:
        assert server.rest_port is None


def test_grace_is_a_limit(model_dir: pathlib.Path, caller: Any) -> None:
    server = Server(model_dir, "m", port=0, rest_port=0, poll_seconds=0).start()
    other = type(caller)(server.target)
    call = other.start("slow", {"seconds": np.array([2.0], np.float32)})
    time.sleep(0.3)
    server.stop(grace=0.3)
    assert call.exception() is not None
    time.sleep(2)  # its thread still runs; nothing may be closed under it


def test_it_listens_on_loopback(caller: Any) -> None:
    assert caller.server.target == f"127.0.0.1:{caller.server.port}"
    with urllib.request.urlopen(f"{caller.rest}/v1/models/m") as answer:
        assert json.load(answer)["model_version_status"]


def test_eight_callers_at_once(caller: Any) -> None:
    answers: list[Any] = []

    def call(number: int) -> None:
        sid = f"client{number}".encode()
        for value in range(20):
            inputs = {"sid": np.array([sid], object), "x": np.array([value], np.float32)}
            answer = caller.predict("", inputs)
            answers.append((answer["y"][0], 2.0 * value, answer["batch"][0], sid))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 160
    assert all(y == wanted and batch == sid for y, wanted, batch, sid in answers)

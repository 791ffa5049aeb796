"""The server as a process: when it is ready, and how it ends. Scripts stand in for it."""

from __future__ import annotations

import os
import sys

import pytest

from tfkv.errors import ServerError
from tfkv.serving import ServerProcess, server_process

READY = "print('Serving tfkv: gRPC 127.0.0.1:4321, REST 127.0.0.1:4322', flush=True)"
WAIT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"


@pytest.fixture
def use(monkeypatch):
    """Runs a script in place of the server; gives the ports that it was asked for."""
    asked = []

    def use(code):
        def command(directory, port, rest):
            asked.append((port, rest))
            return [sys.executable, "-c", code]

        monkeypatch.setattr(server_process, "_command", command)
        return asked

    return use


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_gives_the_target_and_ends_the_server(use, tmp_path):
    use(f"{WAIT.format(code=0)}\nprint('hello')\n{READY}\ntime.sleep(60)")
    with ServerProcess(tmp_path) as server:
        assert server.target == "127.0.0.1:4321"
        assert server.said.endswith("REST 127.0.0.1:4322")
        pid = server.pid
        assert running(pid)
    assert not running(pid)


def test_the_port_stays_when_it_is_started_again(use, tmp_path):
    asked = use(f"{WAIT.format(code=0)}\n{READY}\ntime.sleep(60)")
    server = ServerProcess(tmp_path, rest=True).start()
    server.kill()
    server.start()
    server.stop()
    assert asked == [("0", True), ("4321", True)]


def test_the_log_is_kept_and_the_environment_given(use, tmp_path):
    use(f"import os, sys; print(os.environ['GIVEN'], file=sys.stderr)\n{WAIT.format(code=0)}\n"
        f"{READY}\ntime.sleep(60)")  # fmt: skip
    with ServerProcess(tmp_path, {"GIVEN": "its own"}) as server:
        assert server.log() == "its own\n"
        server.kill()
        server.start()
    assert server.log() == "its own\n" * 2, "also of what has ended"


def test_another_exit_code_is_an_error(use, tmp_path):
    use(f"{WAIT.format(code=3)}\n{READY}\ntime.sleep(60)")
    with pytest.raises(ServerError, match="exit code 3 after SIGTERM"), ServerProcess(tmp_path):
        pass


def test_a_server_that_did_not_start_is_an_error_with_its_last_words(use, tmp_path):
    use("import sys; print('no such artifact', file=sys.stderr); raise SystemExit(4)")
    with (
        pytest.raises(ServerError, match="(?s)exit code 4 before.*no such artifact"),
        ServerProcess(tmp_path),
    ):
        pytest.fail("must not get here")


def test_a_server_that_stays_is_killed(use, monkeypatch, tmp_path):
    monkeypatch.setattr(server_process, "_SHUTDOWN_SECONDS", 0.2)
    stays = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    use(f"{stays}\n{READY}\ntime.sleep(60)")
    with pytest.raises(ServerError, match="killed"), ServerProcess(tmp_path) as server:
        pid = server.pid
    assert not running(pid)


def test_an_error_in_the_block_ends_the_server_and_is_the_one_that_is_raised(use, tmp_path):
    use(f"{READY}\nimport time; time.sleep(60)")
    with pytest.raises(KeyError), ServerProcess(tmp_path) as server:
        pid = server.pid
        raise KeyError
    assert not running(pid)


def test_a_server_that_was_killed_has_no_pid_and_stops_quietly(use, tmp_path):
    use(f"{READY}\nimport time; time.sleep(60)")
    with ServerProcess(tmp_path) as server:
        server.kill()
        with pytest.raises(ServerError, match="does not run"):
            assert server.pid

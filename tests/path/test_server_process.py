"""The server as a process: seconds to the first answer, bytes, traces, exit."""

from __future__ import annotations

import pathlib

from path_support import ServerProcess

from tfkv.manifest import latest_version
from tfkv.serving import Client


def test_resident_size_and_seconds_to_ready(
    server: ServerProcess, client: Client, artifact: pathlib.Path
):
    """Weights are held once, the pool is the pool; 700 MB for TensorFlow and the compiler."""
    weights = (latest_version(artifact) / "variables/variables.data-00000-of-00001").stat().st_size
    pool = client.stats()["bytes_pool"]
    memory, now = server.memory_when_ready, server.memory()["VmRSS"]
    resident, bound = memory["VmRSS"], 1.3 * weights + pool + 700e6
    print(
        f"\nready in {server.seconds_to_ready:.0f} s; resident {resident / 1e6:.0f} MB "
        f"(anonymous {memory['RssAnon'] / 1e6:.0f}), peak {memory['VmHWM'] / 1e6:.0f}, "
        f"now {now / 1e6:.0f}; "
        f"bound {bound / 1e6:.0f} = 1.3 * {weights / 1e6:.0f} + {pool / 1e6:.0f} + 700"
    )
    assert resident <= bound
    assert now <= bound + 200e6, "calls must not pile up memory"


def test_the_pool_is_not_on_disk(client: Client, artifact: pathlib.Path):
    """keras #23553: size after export."""
    version = latest_version(artifact)
    size = sum(path.stat().st_size for path in version.rglob("*") if path.is_file())
    parameters = 134_515_008
    assert 4 * parameters < size < 4 * parameters * 1.02

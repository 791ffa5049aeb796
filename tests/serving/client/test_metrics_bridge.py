"""The Prometheus page: every counter, conventional names, an artifact that comes and goes."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tfkv.errors import ConfigError
from tfkv.manifest import STATS
from tfkv.serving import Client, Retry
from tfkv.serving.metrics_bridge import MetricsBridge

#: A different number for each, so that a mix-up shows.
VALUES = {name: 1000 + index for index, name in enumerate(STATS)}


@pytest.fixture
def bridge(server: Any) -> Iterator[MetricsBridge]:
    server._stats = lambda *_: {**VALUES, "pages_used": 5000, "bytes_pool": 9000}
    with Client(server.target, timeout=2.0, retry=Retry(attempts=1)) as client:
        yield MetricsBridge(client)


def samples(text: str) -> dict[str, float]:
    """``name{label="value"}`` to number."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def test_page(bridge: MetricsBridge) -> None:
    page = samples(bridge.render())
    assert page["tfkv_up"] == 1
    assert page['tfkv_info{epoch="1",model="tfkv"}'] == 1
    assert page["tfkv_sessions"] == VALUES["slots_used"]
    assert page["tfkv_slots"] == VALUES["slots"]
    for kind in ("prefilled", "decoded", "scored", "reused"):
        assert page[f'tfkv_tokens_total{{kind="{kind}"}}'] == VALUES[f"tokens_{kind}"]
    for reason in ("invalid", "unknown", "conflict", "full", "busy", "other"):
        name = f'tfkv_rows_rejected_total{{reason="{reason}"}}'
        assert page[name] == VALUES[f"rejected_{reason}"]
    for name in ("rows", "prefix_lookups", "prefix_hits", "evictions", "sessions_reaped"):
        assert page[f"tfkv_{name}_total"] == VALUES[name]
    assert page["tfkv_uptime_seconds"] == VALUES["uptime_ms"] / 1000
    assert page["tfkv_integrity_violations"] == VALUES["integrity"]


def test_values_of_a_label_add_up(bridge: MetricsBridge) -> None:
    page = samples(bridge.render())
    assert page['tfkv_pages{state="shared"}'] == VALUES["pages_shared"]
    assert page['tfkv_pages{state="used"}'] == 5000 - VALUES["pages_shared"]
    whole = sum(value for name, value in page.items() if name.startswith("tfkv_pages{"))
    assert whole == 5000 + VALUES["pages_cached"] + VALUES["pages_free"]
    assert page['tfkv_cache_bytes{state="used"}'] == VALUES["bytes_used"]
    assert page['tfkv_cache_bytes{state="free"}'] == 9000 - VALUES["bytes_used"]


def test_batch_sizes_are_a_histogram(bridge: MetricsBridge) -> None:
    page = samples(bridge.render())
    total = 0
    for bound, most in (("1.0", 1), ("2.0", 2), ("4.0", 4), ("8.0", 8), ("+Inf", "more")):
        total += VALUES[f"batches_to_{most}"]
        bounds = [name for name in page if name.startswith("tfkv_batch_rows_bucket")]
        (name,) = [name for name in bounds if f'le="{bound}"' in name or f'le="{most}"' in name]
        assert page[name] == total
    assert page["tfkv_batch_rows_count"] == total
    assert page["tfkv_batch_rows_sum"] == VALUES["rows"]


def test_every_stat_is_on_the_page_with_a_type(bridge: MetricsBridge) -> None:
    """A new line of `STATS` needs a family, or it shows up as untyped."""
    families = list(text_string_to_metric_families(bridge.render()))
    assert {family.type for family in families} <= {"counter", "gauge", "histogram", "info"}
    shown = {sample.value for family in families for sample in family.samples}
    gone = {"pages", "pages_used", "bytes_pool", "uptime_ms"}
    gone |= {name for name in VALUES if name.startswith("batches_to_")}  # added up
    assert {value for name, value in VALUES.items() if name not in gone} <= shown
    for family in families:
        assert family.name.startswith("tfkv")
        assert family.documentation
    for line in bridge.render().splitlines():
        assert not line.startswith("# TYPE") or (" counter" in line) == ("_total " in line)


def test_help_says_what_the_stats_say(bridge: MetricsBridge) -> None:
    text = bridge.render()
    assert f"# HELP tfkv_prefix_hits_total {STATS['prefix_hits']}\n" in text
    assert f"decoded: {STATS['tokens_decoded']}" in text


def test_artifact_that_comes_and_goes(server: Any, bridge: MetricsBridge) -> None:
    assert samples(bridge.render())["tfkv_up"] == 1
    server.faults.append("unavailable")
    assert samples(bridge.render()) == {"tfkv_up": 0}
    assert not bridge.up
    server.forget()
    assert samples(bridge.render())['tfkv_info{epoch="2",model="tfkv"}'] == 1
    assert bridge.up


def test_other_model_is_down(server: Any) -> None:
    with Client(server.target, "absent", timeout=2.0) as client:
        assert samples(MetricsBridge(client).render()) == {"tfkv_up": 0}


def test_older_and_newer_artifacts(bridge: MetricsBridge, monkeypatch: Any) -> None:
    answer = {
        "pages_used": np.array([3]),
        "tokens_decoded": np.array([4]),
        "epoch": np.array([5]),
        "moons": np.array([2]),
    }
    monkeypatch.setattr(bridge._client, "predict", lambda *_: answer)
    page = samples(bridge.render())
    assert page == {
        "tfkv_up": 1,
        'tfkv_info{epoch="5",model="tfkv"}': 1,
        'tfkv_tokens_total{kind="decoded"}': 4,
        "tfkv_moons": 2,
    }


def test_page_over_http(bridge: MetricsBridge) -> None:
    stop, addresses = threading.Event(), []

    def ask(address: str) -> None:
        addresses.append(address)
        with urllib.request.urlopen(address, timeout=5) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")
            addresses.append(reply.read().decode())
        stop.set()

    bridge.serve(0, on_ready=ask, stop=stop)
    assert samples(addresses[1])["tfkv_up"] == 1
    with pytest.raises(OSError):
        urllib.request.urlopen(addresses[0], timeout=5)


def test_port_in_use(bridge: MetricsBridge) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Cannot listen on 127.0.0.1:{port}"):
            bridge.serve(port, stop=threading.Event())

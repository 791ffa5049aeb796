"""The counters of an artifact as a Prometheus page."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import prometheus_client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from tfkv.errors import ConfigError, TfkvError
from tfkv.manifest import STATS

if TYPE_CHECKING:
    from tfkv.serving.client import Client

PREFIX = "tfkv_"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Family:
    """Metrics of one name.

    Args:
        name: Without prefix, and without the ``_total`` of a counter.
        counter: Whether it only grows, until the next load.
        stats: Label value to name in `STATS`; one of no label where ``label`` is empty.
        label: Name of the label.
        per_unit: Of the stat's unit in the metric's.
        text: What it means; by default what `STATS` says.
    """

    name: str
    counter: bool
    stats: Mapping[str, str]
    label: str = ""
    per_unit: float = 1.0
    text: str = ""

    @property
    def help(self) -> str:
        if self.text:
            return self.text
        if not self.label:
            (stat,) = self.stats.values()
            return STATS[stat]
        return "; ".join(f"{value}: {STATS[stat]}" for value, stat in self.stats.items())

    def metric(self, values: Mapping[str, int]) -> Metric | None:
        """The family with what there is of its values; ``None`` where there is nothing."""
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        metric = kind(PREFIX + self.name, self.help, labels=[self.label] if self.label else [])
        for value, stat in self.stats.items():
            if stat in values:
                labels = [value] if self.label else []
                metric.add_metric(labels, values[stat] / self.per_unit)
        return metric if metric.samples else None


@dataclasses.dataclass(frozen=True)
class _Histogram:
    """A distribution of one name.

    Args:
        name: Without prefix.
        stats: Upper bound of each bucket to name in `STATS`, ascending.
        total: Name in `STATS` of the sum of all values.
        text: What it means.
    """

    name: str
    stats: Mapping[str, str]
    total: str
    text: str

    def metric(self, values: Mapping[str, int]) -> Metric | None:
        """The histogram, or ``None`` where a part of it is missing."""
        if not {*self.stats.values(), self.total} <= set(values):
            return None
        counts = itertools.accumulate(values[stat] for stat in self.stats.values())
        buckets = [(bound, float(count)) for bound, count in zip(self.stats, counts, strict=True)]
        metric = HistogramMetricFamily(PREFIX + self.name, self.text)
        metric.add_metric([], buckets, values[self.total])
        return metric


def _one(name: str, stat: str, counter: bool = True, **further: str | float) -> _Family:
    return _Family(name, counter, {"": stat}, **further)  # type: ignore[arg-type]


#: Names that are not in `STATS` are worked out in `_split`, so that a label's values add up.
_FAMILIES = (
    _one("slots", "slots", counter=False),
    _one("sessions", "slots_used", counter=False),
    _Family(
        "pages",
        counter=False,
        label="state",
        stats={
            "used": "pages_private",
            "shared": "pages_shared",
            "cached": "pages_cached",
            "free": "pages_free",
        },
        text="pages of the pool; used: one session holds them; shared: more than one does; "
        f"cached: {STATS['pages_cached']}; free: {STATS['pages_free']}",
    ),
    _Family(
        "cache_bytes",
        counter=False,
        label="state",
        stats={"used": "bytes_used", "free": "bytes_unused"},
        text=f"bytes of the pool; used: {STATS['bytes_used']}; free: the rest",
    ),
    _one("batches", "calls"),
    _Histogram(
        "batch_rows",
        stats={
            "1": "batches_to_1",
            "2": "batches_to_2",
            "4": "batches_to_4",
            "8": "batches_to_8",
            "+Inf": "batches_to_more",
        },
        total="rows",
        text="rows of a batch, padding not counted",
    ),
    _one("rows", "rows"),
    _one("rows_padded", "rows_padded"),
    _one("rows_replayed", "replays"),
    _Family(
        "rows_rejected",
        counter=True,
        label="reason",
        stats={
            name.removeprefix("rejected_"): name for name in STATS if name.startswith("rejected_")
        },
    ),
    _Family(
        "tokens",
        counter=True,
        label="kind",
        stats={
            "prefilled": "tokens_prefilled",
            "decoded": "tokens_decoded",
            "scored": "tokens_scored",
            "reused": "tokens_reused",
            "guessed": "tokens_guessed",
            "accepted": "tokens_accepted",
        },
    ),
    _one("prefix_lookups", "prefix_lookups"),
    _one("prefix_hits", "prefix_hits"),
    _one("evictions", "evictions"),
    _one("sessions_opened", "sessions_opened"),
    _one("sessions_closed", "sessions_closed"),
    _one("sessions_reaped", "sessions_reaped"),
    _one("integrity_violations", "integrity", counter=False),
    _one(
        "uptime_seconds",
        "uptime_ms",
        counter=False,
        per_unit=1000.0,
        text="seconds since the artifact was loaded",
    ),
)
#: Shown in other words: the sums of what has labels, and the label of ``tfkv_info``.
_ELSEWHERE = {"pages", "pages_used", "bytes_pool", "epoch"}


class MetricsBridge(Collector):
    """Asks an artifact for its `stats` whenever Prometheus asks for a page.

    TensorFlow Serving's own page has requests and latencies; this one has what only the graph
    knows. A server out of reach is ``tfkv_up 0`` and nothing else. Counters begin at 0 with
    each load of the artifact, which Prometheus takes for the reset that it is; the label
    ``epoch`` of ``tfkv_info`` tells the loads apart.

    Args:
        client: Makes the calls; its timeout and retries should end before the scrape does.

    Example:
        >>> with Client("localhost:8500", timeout=5, retry=Retry(attempts=1)) as client:
        ...     MetricsBridge(client).serve(9464)
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._up: bool | None = None
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    @property
    def up(self) -> bool:
        """Whether the last scrape reached the artifact."""
        return bool(self._up)

    def describe(self) -> Iterator[Metric]:
        """Nothing: which metrics there are depends on the artifact."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """What the artifact says now."""
        values: dict[str, int] = {}
        try:
            values = self._read()
            self._note(True)
        except TfkvError as error:
            self._note(False, str(error))
        yield GaugeMetricFamily(
            f"{PREFIX}up", "1 = the artifact answers, 0 = it does not", value=int(self.up)
        )
        if not values:
            return
        info = {"model": self._client.model, "epoch": str(values.get("epoch", ""))}
        yield InfoMetricFamily(PREFIX.rstrip("_"), "which load of which model", value=info)
        known = {stat for family in _FAMILIES for stat in family.stats.values()} | _ELSEWHERE
        for family in _FAMILIES:
            if metric := family.metric(values):
                yield metric
        for stat in sorted(set(values) - known):
            yield UnknownMetricFamily(PREFIX + stat, STATS.get(stat, stat), value=values[stat])

    def render(self) -> str:
        """The page, in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry).decode("utf-8")

    def serve(
        self,
        port: int,
        host: str = "127.0.0.1",
        *,
        on_ready: Callable[[str], None] = lambda address: None,
        stop: threading.Event | None = None,
    ) -> None:
        """Serves the page until ``stop`` is set, or for good.

        Args:
            port: Port to listen on, 0 = a free one.
            host: Address to listen on.
            on_ready: Called with the page's address when it can be asked for.
            stop: Ends it.

        Raises:
            ConfigError: Nothing can listen there.
        """
        try:
            server, thread = prometheus_client.start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"Cannot listen on {host}:{port} ({error}). Choose another."
            ) from error
        try:
            on_ready(f"http://{host}:{server.server_port}/metrics")
            (stop or threading.Event()).wait()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _read(self) -> dict[str, int]:
        # By name and as they come: the artifact may be older or newer than this package.
        answer = self._client.predict("stats", {"session_id": ["metrics"]})
        return _split({name: int(value.ravel()[0]) for name, value in answer.items() if value.size})

    def _note(self, up: bool, why: str = "") -> None:
        """Logs a change, not every scrape."""
        if up != self._up and (not up or self._up is not None):
            _log.log(logging.INFO if up else logging.WARNING, "up again" if up else why)
        self._up = up


def _split(values: dict[str, int]) -> dict[str, int]:
    """The values, and those that make labels add up to the whole."""
    if {"pages_used", "pages_shared"} <= set(values):
        values["pages_private"] = values["pages_used"] - values["pages_shared"]
    if {"bytes_pool", "bytes_used"} <= set(values):
        values["bytes_unused"] = values["bytes_pool"] - values["bytes_used"]
    return values

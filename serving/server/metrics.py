"""The Prometheus page, with the names TensorFlow Serving gives its metrics."""

from __future__ import annotations

import bisect
import threading

#: Upper bounds in microseconds: scale 10, growth 1.8, about 20 minutes.
BUCKETS = tuple(10 * 1.8**power for power in range(33))

_REQUEST_COUNT = ":tensorflow:serving:request_count"
_HISTOGRAMS = {
    ":tensorflow:serving:request_latency": ("model_name", "API", "entrypoint"),
    ":tensorflow:serving:runtime_latency": ("model_name", "API", "runtime"),
}
_REQUEST_LATENCY, _RUNTIME_LATENCY = _HISTOGRAMS

_Labels = tuple[tuple[str, str], ...]


class _Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS, value)] += 1
        self.sum += value


class Metrics:
    """Counters and histograms of the calls, in memory, as text for Prometheus.

    Names start with a colon and counters have no ``_total`` suffix, as on the real server;
    the prometheus_client library appends one, so the page is written here.

    Example:
        >>> metrics = Metrics()
        >>> metrics.count_request("tfkv", "OK")
        >>> print(metrics.exposition())
        # TYPE :tensorflow:serving:request_count counter
        :tensorflow:serving:request_count{model_name="tfkv",status="OK"} 1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[_Labels, int] = {}
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {n: {} for n in _HISTOGRAMS}

    def count_request(self, model: str, status: str) -> None:
        """Counts a Predict call that ended with this status, ``OK`` or an error's name."""
        labels = (("model_name", model), ("status", status))
        with self._lock:
            self._requests[labels] = self._requests.get(labels, 0) + 1

    def request_latency(self, model: str, entrypoint: str, microseconds: float) -> None:
        """Records a successful call; the entry point is ``GRPC`` or ``REST``."""
        self._record(_REQUEST_LATENCY, (model, "Predict", entrypoint), microseconds)

    def runtime_latency(self, model: str, microseconds: float) -> None:
        """Records one session run."""
        self._record(_RUNTIME_LATENCY, (model, "Predict", "TF1"), microseconds)

    def exposition(self) -> str:
        """The page in Prometheus' text format."""
        lines = []
        with self._lock:
            if self._requests:
                lines.append(f"# TYPE {_REQUEST_COUNT} counter")
            for labels, count in sorted(self._requests.items()):
                lines.append(f"{_REQUEST_COUNT}{{{_format(labels)}}} {count}")
            for name, cells in self._histograms.items():
                if cells:
                    lines.append(f"# TYPE {name} histogram")
                for labels, cell in sorted(cells.items(), key=lambda item: item[0]):
                    lines += _histogram_lines(name, _format(labels), cell)
        return "\n".join(lines) + "\n" if lines else ""

    def _record(self, name: str, values: tuple[str, ...], microseconds: float) -> None:
        labels = tuple(zip(_HISTOGRAMS[name], values, strict=True))
        with self._lock:
            self._histograms[name].setdefault(labels, _Histogram()).add(microseconds)


def _histogram_lines(name: str, labels: str, cell: _Histogram) -> list[str]:
    lines, total = [], 0
    for bound, count in zip((*BUCKETS, None), cell.counts, strict=True):
        total += count
        text = "+Inf" if bound is None else f"{bound:g}"
        lines.append(f'{name}_bucket{{{labels},le="{text}"}} {total}')
    lines.append(f"{name}_sum{{{labels}}} {cell.sum:.10g}")
    lines.append(f"{name}_count{{{labels}}} {total}")
    return lines


def _format(labels: _Labels) -> str:
    return ",".join(f'{key}="{_escape(value)}"' for key, value in labels)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

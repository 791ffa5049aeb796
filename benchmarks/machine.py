"""What this machine can do at most, measured: memory read and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable

import tensorflow as tf

_TRIES = 7


def read_bandwidth() -> float:
    """Bytes a second that all cores together read from memory, best of several tries."""
    data = tf.random.uniform([1 << 27])  # 512 MB: no cache holds it

    @tf.function
    def reduce() -> tf.Tensor:
        return tf.reduce_max(data)

    return int(data.shape[0]) * data.dtype.size / _best_seconds(lambda: reduce().numpy())


def gemm_rate() -> float:
    """FLOP a second of a float32 matrix product, best of several tries."""
    size = 2048
    left, right = tf.random.uniform([size, size]), tf.random.uniform([size, size])

    @tf.function
    def product() -> tf.Tensor:
        return tf.matmul(left, right)[0, 0]

    return 2 * size**3 / _best_seconds(lambda: product().numpy())


def limits() -> dict[str, float]:
    """Both, in the units of a report."""
    return {
        "read_gb_per_s": read_bandwidth() / 1e9,
        "gemm_gflop_per_s": gemm_rate() / 1e9,
    }


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)

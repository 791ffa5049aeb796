"""``--enable_batching``: TensorFlow Serving's batching session, its faults included."""

from __future__ import annotations

import math
import threading
import time

import grpc
import numpy as np

from tfkv.serving.server.batch_queue import BatchQueue
from tfkv.serving.server.batch_task import BatchTask
from tfkv.serving.server.batching_parameters import BatchingParameters
from tfkv.serving.server.call_error import (
    CallError,
    failed_precondition,
    internal,
    invalid_argument,
)
from tfkv.serving.server.session_runner import SessionRunner
from tfkv.serving.server.tensors import dtype_name, dtype_number


class BatchingSession:
    """Merges concurrent calls along axis 0 into one session run.

    A test mode, so that what goes wrong on a server that was started with
    ``--enable_batching`` goes wrong here first: padding repeats the first row of the last
    call, one wrong call fails its batch mates, a call with zero rows hangs. Artifacts
    batch in the graph and don't need it.

    Args:
        runner: Session that runs the merged calls.
        parameters: How batches are formed.

    Call arguments of `run`:
        feeds, fetches, timeout_ms: As those of `SessionRunner.run`.

    Reference:
        tensorflow_serving/batching/batching_session.cc
    """

    def __init__(self, runner: SessionRunner, parameters: BatchingParameters) -> None:
        self._runner = runner
        self._parameters = parameters
        self._queues: dict[tuple[frozenset[str], frozenset[str]], BatchQueue] = {}
        self._lock = threading.Lock()

    def run(
        self, feeds: dict[str, np.ndarray], fetches: tuple[str, ...], timeout_ms: int = 0
    ) -> list[np.ndarray]:
        seconds = timeout_ms / 1000 if timeout_ms > 0 else math.inf
        task = BatchTask(feeds, fetches, _batch_size(feeds), time.monotonic() + seconds)
        self._queue(feeds, fetches).submit(task)
        task.done.wait()
        if task.error is not None:
            # A fresh error: one exception object must not be raised in many threads.
            raise CallError(task.error.code, task.error.message)
        return task.outputs

    def close(self) -> None:
        """Ends the queues' threads and closes the session."""
        for queue in self._queues.values():
            queue.close()
        self._runner.close()

    def _queue(self, feeds: dict[str, np.ndarray], fetches: tuple[str, ...]) -> BatchQueue:
        key = (frozenset(feeds), frozenset(fetches))
        with self._lock:
            if key not in self._queues:
                self._queues[key] = BatchQueue(self._parameters, self._process)
            return self._queues[key]

    def _process(self, batch: list[BatchTask]) -> None:
        try:
            now = time.monotonic()
            latest = max(task.deadline for task in batch)
            if latest <= now:
                raise CallError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "Run() timeout exceeded while waiting in batching queue",
                )
            timeout_ms = 0 if math.isinf(latest) else max(1, int((latest - now) * 1000))
            rows = sum(task.rows for task in batch)
            padding = self._parameters.padded(rows) - rows
            merged = {name: self._merge(batch, name, padding) for name in sorted(batch[0].feeds)}
            fetches = tuple(sorted(batch[0].fetches))
            values = self._runner.run(merged, fetches, timeout_ms)
            _split(batch, dict(zip(fetches, values, strict=True)), rows + padding)
        except CallError as error:
            for task in batch:
                task.error = error

    def _merge(self, batch: list[BatchTask], name: str, padding: int) -> np.ndarray:
        values = [task.feeds[name] for task in batch]
        if self._parameters.pad_variable_length_inputs:
            values = _pad_to_widest(values)
        elif any(value.shape[1:] != values[0].shape[1:] for value in values):
            raise failed_precondition(
                f"Tensors with name '{name}' from different tasks have different shapes and "
                "padding is turned off. Set pad_variable_length_inputs to true, or ensure that "
                "all tensors with the same name have equal dimensions starting with the first "
                "dim."
            )
        for value in values:
            if value.dtype != values[0].dtype:
                first, other = (dtype_name(dtype_number(v.dtype)) for v in (values[0], value))
                raise internal(
                    "Tensor concat operation failed: INVALID_ARGUMENT: Cannot concatenate "
                    f"tensors that have different data types. Got {first} and {other}."
                )
        if padding:
            if not len(values[-1]):
                # The real server aborts here; an error keeps the test run alive.
                raise internal("Check failed: cannot pad with the first row of an empty call")
            values.append(np.repeat(values[-1][:1], padding, axis=0))
        return np.concatenate(values) if len(values) > 1 else values[0]


def _batch_size(feeds: dict[str, np.ndarray]) -> int:
    if not feeds:
        raise invalid_argument("Batching Run() must have at least one input tensor")
    sizes = set()
    for value in feeds.values():
        if not value.ndim:
            raise invalid_argument("Batching Run() input tensors must have at least one dimension")
        sizes.add(len(value))
    if len(sizes) > 1:
        raise invalid_argument("Batching Run() input tensors must have equal 0th-dimension size")
    return sizes.pop()


def _pad_to_widest(values: list[np.ndarray]) -> list[np.ndarray]:
    """Pads every axis but the first with the value's own first element."""
    if len({value.ndim for value in values}) > 1:
        raise invalid_argument("Only tensors with rank from 1 to 6 can be padded.")
    widest = np.max([value.shape for value in values], axis=0)
    padded = []
    for value in values:
        widths = [
            (0, 0),
            *((0, int(w - s)) for w, s in zip(widest[1:], value.shape[1:], strict=True)),
        ]
        if not any(after for _, after in widths):
            padded.append(value)
            continue
        if not value.size:
            raise invalid_argument("Got empty tensor in batch of non-empty tensors.")
        padded.append(np.pad(value, widths, constant_values=value.flat[0]))
    return padded


def _split(batch: list[BatchTask], outputs: dict[str, np.ndarray], rows: int) -> None:
    for value in outputs.values():
        if not value.ndim:
            raise failed_precondition("Batched output tensor has 0 dimensions")
        if len(value) != rows:
            raise failed_precondition(
                "Batched output tensor's 0th dimension does not equal the sum of the 0th "
                "dimension sizes of the input tensors"
            )
    start = 0
    for task in batch:
        task.outputs = [outputs[name][start : start + task.rows] for name in task.fetches]
        start += task.rows

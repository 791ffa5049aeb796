"""A queue that forms batches of calls, as TensorFlow's SharedBatchScheduler does."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import grpc

from tfkv.serving.server.batch_task import BatchTask
from tfkv.serving.server.batching_parameters import BatchingParameters
from tfkv.serving.server.call_error import CallError, internal, invalid_argument


class BatchQueue:
    """Tasks of one signature and output set, batched by threads of its own.

    The open batch runs when it is full or its timeout has passed. A batch without a row
    never becomes due: a call with zero rows waits until another call joins it, as on
    the real server.

    Args:
        parameters: Sizes, timeout, threads.
        process: Runs a batch and sets outputs or error of each task.
    """

    def __init__(
        self, parameters: BatchingParameters, process: Callable[[list[BatchTask]], None]
    ) -> None:
        self._parameters = parameters
        self._process = process
        self._changed = threading.Condition()
        self._closed_batches: deque[list[BatchTask]] = deque()
        self._open: list[BatchTask] = []
        self._open_since = 0.0
        self._stopped = False
        for number in range(parameters.threads):
            threading.Thread(target=self._work, name=f"batch-{number}", daemon=True).start()

    def submit(self, task: BatchTask) -> None:
        """Enqueues a task; wait for `task.done` afterwards.

        Raises:
            CallError: INVALID_ARGUMENT, more rows than a batch holds; UNAVAILABLE, full.
        """
        limit = self._parameters.max_batch_size
        if task.rows > limit:
            raise invalid_argument(
                f"Task size {task.rows} is larger than maximum input batch size {limit}"
            )
        with self._changed:
            if self._stopped:
                raise CallError(grpc.StatusCode.UNAVAILABLE, "The batch queue is closed")
            if _rows(self._open) + task.rows > limit:
                # The open batch counts as one of the enqueued batches.
                if len(self._closed_batches) + 1 >= self._parameters.max_enqueued_batches:
                    raise CallError(
                        grpc.StatusCode.UNAVAILABLE,
                        "The batch scheduling queue to which this task was submitted is full",
                    )
                self._closed_batches.append(self._open)
                self._open = []
            if not _rows(self._open):
                self._open_since = time.monotonic()
            self._open.append(task)
            self._changed.notify()

    def close(self) -> None:
        """Ends the threads once what is queued has run."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                batch = self._next_batch()
            if batch is None:
                return
            try:
                self._process(batch)
            except Exception as error:  # a caller must never wait for ever
                for task in batch:
                    task.error = internal(f"{type(error).__name__}: {error}")
            for task in batch:
                task.done.set()

    def _next_batch(self) -> list[BatchTask] | None:
        while True:
            if self._closed_batches:
                return self._closed_batches.popleft()
            wait = self._seconds_until_due()
            if wait is not None and wait <= 0:
                batch, self._open = self._open, []
                return batch
            if self._stopped and not self._open:
                return None
            self._changed.wait(wait)

    def _seconds_until_due(self) -> float | None:
        rows = _rows(self._open)
        if self._stopped and self._open:
            return 0
        if not rows:
            return None
        if rows >= self._parameters.max_batch_size:
            return 0
        due = self._open_since + self._parameters.batch_timeout_micros / 1e6
        return due - time.monotonic()


def _rows(batch: list[BatchTask]) -> int:
    return sum(task.rows for task in batch)

"""One call on its way through a batch queue."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from tfkv.serving.server.call_error import CallError


@dataclasses.dataclass(eq=False)
class BatchTask:
    """One call on its way through a queue.

    Args:
        feeds: Tensor name to value; every value has `rows` rows.
        fetches: Tensor names.
        rows: Size of axis 0.
        deadline: `time.monotonic` seconds, infinite without a timeout.
    """

    feeds: dict[str, np.ndarray]
    fetches: tuple[str, ...]
    rows: int
    deadline: float
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    error: CallError | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)

"""Threads of a TensorFlow session."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """Threads of the TensorFlow session.

    Args:
        inter_op_threads: Operations that run at once, 0 = TensorFlow's choice.
        intra_op_threads: Threads inside one operation, 0 = TensorFlow's choice. TensorFlow
            keeps this pool for the process: the first session decides.
    """

    inter_op_threads: int = 0
    intra_op_threads: int = 0

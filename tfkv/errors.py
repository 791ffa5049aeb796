"""Errors that tfkv raises, and the per-row status codes an artifact answers with.

Each error says what was expected, what came and what to do. Standard library only.
"""

from __future__ import annotations

import enum


class TfkvError(Exception):
    """Base of every error raised by tfkv."""


class ConfigError(TfkvError, ValueError):
    """A configuration value is out of range, or two values do not fit together."""


class CacheError(TfkvError, ValueError):
    """Tokens do not fit a cache, or do not continue what it holds; it was left unchanged."""


class ModelSourceError(TfkvError, ValueError):
    """A model source is unsupported, damaged or inconsistent with itself."""


class ArtifactError(TfkvError, ValueError):
    """A directory is not an artifact, or its manifest cannot be understood."""


class ExportError(TfkvError, RuntimeError):
    """An export did not reproduce the model it was made from; nothing was left on disk."""


class TextError(TfkvError, ValueError):
    """Text cannot be turned into tokens or back: no tokenizer, no template, or a bad one."""


class ServerError(TfkvError, RuntimeError):
    """The server answered with an error that belongs to the whole call."""


class UnavailableError(ServerError):
    """The server could not be reached, or stayed overloaded through every retry."""


class DeadlineError(ServerError):
    """No answer in time. The call may have been applied; repeating it is safe."""


class Status(enum.IntEnum):
    """Answer to one row of a call; the meaning of ``detail`` follows it.

    Values are part of the public contract and never change.
    """

    OK = 0  # detail: 0
    INVALID = 1  # detail: number of the offending input, see INVALID_INPUTS
    EMPTY = 2  # a new session without a token; detail: 0
    UNKNOWN = 3  # position > 0 on a session that does not exist; detail: 0
    GAP = 4  # position beyond the end; detail: tokens the session holds
    CONFLICT = 5  # differs from what is stored; detail: first differing position
    FORGOTTEN = 6  # older than the history; detail: oldest remembered position
    OVERFLOW = 7  # does not fit; detail: most tokens the session may hold
    FULL = 8  # no free slot or page; detail: milliseconds to the earliest expiry
    BUSY = 9  # another, differing row of this session is in the batch; detail: its row
    NOT_REVERSIBLE = 10  # truncate too deep; detail: smallest position possible
    QUOTA = 11  # the tenant's quota is used up; detail: the quota
    ADAPTER = 12  # detail 0: the artifact has no such adapter; 1: the session has another


class Finish(enum.IntEnum):
    """Why a ``generate`` row stopped. Values are part of the public contract."""

    NONE = 0  # nothing was asked for, or prefill is not done: call again
    LENGTH = 1  # max_new_tokens reached
    STOP = 2  # a stop token was sampled; it is included
    CAPACITY = 3  # the session may not grow further


INVALID_INPUTS = {
    1: "session_id",
    2: "tokens",
    3: "length",
    4: "position",
    5: "max_new_tokens",
    6: "temperature",
    7: "top_p",
    8: "min_p",
    9: "repetition_penalty",
    10: "top_k",
    11: "overflow",
    12: "pin",
    13: "ttl_ms",
    14: "stop_tokens",
    15: "tenant",
    16: "adapter",
    17: "seed",
    18: "layer",
    19: "page",
    20: "held",
    21: "filled",
    22: "kinds",
    23: "logprobs",
    24: "fingerprint",
    25: "page_bytes",
    26: "system",
}
INPUT_NUMBERS = {name: number for number, name in INVALID_INPUTS.items()}


class RowError(TfkvError, RuntimeError):
    """One row of a call was refused; its batch mates were not disturbed.

    Attributes:
        status: The row's `Status`.
        detail: Its ``detail``, whose meaning depends on the status.
    """

    def __init__(self, status: Status, detail: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail

"""What can go wrong in a call, as typed errors with a remedy in each message."""

from __future__ import annotations

from typing import Any

import grpc

from tfkv.errors import (
    INVALID_INPUTS,
    DeadlineError,
    RowError,
    ServerError,
    Status,
    TfkvError,
    UnavailableError,
)


class InputError(TfkvError, ValueError):
    """A value cannot be sent: wrong type, shape, range or name."""


class SessionError(TfkvError, RuntimeError):
    """A session is used in a way it does not allow, or cannot be restored."""


class RefusedError(ServerError):
    """The server refused the whole call, and would refuse it again.

    Attributes:
        code: Name of the gRPC status code, such as ``NOT_FOUND``.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class NotFoundError(RefusedError):
    """The server has no such model, version or label."""


# Part of the server's message -> what to do about it.
_REMEDIES = {
    "XLA compilation disabled": (
        "Start the server with --xla_cpu_compilation_enabled=true (or the GPU flag), "
        "or export without XLA."
    ),
    "input size does not match signature": (
        "Client and artifact disagree about the contract: use the tfkv version that "
        "exported the artifact, or pass artifact=<its directory>."
    ),
    "Serving signature key": "Is this model an artifact that `tfkv export` wrote?",
    "larger than max": "Raise max_message_bytes of the client, or send less in one call.",
    "Server Threadpool Exhausted": "Start the server with a higher --grpc_max_threads.",
    "Servable not found": "Check the model name, and that this version is loaded.",
}


def from_rpc_error(error: Any, where: str) -> ServerError:
    """The typed error of a gRPC failure.

    Args:
        error: The `grpc.RpcError` that the call raised.
        where: Which call on which server, for the message.
    """
    code, details = error.code(), error.details() or "no details"
    remedy = next((text for part, text in _REMEDIES.items() if part in details), "")
    message = f"{where}: {code.name}: {details} {remedy}".rstrip()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{message} (the call may have been applied; repeating it is safe)")
    oversized = "larger than max" in details
    if code == grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(message)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and not oversized:
        return UnavailableError(message)
    if code == grpc.StatusCode.NOT_FOUND:
        return NotFoundError(message, code.name)
    return RefusedError(message, code.name)


_ROW_MESSAGES = {
    Status.INVALID: "input `{input}` is out of range or malformed. Correct it and call again.",
    Status.EMPTY: "a new session needs at least one token, and none was given.",
    Status.UNKNOWN: (
        "the server does not hold this session: it expired, was closed, or lives on another "
        "replica. Replay its tokens from position 0."
    ),
    Status.GAP: "`position` lies beyond the {detail} tokens that the session holds.",
    Status.CONFLICT: (
        "the session holds another token at position {detail}. Truncate it to that position, "
        "close it, or use another session id."
    ),
    Status.FORGOTTEN: "positions before {detail} are older than the session's history.",
    Status.OVERFLOW: (
        "the session would exceed {detail} tokens. Truncate it, start a new one, or open it "
        'with overflow="slide".'
    ),
    Status.FULL: (
        "no free slot or page; the earliest session expires in {detail} ms. Close sessions "
        "that are done, or serve an artifact with more slots."
    ),
    Status.BUSY: "another, differing call of this session is running. Use one caller a session.",
    Status.NOT_REVERSIBLE: (
        "the cache policy cannot take back so many tokens; the smallest position possible is "
        "{detail}."
    ),
    Status.QUOTA: "the tenant's quota of {detail} is used up.",
    Status.ADAPTER: "the artifact has no such adapter.",
}
#: Where the detail decides what it means.
_ROW_MESSAGES_BY_DETAIL = {
    (Status.ADAPTER, 1): (
        "the session was made with another adapter, which it keeps. Name that one, close the "
        "session, or use another session id."
    ),
}


def row_error(status: int, detail: int, where: str) -> RowError:
    """The error of a row that was refused.

    Args:
        status: The row's ``status``, not OK.
        detail: Its ``detail``.
        where: Which signature and session, for the message.
    """
    try:
        known = Status(status)
    except ValueError:
        raise ServerError(
            f"{where}: unknown status {status} (detail {detail}). "
            "The artifact is newer than this client: upgrade tfkv."
        ) from None
    message = _ROW_MESSAGES_BY_DETAIL.get((known, detail), _ROW_MESSAGES.get(known, "refused"))
    text = message.format(detail=detail, input=INVALID_INPUTS.get(detail, f"number {detail}"))
    return RowError(known, detail, f"{where}: {known.name}: {text}")

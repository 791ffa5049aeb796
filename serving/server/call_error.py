"""The one error type that crosses the data plane: a status code and a text."""

from __future__ import annotations

import grpc

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class CallError(Exception):
    """A call failed with a status that the client sees.

    Both faces translate it: gRPC sends code and text, REST maps the code to HTTP.

    Args:
        code: Canonical status code.
        message: Text for the client, worded as TensorFlow Serving words it.

    Example:
        >>> raise CallError(grpc.StatusCode.INVALID_ARGUMENT, "Missing ModelSpec")
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"

    @classmethod
    def from_number(cls, number: int, message: str) -> CallError:
        """Error with a canonical code given by number, as TensorFlow's errors carry it."""
        return cls(_BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN), message)


def invalid_argument(message: str) -> CallError:
    """INVALID_ARGUMENT, the most common refusal."""
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, message)


def failed_precondition(message: str) -> CallError:
    """FAILED_PRECONDITION."""
    return CallError(grpc.StatusCode.FAILED_PRECONDITION, message)


def internal(message: str) -> CallError:
    """INTERNAL."""
    return CallError(grpc.StatusCode.INTERNAL, message)


def not_found(message: str) -> CallError:
    """NOT_FOUND."""
    return CallError(grpc.StatusCode.NOT_FOUND, message)

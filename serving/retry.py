"""Repeating calls until they succeed or time is up.

Calls of the contract say what a session should contain, so that repeating one changes
nothing: a lost reply, a restart and an exhausted thread pool are all met by trying again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Self, TypeVar

import tenacity

from tfkv.errors import DeadlineError, RowError, Status, TfkvError, UnavailableError

T = TypeVar("T")

_UNANSWERED = (DeadlineError, UnavailableError)
_TRANSIENT_ROWS = (Status.BUSY, Status.FULL)


@dataclasses.dataclass(frozen=True)
class Deadline:
    """A moment after which nobody waits any more.

    Args:
        at: Value of `time.monotonic`, in seconds; infinite for "never".
    """

    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Self:
        """The deadline so many seconds from now; ``None`` means never."""
        return cls(float("inf") if seconds is None else time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds until then, 0 when it has passed."""
        return max(0.0, self.at - time.monotonic())

    def earlier(self, seconds: float | None) -> Deadline:
        """This deadline, or the one so many seconds from now if that comes first."""
        return min(self, Deadline.after(seconds), key=lambda deadline: deadline.at)


@dataclasses.dataclass(frozen=True)
class Retry:
    """How calls are repeated: exponential backoff with full jitter.

    Repeated are calls that failed with UNAVAILABLE, RESOURCE_EXHAUSTED (TensorFlow
    Serving's ``Server Threadpool Exhausted``) or DEADLINE_EXCEEDED of one attempt, and rows
    answered with BUSY or FULL. Everything else is raised at once.

    Args:
        first_wait: Longest first pause, in seconds; it doubles each time.
        longest_wait: Longest pause, in seconds.
        attempt_timeout: Seconds one attempt may take before it is given up and repeated.
            A reply may be late because the server compiles or is busy: keep it well above
            the time of a bounded call.
        attempts: Most attempts, 0 = as many as the deadline allows.
    """

    first_wait: float = 0.05
    longest_wait: float = 2.0
    attempt_timeout: float = 60.0
    attempts: int = 0

    def run(
        self, attempt: Callable[[float], T], deadline: Deadline, *, repeatable: bool = True
    ) -> T:
        """Calls ``attempt(timeout)`` until it succeeds.

        Args:
            attempt: Makes the call within the seconds it is given.
            deadline: When to give up; the last error is raised then.
            repeatable: Whether the call may be repeated although it may have been applied.

        Raises:
            DeadlineError: The deadline has passed before the first attempt, or every
                attempt took too long.
            UnavailableError: The server stayed out of reach or overloaded.
            RowError: The row stayed BUSY or FULL, or was refused for another reason.
        """

        errors: list[TfkvError] = []

        def once() -> T:
            left = deadline.left()
            if left <= 0:
                raise DeadlineError("No time left before the call was made. Allow more of it.")
            try:
                return attempt(min(self.attempt_timeout, left))
            except TfkvError as error:
                errors.append(error)
                raise

        def stop(state: tenacity.RetryCallState) -> bool:
            over = 0 < self.attempts <= state.attempt_number
            return over or state.upcoming_sleep >= deadline.left()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: _transient(error, repeatable)),
            wait=self._wait,
            stop=stop,
            reraise=True,
        )
        try:
            return retrying(once)
        except TfkvError as error:
            _raise_telling(error, errors)
            raise

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Seconds until the next attempt; FULL says when waiting longer is pointless."""
        backoff = tenacity.wait_random_exponential(
            multiplier=self.first_wait, max=self.longest_wait
        )
        seconds = backoff(state)
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, RowError) and error.status == Status.FULL and error.detail > 0:
            return min(seconds, error.detail / 1000.0)
        return seconds


def _transient(error: BaseException, repeatable: bool) -> bool:
    """Whether another attempt may succeed, and does no harm."""
    if isinstance(error, RowError):
        return error.status in _TRANSIENT_ROWS
    if isinstance(error, UnavailableError):
        return repeatable or "Server Threadpool Exhausted" in str(error)
    return repeatable and isinstance(error, DeadlineError)


def _raise_telling(last: TfkvError, errors: list[TfkvError]) -> None:
    """Raises what says most about a call that failed for good, where that is not ``last``.

    The last attempt may have had no more than the rest of the time: what the one before it
    was told explains more. And a refusal after an attempt without an answer is marked by its
    cause, since that attempt may still be applied.
    """
    if isinstance(last, DeadlineError) and len(errors) > 1:
        before = errors[-2] if errors[-1] is last else errors[-1]
        if not isinstance(before, DeadlineError):
            raise before from last
    lost = next((error for error in errors if isinstance(error, _UNANSWERED)), None)
    if lost is not None and not isinstance(last, _UNANSWERED):
        raise last from lost


def is_uncertain(error: TfkvError) -> bool:
    """Whether the call may have been applied although it failed."""
    return isinstance(error, _UNANSWERED) or isinstance(error.__cause__, _UNANSWERED)

"""n-best sampling: several continuations of one prompt, ranked."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfkv.errors import Finish, ServerError
from tfkv.serving.candidate import Candidate
from tfkv.serving.contract import Row
from tfkv.serving.failures import InputError
from tfkv.serving.generation import Chunk, Prompt, Sampling
from tfkv.serving.lockstep import reach_together
from tfkv.serving.retry import Deadline

if TYPE_CHECKING:
    from tfkv.serving.session import Session

RANKS = ("mean", "total")

_MOST_SEED = 2**63

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Branch:
    """One continuation under way."""

    session: Session
    row: Row
    seed: int
    left: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: Finish = Finish.NONE
    idle: int = 0

    @property
    def done(self) -> bool:
        return self.left <= 0 or self.finish in (Finish.STOP, Finish.CAPACITY)

    def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.finish = chunk.finish
        self.left -= len(chunk.tokens)
        self.idle = 0 if chunk.tokens else self.idle + 1


def sample_n(
    session: Session,
    n: int,
    prompt: Prompt,
    sampling: Sampling,
    *,
    rank: str = "mean",
    keep_best: bool = True,
    timeout: float | None = None,
) -> list[Candidate]:
    """`Session.generate_n`, with the sampling as one value."""
    _check(n, sampling, rank)
    deadline = Deadline.after(timeout)
    with session._prompted(prompt) as conversation, contextlib.ExitStack() as opened:
        branches = []
        for seed in _seeds(n, sampling.seed):
            fork = opened.enter_context(forked(session, deadline))
            row = session._sampling_row(sampling, seed)
            branches.append(_Branch(fork, row, seed, sampling.max_new_tokens))
        while live := [branch for branch in branches if not branch.done]:
            _step(live, deadline)
        found = [_candidate(session, branch, rank) for branch in branches]
        found.sort(key=lambda candidate: -candidate.score)
        if keep_best:
            session._adopt(found[0], conversation)
        return found


def _check(n: int, sampling: Sampling, rank: str) -> None:
    if n < 1:
        raise InputError(f"`n` must be at least 1. Received: {n}.")
    if n > 1 and sampling.temperature <= 0:
        raise InputError(
            f"`temperature` must be above 0, or the {n} continuations are equal. "
            f"Received: {sampling.temperature}."
        )
    if sampling.max_new_tokens < 1:
        raise InputError(
            f"`max_new_tokens` must be at least 1. Received: {sampling.max_new_tokens}."
        )
    if rank not in RANKS:
        raise InputError(f"`rank` must be one of {', '.join(RANKS)}. Received: {rank!r}.")


def _seeds(n: int, first: int | None) -> list[int]:
    """A seed for each continuation."""
    if first is None:
        return [secrets.randbits(63) for _ in range(n)]
    # Behind the largest int64 comes 0; what was given itself is sent as it is.
    return [first, *((first + index) % _MOST_SEED for index in range(1, n))]


@contextlib.contextmanager
def forked(session: Session, deadline: Deadline) -> Iterator[Session]:
    """A branch for the time of a ``with`` block."""
    left = deadline.left()
    branch = session.fork(timeout=None if left == float("inf") else left)
    try:
        yield branch
    finally:
        try:
            branch.close(timeout=5.0)
        except ServerError as error:
            # It expires by itself; what was found matters more.
            _log.warning("Branch %s was not closed: %s", branch.session_id, error)


def _step(live: list[_Branch], deadline: Deadline) -> None:
    """One bounded call for every continuation under way."""
    sessions = [branch.session for branch in live]
    most = sessions[0]._client.contract.decode_chunk
    asks = [min(branch.left, most) for branch in live]
    extras = [{**branch.row, "max_new_tokens": ask} for branch, ask in zip(live, asks, strict=True)]
    answers = reach_together(sessions, "generate", extras, deadline)
    for branch, answer, ask in zip(live, answers, asks, strict=True):
        branch.take(branch.session._take(answer, ask))
        if branch.idle and branch.finish == Finish.NONE:
            branch.session._pause_idle(branch.idle, deadline)


def _candidate(session: Session, branch: _Branch, rank: str) -> Candidate:
    text = session._text_of(branch.tokens, branch.finish == Finish.STOP)
    found = Candidate(branch.tokens, text, branch.logprobs, branch.finish, 0.0, branch.seed)
    score = found.mean_logprob if rank == "mean" else found.total_logprob
    return dataclasses.replace(found, score=score)

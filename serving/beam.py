"""Beam search over branches of a session."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfkv.errors import Finish
from tfkv.serving.candidate import Candidate
from tfkv.serving.failures import InputError
from tfkv.serving.generation import Prompt
from tfkv.serving.lockstep import reach_together
from tfkv.serving.n_best import forked
from tfkv.serving.retry import Deadline

if TYPE_CHECKING:
    from tfkv.serving.session import Session


@dataclasses.dataclass(frozen=True)
class _Path:
    """A continuation and its logprobs; ``beam`` is the branch that holds it but its last token."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    beam: int = 0

    def extended(self, token: int, logprob: float, beam: int) -> _Path:
        return _Path((*self.tokens, token), (*self.logprobs, logprob), self.total + logprob, beam)


def beam_search(
    session: Session,
    width: int = 4,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    *,
    prompt: Prompt = (),
    stop_tokens: Sequence[int] | None = None,
    keep_best: bool = True,
    timeout: float | None = None,
) -> list[Candidate]:
    """Searches for the most likely continuations, keeping the ``width`` best at each length.

    Choose it for short answers with a right and a wrong (a translation, a label, a query), not
    for open-ended text, where likely is dull. Each beam is a branch that shares the pages of
    its past with the others; a beam that falls behind is closed. A step costs one row of
    ``decode`` a beam, several in a call where the client knows the artifact, and brings the
    logits of the whole vocabulary. It takes ``width`` slots besides the session's.

    The search ends when no beam can still overtake the ``width`` best that have ended.

    Args:
        session: What to continue.
        width: Beams kept, and most continuations returned; 1 is greedy.
        max_new_tokens: Most tokens of a continuation, the stop token included.
        length_penalty: Continuations are ranked by total logprob / length ** this; 0 ranks by
            total logprob, 1 by the mean. At least 0.
        prompt: What to append first, as for `Session.generate`.
        stop_tokens: Ids that end a continuation; the artifact's by default.
        keep_best: Whether the session goes on with the best one; otherwise with the prompt
            alone.
        timeout: Seconds for everything; by default each call has the client's timeout.

    Returns:
        At most ``width`` continuations, best first; their ``score`` is what they were ranked
        by. After an error the prompt is taken back out of the transcript.

    Raises:
        InputError: An argument makes no sense.
        RowError: The server refused: FULL where it lacks slots, OVERFLOW at the session's end.
        ServerError: The server failed.

    Example:
        >>> with client.session() as session:
        ...     best = beam_search(session, 4, 32, prompt="The capital of France is")[0]
    """
    _check(width, max_new_tokens, length_penalty)
    deadline = Deadline.after(timeout)
    stops = set(session._client.contract.stops(stop_tokens)) - {-1}
    with session._prompted(prompt) as conversation, contextlib.ExitStack() as opened:
        search = _Search(session, width, max_new_tokens, length_penalty, stops, opened, deadline)
        found = search.run()
        if keep_best and found:
            session._adopt(found[0], conversation)
        return found


def _check(width: int, max_new_tokens: int, length_penalty: float) -> None:
    for name, value in (("width", width), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise InputError(f"`{name}` must be at least 1. Received: {value}.")
    if not 0 <= length_penalty < float("inf"):
        raise InputError(
            f"`length_penalty` must be a number of at least 0. Received: {length_penalty}."
        )


class _Search:
    """The beams of one search, and what has ended."""

    def __init__(
        self,
        session: Session,
        width: int,
        longest: int,
        penalty: float,
        stops: Collection[int],
        opened: contextlib.ExitStack,
        deadline: Deadline,
    ) -> None:
        self._root = session
        self._width = width
        self._longest = longest
        self._penalty = penalty
        self._stops = stops
        self._opened = opened
        self._deadline = deadline
        self._beams: list[Session] = []
        self._ended: list[_Path] = []

    def run(self) -> list[Candidate]:
        """Searches to the end; the beams that are left stay open."""
        self._beams = [self._fork(self._root)]
        live = [_Path()]
        while True:
            live = self._extend(live)
            if not live or len(live[0].tokens) == self._longest or self._settled(live):
                break
            self._follow(live)
        best = sorted([*self._ended, *live], key=self._score, reverse=True)
        return [self._candidate(path) for path in best[: self._width]]

    def _extend(self, live: Sequence[_Path]) -> list[_Path]:
        """The best paths that are one token longer; those that end are put aside."""
        empty: list[dict[str, object]] = [{} for _ in live]
        answers = reach_together(self._beams, "decode", empty, self._deadline)
        # Of each beam so many that enough go on, whichever end.
        most = self._width + len(self._stops)
        paths: list[_Path] = []
        for beam, (path, answer) in enumerate(zip(live, answers, strict=True)):
            logprobs = _log_softmax(np.asarray(answer["logits"]))
            likely = np.argsort(-logprobs, kind="stable")[:most]
            paths += [path.extended(int(token), float(logprobs[token]), beam) for token in likely]
        paths.sort(key=lambda path: -path.total)
        self._ended += [path for path in paths if path.tokens[-1] in self._stops]
        return [path for path in paths if path.tokens[-1] not in self._stops][: self._width]

    def _settled(self, live: Sequence[_Path]) -> bool:
        """Whether nothing that goes on can still come among the best.

        Logprobs only take away, and a penalty is mildest at the greatest length.
        """
        if len(self._ended) < self._width:
            return False
        worst = heapq.nlargest(self._width, map(self._score, self._ended))[-1]
        return live[0].total / self._longest**self._penalty <= worst

    def _follow(self, live: Sequence[_Path]) -> None:
        """Moves the branches to the chosen paths: losers close, winners of several fork."""
        heirs = [path.beam for path in live]
        for beam, session in enumerate(self._beams):
            if beam not in heirs:
                session.close()
        moved: list[Session] = []
        for index, beam in enumerate(heirs):
            # The last of a beam's heirs takes it over, when the others have forked from it.
            last = beam not in heirs[index + 1 :]
            moved.append(self._beams[beam] if last else self._fork(self._beams[beam]))
        for session, path in zip(moved, live, strict=True):
            session._append(path.tokens[-1:], "sampled", path.logprobs[-1:])
        self._beams = moved

    def _fork(self, session: Session) -> Session:
        return self._opened.enter_context(forked(session, self._deadline))

    def _score(self, path: _Path) -> float:
        return path.total / len(path.tokens) ** self._penalty

    def _candidate(self, path: _Path) -> Candidate:
        stopped = path.tokens[-1] in self._stops
        tokens = list(path.tokens)
        return Candidate(
            tokens,
            self._root._text_of(tokens, stopped),
            list(path.logprobs),
            Finish.STOP if stopped else Finish.LENGTH,
            self._score(path),
        )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())

"""What sessions should contain and answer, in plain Python: the model of a property test."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import tiny_model

from tfkv.config import EngineConfig
from tfkv.errors import Finish, Status

GIVEN, SAMPLED, STOPPED = range(3)

Key = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of `generate`, `decode` or `score`; stop tokens and sampling only for the first.

    Args:
        key: Tenant and session id.
        tokens: What belongs at `position`.
        position: −1 = at the end.
        count: Tokens to sample.
        temperature: 0 = greedy.
        stops: Stop tokens.
        overflow: 0 error, 1 stop.
    """

    key: Key
    tokens: tuple[int, ...] = ()
    position: int = -1
    count: int = 0
    temperature: float = 0.0
    stops: tuple[int, ...] = ()
    overflow: int = 0


@dataclasses.dataclass
class Session:
    """What one session says: its tokens, and who chose each."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    kinds: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Expected:
    """What a row should be answered.

    Attributes:
        status: Status and detail; a detail of None can be anything.
        detail: Likewise.
        replayed: Tokens that come from history.
        fresh: Most tokens that are sampled anew; fewer only where one is a stop token.
        capped: Fewer are sampled than asked, for lack of room.
        copy_of: Row whose answer this one shares.
        pages: Most pages it could take.
    """

    status: Status = Status.OK
    detail: int | None = 0
    replayed: tuple[int, ...] = ()
    fresh: int = 0
    capped: bool = False
    copy_of: int | None = None
    pages: int = 0


@functools.lru_cache(maxsize=4096)
def oracle(tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities ``[T, V]`` of the same conversation run alone, from scratch."""
    return tiny_model.log_softmax(tiny_model.logits(tokens))


@functools.lru_cache(maxsize=256)
def oracle_logits(tokens: tuple[int, ...]) -> np.ndarray:
    """Logits ``[V]`` after the last token."""
    return tiny_model.logits(tokens)[-1]


class SessionModel:
    """All sessions of an artifact with a dense cache.

    Args:
        engine: Its limits.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self.engine = engine
        self.limit = engine.capacity
        self.sessions: dict[Key, Session] = {}

    # --- generate, decode, score -----------------------------------------------------------

    def expect(self, signature: str, rows: Sequence[Row]) -> list[Expected]:
        """What each row of a batch should be answered."""
        early = [self._refuse_early(row) for row in rows]
        answers: list[Expected] = []
        opened: list[Key] = []
        for index, row in enumerate(rows):
            mates = [i for i, other in enumerate(rows) if other.key == row.key]
            accepted = [i for i in mates if early[i].status == Status.OK]
            first = (accepted or mates)[0]
            if first != index:
                same = rows[first] == row
                answer = Expected(copy_of=first) if same else Expected(Status.BUSY, first)
                if not same and early[index].status != Status.OK:
                    answer = early[index]
            elif early[index].status != Status.OK:
                answer = early[index]
            elif row.key not in self.sessions and (refused := self.no_room(row.key, opened)):
                answer = refused
            else:
                answer = self._plan(signature, row)
            answers.append(answer)
            if first == index and row.key not in self.sessions:
                opened += [row.key] if answer.status not in _NOT_OPENED else []
        return answers

    def _refuse_early(self, row: Row) -> Expected:
        """Refusals that come before a session is made."""
        if not row.key[1]:
            return Expected(Status.INVALID, 1)
        if row.key not in self.sessions:
            if row.position > 0:
                return Expected(Status.UNKNOWN)
            if not row.tokens:
                return Expected(Status.EMPTY)
        return Expected()

    def no_room(self, key: Key, opened: Sequence[Key] = ()) -> Expected | None:
        """The refusal of a session that cannot be made."""
        quota = self.engine.tenant_sessions
        live = [*self.sessions, *opened]
        if quota and sum(tenant == key[0] for tenant, _ in live) >= quota:
            return Expected(Status.QUOTA, quota)
        return Expected(Status.FULL, None) if len(live) >= self.engine.slots else None

    def _plan(self, signature: str, row: Row) -> Expected:
        session = self.sessions.get(row.key, Session())
        held = len(session.tokens)
        position = held if row.position < 0 else row.position
        end = position + len(row.tokens)
        if position > held:
            return Expected(Status.GAP, held)
        for place, token in enumerate(row.tokens, position):
            if place < held and session.tokens[place] != token:
                return Expected(Status.CONFLICT, place)
        if end == 0 and (held == 0 or signature == "decode"):
            return Expected(Status.EMPTY)
        if row.count and end < held and session.kinds[end] == GIVEN:
            return Expected(Status.CONFLICT, end)
        replayed = 0
        while (
            replayed < row.count
            and end + replayed < held
            and session.kinds[end + replayed] != GIVEN
            and STOPPED not in session.kinds[end : end + replayed]
        ):
            replayed += 1
        run = slice(end, end + replayed)
        stopped = STOPPED in session.kinds[run]
        wanted = row.count - replayed if end + replayed >= held and not stopped else 0
        whole = max(held, end)
        if end > self.limit or (row.overflow == 0 and wanted and whole + wanted > self.limit):
            return Expected(Status.OVERFLOW, self.limit)
        fresh = min(wanted, self.limit - whole)
        size = self.engine.page_size
        # All its pages, should the first of them be shared, and one in case of an odd start.
        first = max(held - 1, 0) // size
        pages = -(-(whole + fresh) // size) - first + 1
        if position == 0 and held == 0:
            pages = -(-(whole + fresh) // size)
        return Expected(
            replayed=tuple(session.tokens[run]), fresh=fresh, capped=fresh < wanted, pages=pages
        )

    def settle(self, signature: str, row: Row, want: Expected, got: dict[str, np.ndarray]) -> None:
        """Checks the answer of a served row, and makes it part of the session."""
        session = self.sessions.setdefault(row.key, Session())
        position = len(session.tokens) if row.position < 0 else row.position
        end = position + len(row.tokens)
        new = row.tokens[len(session.tokens) - position :] if end > len(session.tokens) else ()
        session.tokens += new
        session.kinds += [GIVEN] * len(new)
        if signature == "generate":
            self._settle_sampled(session, row, want, got, end)
        elif signature == "decode":
            expected = oracle_logits(tuple(session.tokens[:end]))
            np.testing.assert_allclose(got["logits"], expected, atol=2e-3)
        else:
            assert got["count"] == len(row.tokens)
            said = oracle(tuple(session.tokens[:end]))
            for index, token in enumerate(row.tokens):
                place = position + index
                likely = said[place - 1, token] if place else 1.0
                assert abs(got["logprobs"][index] - likely) < 2e-3
            assert not got["logprobs"][len(row.tokens) :].any()
        assert got["position"] == len(session.tokens)

    def _settle_sampled(
        self, session: Session, row: Row, want: Expected, got: dict[str, np.ndarray], end: int
    ) -> None:
        count = int(got["count"])
        tokens = [int(token) for token in got["tokens"][:count]]
        assert (got["tokens"][count:] == -1).all()
        assert tuple(tokens[: len(want.replayed)]) == want.replayed
        sampled = tokens[len(want.replayed) :]
        stops = [token in row.stops for token in sampled]
        assert not any(stops[:-1])
        assert len(sampled) <= want.fresh
        assert len(sampled) == want.fresh or stops[-1]
        session.tokens += sampled
        session.kinds += [STOPPED if stop else SAMPLED for stop in stops]
        said = oracle(tuple(session.tokens[: end + count]))
        for place, token in enumerate(tokens, end):
            logprobs = said[place - 1]
            assert abs(got["logprobs"][place - end] - logprobs[token]) < 2e-3
            if row.temperature == 0 and place - end >= len(want.replayed):
                assert logprobs[token] > logprobs.max() - 1e-3
        finish = Finish.LENGTH if count and count == row.count else Finish.NONE
        if want.capped and count < row.count:
            finish = Finish.CAPACITY
        if count and session.kinds[end + count - 1] == STOPPED:
            finish = Finish.STOP
        assert got["finish"] == finish

    # --- fork, truncate, close ---------------------------------------------------------------

    def fork(self, source: Key, target: Key, position: int) -> tuple[Expected, int]:
        """Branches a session. Returns what is expected, and the tokens the answer names."""
        if source not in self.sessions:
            return Expected(Status.UNKNOWN), 0
        session = self.sessions[source]
        position = len(session.tokens) if position < 0 else position
        if position > len(session.tokens):
            return Expected(Status.GAP, len(session.tokens)), 0
        if position == 0:
            return Expected(Status.EMPTY), 0
        if target in self.sessions:
            there = self.sessions[target].tokens
            pairs = zip(session.tokens[:position], there, strict=False)
            differs = next((i for i, (a, b) in enumerate(pairs) if a != b), len(there))
            if differs < position:
                return Expected(Status.CONFLICT, differs), 0
            return Expected(), len(there)
        if refused := self.no_room(target):
            return refused, 0
        self.sessions[target] = Session(session.tokens[:position], session.kinds[:position])
        return Expected(), position

    def truncate(self, key: Key, position: int) -> tuple[Expected, int]:
        """Rolls a session back. Returns what is expected, and the tokens the answer names."""
        session = self.sessions.get(key)
        if session is None:
            return (Expected(Status.UNKNOWN) if position else Expected()), 0
        held = len(session.tokens)
        if position > held:
            return Expected(Status.GAP, held), held
        del session.tokens[position:], session.kinds[position:]
        return Expected(), position


_NOT_OPENED = (Status.INVALID, Status.UNKNOWN, Status.EMPTY, Status.QUOTA)

"""Any interleaving of calls leaves each session as if it had been alone on the server."""

from __future__ import annotations

import time

import hypothesis
import numpy as np
import pytest
import tiny_model
from hypothesis import stateful
from hypothesis import strategies as st
from session_model import Expected, Key, Row, Session, SessionModel
from tiny_artifacts import ENGINES, Caller

from tfkv.errors import Status

KEYS = [(tenant, name) for tenant in ("", "one") for name in "abcde"]
keys = st.sampled_from(KEYS)
PIECE = ("held", "filled", "tokens", "kinds", "logprobs", "page_bytes", "fingerprint")
signatures = st.sampled_from(["generate", "generate", "decode", "score"])


@st.composite
def texts(draw: st.DrawFn, most: int = 40) -> tuple[int, ...]:
    """Tokens that often begin as others do."""
    text = tiny_model.text(90, seed=draw(st.integers(0, 2)))
    start = draw(st.sampled_from([0, 0, 0, 16, 5]))
    return tuple(text[start : start + draw(st.integers(0, most))])


class Interleavings(stateful.RuleBasedStateMachine):
    """Calls an artifact and `SessionModel` alike, and compares.

    Args:
        caller: Of the artifact.
        engine: Its engine.
    """

    operations = 0

    def __init__(self, caller: Caller, engine: str) -> None:
        super().__init__()
        self.caller = caller
        self.model = SessionModel(ENGINES[engine])
        self.last: tuple[str, list[Row]] | None = None

    # --- rows --------------------------------------------------------------------------------

    def _row(self, data: st.DataObject, signature: str, most: int = 40) -> Row:
        """A row that more often than not makes sense."""
        key = data.draw(keys)
        session = self.model.sessions.get(key)
        held = len(session.tokens) if session else 0
        kind = data.draw(st.sampled_from(["append"] * 5 + ["resend", "within", "odd"]))
        position, tokens = held, data.draw(texts(most))
        if kind == "append" and data.draw(st.booleans()):
            position = -1
        elif kind == "resend" and session:  # stateless style: everything, and a bit more
            position, tokens = 0, (*session.tokens, *tokens[:5])
        elif kind == "within" and held:
            position = data.draw(st.integers(0, held))
            tokens = tuple(session.tokens[position:][: len(tokens)])
        elif kind == "odd":
            position = data.draw(st.integers(0, held + 2))
        row = Row(key, tokens, position)
        if signature != "generate":
            return row
        return Row(
            key,
            tokens,
            position,
            count=data.draw(st.integers(0, 8)),
            temperature=data.draw(st.sampled_from([0.0, 0.0, 1.0])),
            stops=data.draw(st.sampled_from([(), (), tuple(range(20, 28))])),
            overflow=data.draw(st.integers(0, 1)),
        )

    def _call(self, signature: str, rows: list[Row]) -> dict[str, np.ndarray]:
        inputs: dict[str, object] = {
            "tenant": [row.key[0] for row in rows],
            "overflow": [row.overflow for row in rows],
        }
        if signature == "generate":
            inputs |= {
                "max_new_tokens": [row.count for row in rows],
                "temperature": [row.temperature for row in rows],
                "stop_tokens": [(*row.stops, *[-1] * 8)[:8] for row in rows],
            }
        return self.caller.call(
            signature,
            [row.key[1] for row in rows],
            [row.tokens for row in rows],
            [row.position for row in rows],
            **inputs,
        )

    def _serve(self, signature: str, rows: list[Row]) -> None:
        """Calls, compares, and moves the model on."""
        before = self.caller.stats()
        expected = self.model.expect(signature, rows)
        answer = self._call(signature, rows)
        for index, (row, want) in enumerate(zip(rows, expected, strict=True)):
            got = {name: value[index] for name, value in answer.items()}
            if want.copy_of is not None:
                for name, value in answer.items():
                    np.testing.assert_array_equal(got[name], value[want.copy_of], name)
                continue
            if self._full(got, want, expected, before):
                continue
            self._same_status(got, want)
            if want.status == Status.OK:
                self.model.settle(signature, row, want, got)
        self.last = (signature, rows)

    @staticmethod
    def _full(got: dict, want: Expected, expected: list[Expected], before: dict) -> bool:
        """Whether a row was refused for lack of pages, and rightly so."""
        if got["status"] != Status.FULL or want.status != Status.OK:
            return False
        room = before["pages"] - before["pages_used"]
        assert sum(row.pages for row in expected) > room
        assert got["detail"] > 0
        return True

    @staticmethod
    def _same_status(got: dict, want: Expected) -> None:
        assert got["status"] == want.status, (Status(int(got["status"])), want)
        assert want.detail is None or got["detail"] == want.detail, (got["detail"], want)

    # --- operations ----------------------------------------------------------------------------

    @stateful.rule(data=st.data())
    def generate(self, data: st.DataObject) -> None:
        self._serve("generate", [self._row(data, "generate")])

    @stateful.rule(data=st.data(), signature=signatures)
    def one(self, data: st.DataObject, signature: str) -> None:
        self._serve(signature, [self._row(data, signature)])

    @stateful.rule(data=st.data(), signature=signatures)
    def batch(self, data: st.DataObject, signature: str) -> None:
        rows = [self._row(data, signature, most=20) for _ in range(data.draw(st.integers(2, 4)))]
        if data.draw(st.booleans()):
            rows[-1] = rows[0]
        # What the budget of one batch prefills in one call.
        while sum(len(row.tokens) + 1 for row in rows) > 128:
            rows.pop()
        self._serve(signature, rows)

    @stateful.rule()
    def repeat(self) -> None:
        if self.last is None:
            return
        signature, rows = self.last
        self._serve(signature, rows)

    @stateful.rule(source=keys, branch=st.sampled_from("abcde"), at=st.integers(-1, 60))
    def fork(self, source: Key, branch: str, at: int) -> None:
        want, position = self.model.fork(source, (source[0], branch), at)
        self.caller.sessions.add((source[0], branch))
        got = self.caller.call("fork", source[1], (), at, tenant=[source[0]], target=[branch])
        self._same_status(got, want)
        assert got["position"] == position

    @stateful.rule(source=keys, to=keys)
    def move(self, source: Key, to: Key) -> None:
        """Out of the graph and in again under another name, be it another tenant's."""
        session = self.model.sessions.get(source)
        if not session or not session.tokens or to in self.model.sessions:
            return
        if self.model.no_room(to):
            return
        self.caller.sessions.add(to)
        held = len(session.tokens)
        for page in range(-(-held // self.model.engine.page_size)):
            piece = self._paged("snapshot", source, page=[page])
            assert (piece["status"], piece["held"]) == (Status.OK, held)
            fields = {name: np.array([piece[name]]) for name in PIECE}
            got = self._paged("restore", to, page=[page], **fields)
            if got["status"] == Status.FULL:
                self.caller.close(to[1], tenant=[to[0]])
                return
            assert got["status"] == Status.OK
        assert got["position"] == held
        self.model.sessions[to] = Session([*session.tokens], [*session.kinds])

    def _paged(self, signature: str, key: Key, **inputs: object) -> dict[str, np.ndarray]:
        feeds = {"tenant": [key[0]], "session_id": [key[1]], **inputs}
        answer = self.caller.artifact.call(signature, **feeds)
        return {name: value[0] for name, value in answer.items()}

    @stateful.rule(data=st.data(), key=keys)
    def truncate(self, data: st.DataObject, key: Key) -> None:
        session = self.model.sessions.get(key)
        at = data.draw(st.integers(0, len(session.tokens) + 1 if session else 2))
        want, position = self.model.truncate(key, at)
        got = self.caller.truncate(key[1], at, tenant=[key[0]])
        self._same_status(got, want)
        assert got["position"] == position

    @stateful.rule(key=keys, how=st.sampled_from(["close", "expire"]))
    def end(self, key: Key, how: str) -> None:
        there = self.model.sessions.pop(key, None) is not None
        if how == "expire" and there:
            got = self.caller.decode(key[1], (), -1, tenant=[key[0]], ttl_ms=1)
            time.sleep(0.003)
            if got["status"] == Status.OK:
                return
            # No page for the copy that a write needs, or no token to go on from.
            assert got["status"] in (Status.FULL, Status.EMPTY)
        got = self.caller.close(key[1], tenant=[key[0]])
        assert (got["status"], got["detail"]) == (Status.OK, int(there))

    @stateful.invariant()
    def sound(self) -> None:
        type(self).operations += 1
        stats = self.caller.stats()
        assert stats["integrity"] == 0

    def teardown(self) -> None:
        self.caller.close_all()
        stats = self.caller.stats()
        assert (stats["integrity"], stats["slots_used"], stats["pages_used"]) == (0, 0, 0)


def _run(caller: Caller, engine: str, examples: int, steps: int) -> int:
    """Operations run."""
    Interleavings.operations = 0
    stateful.run_state_machine_as_test(
        lambda: Interleavings(caller, engine),
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=True,
        ),
    )
    return Interleavings.operations


@pytest.mark.parametrize("engine", ["plain", "crowded"])
def test_sessions_are_as_if_each_were_alone(caller_of, engine, record_property):
    done = _run(caller_of(engine), engine, examples=4, steps=40)
    record_property("operations", done)
    assert done >= 150


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["plain", "crowded"])
def test_sessions_are_as_if_each_were_alone_for_long(caller_of, engine, record_property):
    done = _run(caller_of(engine), engine, examples=55, steps=50)
    record_property("operations", done)
    assert done >= 2500

"""`snapshot` and `restore`: sessions out of the graph, and into it again."""

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import Caller, feed

from tfkv.errors import INPUT_NUMBERS, Status

SIZE = 16
_PIECE = ("held", "filled", "tokens", "kinds", "logprobs", "page_bytes", "fingerprint")


def dump(caller: Caller, session: str, **inputs: object) -> list[dict]:
    """All pages of a session."""
    pieces: list[dict] = []
    while not pieces or len(pieces) * SIZE < pieces[0]["held"]:
        answer = snapshot(caller, session, len(pieces), **inputs)
        assert answer["status"] == Status.OK
        pieces.append({name: answer[name] for name in _PIECE} | {"page": len(pieces)})
    return pieces


def snapshot(caller: Caller, session: str, page: int, **inputs: object) -> dict:
    feeds = {"session_id": [session], "page": [page], **inputs}
    return {name: value[0] for name, value in caller.artifact.call("snapshot", **feeds).items()}


def restore(caller: Caller, session: str, piece: dict, **inputs: object) -> dict:
    caller.sessions.add((inputs.get("tenant", [""])[0], session))
    # As an object: NumPy drops trailing NULs of bytes.
    feeds = {
        name: np.array([value], object if isinstance(value, bytes) else None)
        for name, value in piece.items()
    }
    answer = caller.artifact.call("restore", **{"session_id": [session], **feeds, **inputs})
    return {name: value[0] for name, value in answer.items()}


def load(caller: Caller, session: str, pieces: list[dict], **inputs: object) -> None:
    for piece in pieces:
        answer = restore(caller, session, piece, **inputs)
        assert answer["status"] == Status.OK, (Status(int(answer["status"])), answer["detail"])
    assert answer["position"] == pieces[0]["held"]


@pytest.mark.parametrize("engine", ["plain", "int8", "compiled"])
@pytest.mark.parametrize("length", [1, 16, 17, 33, 48, 70])
def test_a_restored_session_goes_on_as_the_first_would_have(caller_of, engine, length):
    caller = caller_of(engine)
    first, second = caller.name(), caller.name()
    prompt = tiny_model.text(length, seed=300 + length)
    caller.generate(first, prompt, count=0)
    pieces = dump(caller, first)
    expected = caller.generate(first, (), length)
    caller.close(first)
    load(caller, second, pieces)
    answer = caller.generate(second, (), length)
    np.testing.assert_array_equal(answer["tokens"], expected["tokens"])


def test_what_tokens_got_comes_back_with_them(caller_of):
    """A session that was restored evicts what the first would have."""
    caller, text = caller_of("h2o"), tiny_model.text(200, seed=320)
    first, second = caller.name(), caller.name()
    caller.generate(first, text[:90], count=0)
    load(caller, second, dump(caller, first))
    for name in (first, second):
        assert caller.generate(name, text[90:], 90, count=0)["status"] == Status.OK
    assert snapshot(caller, second, 0)["status"] == Status.NOT_REVERSIBLE, "both evicted"
    answers = [caller.decode(name, [5], 200)["logits"] for name in (first, second)]
    np.testing.assert_array_equal(*answers)


def test_history_comes_back_with_its_kinds_and_logprobs(plain):
    first, second = plain.name(), plain.name()
    prompt = tiny_model.text(20, seed=310)
    said = plain.generate(first, prompt)
    load(plain, second, dump(plain, first))
    before = plain.stats()
    again = plain.generate(second, prompt)
    assert plain.counted(before)["replays"] == 1
    for name in ("tokens", "count", "logprobs", "finish", "position"):
        np.testing.assert_array_equal(again[name], said[name])
    ends = [dump(plain, name) for name in (first, second)]
    for a, b in zip(*ends, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in _PIECE)


def test_restoring_again_changes_nothing(plain):
    first, second = plain.name(), plain.name()
    plain.generate(first, tiny_model.text(40, seed=311))
    pieces = dump(plain, first)
    load(plain, second, pieces)
    used = plain.stats()["pages_used"]
    for piece in pieces:
        answer = restore(plain, second, piece)
        assert (answer["status"], answer["position"]) == (Status.OK, 48)
    assert plain.stats()["pages_used"] == used
    assert plain.stats()["integrity"] == 0


def test_half_a_restore_is_a_shorter_session(plain):
    first, second = plain.name(), plain.name()
    prompt = tiny_model.text(40, seed=312)
    plain.generate(first, prompt, count=0)
    pieces = dump(plain, first)
    assert restore(plain, second, pieces[0])["position"] == 16
    assert restore(plain, second, pieces[2])["status"] == Status.GAP
    answer = plain.generate(second, prompt[16:], 16)
    assert answer["tokens"].tolist() == tiny_model.greedy(prompt, 8)


def test_restored_pages_are_never_found_by_others(plain):
    first, second = plain.name(), plain.name()
    prompt = tiny_model.text(13, seed=313)
    plain.generate(first, prompt, count=0, tenant=["one"])
    pieces = dump(plain, first, tenant=["one"])
    pieces[0]["page_bytes"] = bytes(len(pieces[0]["page_bytes"]))  # keys that no model made
    load(plain, second, pieces)
    branch = plain.name()
    plain.call("fork", second, (), -1, target=[branch])
    plain.sessions.add(("", branch))
    rest = tiny_model.text(40, seed=314)
    for name in (second, branch):
        plain.generate(name, rest, 13, count=0)
    before = plain.stats()
    answer = plain.generate(plain.name(), [*prompt, *rest])
    assert "tokens_reused" not in plain.counted(before)
    assert answer["tokens"].tolist() == tiny_model.greedy([*prompt, *rest], 8)


def test_a_restored_session_can_be_branched_truncated_and_read_again(plain):
    first, second, branch = (plain.name() for _ in range(3))
    prompt = tiny_model.text(40, seed=315)
    plain.generate(first, prompt)
    load(plain, second, dump(plain, first))
    plain.sessions.add(("", branch))
    assert plain.call("fork", second, (), 30, target=[branch])["status"] == Status.OK
    assert plain.truncate(second, 21)["status"] == Status.OK
    for name, at in ((second, 21), (branch, 30)):
        turn = tiny_model.text(3, seed=316)
        answer = plain.generate(name, turn, at)
        assert answer["tokens"].tolist() == tiny_model.greedy([*prompt[:at], *turn], 8)


def test_pieces_that_do_not_fit_are_refused(plain):
    first, second = plain.name(), plain.name()
    plain.generate(first, tiny_model.text(40, seed=317))
    pieces = dump(plain, first)

    def number(name: str) -> tuple[Status, int]:
        return Status.INVALID, INPUT_NUMBERS[name]

    odd = np.full(SIZE, -1, np.int32)
    cases = [
        ({"fingerprint": b"another"}, number("fingerprint")),
        ({"page_bytes": pieces[0]["page_bytes"][1:]}, number("page_bytes")),
        ({"page_bytes": b""}, number("page_bytes")),
        ({"page": -1}, number("page")),
        ({"page": 3}, number("page")),
        ({"held": 0, "filled": 0}, number("page")),
        ({"filled": 46}, number("filled")),
        ({"filled": 49}, number("filled")),
        ({"tokens": odd}, number("tokens")),
        ({"kinds": odd}, number("kinds")),
        ({"logprobs": np.full(SIZE, np.nan, np.float32)}, number("logprobs")),
        ({"held": 97, "filled": 97}, (Status.OVERFLOW, 96)),
        ({"page": 1}, (Status.UNKNOWN, 0)),
    ]
    for change, expected in cases:
        answer = restore(plain, second, pieces[0] | change)
        assert (answer["status"], answer["detail"]) == expected, change
    assert restore(plain, "", pieces[0])["detail"] == INPUT_NUMBERS["session_id"]
    assert plain.stats()["slots_used"] == 1
    other = plain.name()
    plain.generate(other, [*pieces[0]["tokens"][:5].tolist(), 3, 4])
    answer = restore(plain, other, pieces[0])
    assert (answer["status"], answer["detail"]) == (Status.CONFLICT, 5)


def test_what_cannot_be_read_is_refused(plain, window):
    name = plain.name()
    plain.generate(name, tiny_model.text(5), count=0)
    assert snapshot(plain, name, 1)["status"] == Status.GAP
    assert snapshot(plain, plain.name(), 0)["status"] == Status.UNKNOWN
    assert snapshot(plain, name, 0, tenant=["else"])["status"] == Status.UNKNOWN
    answer = snapshot(plain, name, -1)
    assert (answer["status"], answer["detail"]) == (Status.INVALID, INPUT_NUMBERS["page"])
    assert answer["page_bytes"] == b"" and not answer["tokens"].any()
    name = window.name()
    feed(window, name, tiny_model.text(130), 50)
    assert snapshot(window, name, 0)["status"] == Status.NOT_REVERSIBLE


def test_a_full_pool_takes_no_page_more(caller_of):
    crowded = caller_of("crowded")
    first, second = crowded.name(), crowded.name()
    crowded.generate(first, tiny_model.text(90, seed=318), count=0)
    pieces = dump(crowded, first)
    statuses = [restore(crowded, second, piece)["status"] for piece in pieces]
    assert statuses == [Status.OK] * 4 + [Status.FULL, Status.GAP]
    assert crowded.stats()["integrity"] == 0
    crowded.close(first)
    load(crowded, second, pieces)
    answer = crowded.generate(second, (), 90, count=4)
    assert answer["tokens"][:4].tolist() == tiny_model.greedy(tiny_model.text(90, seed=318), 4)

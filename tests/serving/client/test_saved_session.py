"""Sessions as files, against a server of dictionaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tfkv.errors import RowError, Status
from tfkv.serving import SavedSession, SessionError
from tfkv.serving.saved_session import file_name

SIZE, PAGE_BYTES = 4, 6


class Shelf:
    """Keeps pages, and answers `snapshot` and `restore` with them."""

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self.sessions: dict[tuple[bytes, bytes], list[dict[str, Any]]] = {}
        self.calls: list[str] = []
        self.grows = False

    def predict(
        self, signature: str, inputs: Mapping[str, Any], timeout: float | None = None
    ) -> dict[str, np.ndarray]:
        self.calls.append(signature)
        key = (inputs["tenant"][0], inputs["session_id"][0])
        page = int(inputs["page"][0])
        if signature == "restore":
            pages = self.sessions.setdefault(key, [])
            pages[page:] = [{name: value[0] for name, value in inputs.items()}]
            return self._answer(Status.OK, {})
        if key not in self.sessions:
            return self._answer(Status.UNKNOWN, {})
        piece = dict(self.sessions[key][page])
        if self.grows and page:
            piece["held"] = piece["held"] + 1
        return self._answer(Status.OK, piece)

    @staticmethod
    def _answer(status: Status, values: dict[str, Any]) -> dict[str, np.ndarray]:
        rows = {name: np.array([value]) for name, value in values.items()}
        rows |= {n: np.array([values.get(n)], object) for n in ("fingerprint", "page_bytes")}
        return rows | {"status": np.array([status]), "detail": np.array([0])}


@pytest.fixture
def saved() -> SavedSession:
    rng = np.random.default_rng(0)
    pages = {
        "tokens": rng.integers(0, 90, [3, SIZE], np.int32),
        "kinds": rng.integers(0, 3, [3, SIZE], np.int32),
        "logprobs": -rng.random([3, SIZE], np.float32),
        "page_bytes": rng.integers(0, 256, [3, PAGE_BYTES], np.uint8),
    }
    return SavedSession("ada/1 é", 10, 9, "abc", pages)


def same(left: SavedSession, right: SavedSession) -> bool:
    whole = ("session_id", "held", "filled", "fingerprint")
    return all(getattr(left, name) == getattr(right, name) for name in whole) and all(
        np.array_equal(left.pages[name], right.pages[name]) for name in left.pages
    )


def test_a_session_goes_through_a_server_and_a_file(saved, tmp_path):
    shelf = Shelf("ada")
    saved.restore(shelf, ttl_ms=5, pin=True)
    assert shelf.calls == ["restore"] * 3
    piece = shelf.sessions[b"ada", "ada/1 é".encode()][0]
    assert (piece["ttl_ms"], piece["pin"], piece["page"]) == (5, 1, 0)
    read = SavedSession.read(shelf, "ada/1 é")
    assert shelf.calls[3:] == ["snapshot"] * 3
    path = tmp_path / file_name(read.session_id)
    read.save(path)
    assert same(SavedSession.load(path), saved)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_session_is_fetched_into_a_file_and_mapped_from_it(saved, tmp_path):
    shelf = Shelf("ada")
    saved.restore(shelf)
    fetched = SavedSession.fetch(shelf, saved.session_id, tmp_path / "one.session")
    assert same(fetched, saved)
    assert isinstance(fetched.pages["page_bytes"], np.memmap)
    again = Shelf("ada")
    fetched.restore(again)
    assert same(SavedSession.read(again, saved.session_id), saved)


def test_its_adapter_is_part_of_the_fingerprint(saved):
    assert saved.adapter == ""
    named = dataclasses.replace(saved, fingerprint="abc/legal-2.1@def")
    assert named.adapter == "legal-2.1"


def test_it_can_get_another_name(saved):
    shelf = Shelf()
    saved.restore(shelf, "other")
    assert list(shelf.sessions) == [(b"", b"other")]


def test_a_session_that_is_not_there_is_an_error(saved):
    with pytest.raises(RowError, match="UNKNOWN"):
        SavedSession.read(Shelf(), "nobody")


def test_a_session_that_changes_meanwhile_is_an_error(saved):
    shelf = Shelf()
    saved.restore(shelf)
    shelf.grows = True
    with pytest.raises(SessionError, match="changed while"):
        SavedSession.read(shelf, saved.session_id)


@pytest.mark.parametrize("damage", ["flip", "head", "cut", "page lost", "text", "missing"])
def test_a_damaged_file_is_an_error(saved, tmp_path, damage):
    path = tmp_path / "one.session"
    saved.save(path)
    whole = path.read_bytes()
    if damage == "flip":
        at = whole.index(saved.pages["page_bytes"][1].tobytes())
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    elif damage == "head":
        path.write_bytes(whole.replace(b'"held": 10', b'"held": 11'))
    elif damage == "page lost":
        path.write_bytes(whole[: -(len(whole) - whole.rindex(b"\n") - 1) // 3])
    elif damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "text":
        path.write_text("a letter")
    else:
        path.unlink()
    with pytest.raises(SessionError, match="not a saved session"):
        SavedSession.load(path)


def test_file_names_stay_in_their_directory():
    assert file_name("../a/b") == "..%2Fa%2Fb.session"

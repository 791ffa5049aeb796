"""Sessions as files: kept across a restart, or moved to another replica."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, Self

import numpy as np

from tfkv.errors import Status
from tfkv.serving import failures

#: What `snapshot` says of the whole session, and what it says page by page.
_WHOLE = ("held", "filled", "fingerprint")
_PAGED = ("tokens", "kinds", "logprobs", "page_bytes")
#: Of files in a directory of sessions.
SUFFIX = ".session"
#: First line of a file; the number is the format's version.
_MAGIC = b"tfkv session 3\n"
#: A page as `snapshot` gives it, by array name.
_Page = dict[str, np.ndarray]


class Predictor(Protocol):
    """The part of `tfkv.serving.Client` that is needed here."""

    tenant: str

    def predict(
        self, signature: str, inputs: Mapping[str, Any], timeout: float | None = None
    ) -> dict[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class SavedSession:
    """All that an artifact knows of one session, keys and values included.

    Choose it to keep sessions across a restart, or to move them to another replica. The
    artifact that takes it must have the weights, cache and page size of the one that gave
    it, and the session's adapter under the same name; with other weights, replay the tokens
    instead. A client that sends the session's
    tokens again from position 0 is answered from it, and pays only for what is new.

    Args:
        session_id: Its name.
        held: Tokens it holds.
        filled: Of those, how many have keys.
        fingerprint: Of the artifact, and of the session's adapter where it has one.
        pages: Arrays by name, a row for each page: ``tokens``, ``kinds`` and ``logprobs``
            ``[pages, C]``, ``page_bytes`` uint8 ``[pages, page bytes]``.

    Example:
        >>> SavedSession.fetch(client, "ada", "ada.session")
        >>> SavedSession.load("ada.session").restore(other_client)
    """

    session_id: str
    held: int
    filled: int
    fingerprint: str
    pages: dict[str, np.ndarray]

    @property
    def adapter(self) -> str:
        """Name of its adapter, empty for the base: `Client.session` needs it to go on."""
        return self.fingerprint.partition("/")[2].rpartition("@")[0]

    @classmethod
    def read(cls, client: Predictor, session_id: str, timeout: float | None = None) -> Self:
        """Reads a session from a server, a page a call.

        Args:
            client: Client of its tenant.
            session_id: Its name.
            timeout: Seconds for each call; the client's by default.

        Raises:
            RowError: There is no such session, or it has overwritten its oldest tokens.
            SessionError: It was changed while it was read.
            ServerError: As for `Client.predict`.
        """
        snapshots = list(_snapshots(client, session_id, timeout))
        pages = {name: np.stack([page[name] for _, page in snapshots]) for name in _PAGED}
        return cls(session_id, pages=pages, **snapshots[0][0])

    @classmethod
    def fetch(
        cls,
        client: Predictor,
        session_id: str,
        path: str | pathlib.Path,
        timeout: float | None = None,
    ) -> Self:
        """Reads a session from a server straight into a file, a page at a time.

        Choose it over `read` and `save` for long sessions: a page is all that is held in
        memory. Arguments and errors are those of `read`.

        Returns:
            The session, mapped from the file.
        """
        snapshots = _snapshots(client, session_id, timeout)
        whole, first = next(snapshots)
        pages = itertools.chain([first], (page for _, page in snapshots))
        _write(pathlib.Path(path), {"session_id": session_id, **whole}, pages)
        return cls.load(path)

    def restore(
        self,
        client: Predictor,
        session_id: str | None = None,
        *,
        ttl_ms: int = 0,
        pin: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Makes the session on a server; repeating it is safe.

        Args:
            client: Client of the tenant it shall belong to.
            session_id: Its name there; the old one by default.
            ttl_ms: Idle lifetime in ms; the artifact's by default.
            pin: Whether it never expires.
            timeout: Seconds for each call; the client's by default.

        Raises:
            RowError: It does not fit: another artifact, no page left, or the name is taken.
            ServerError: As for `Client.predict`.
        """
        name = self.session_id if session_id is None else session_id
        for page in range(len(self.pages["tokens"])):
            inputs = {
                "page": np.array([page], np.int32),
                "held": np.array([self.held], np.int32),
                "filled": np.array([self.filled], np.int32),
                "fingerprint": np.array([self.fingerprint.encode()], object),
                **{key: rows[page : page + 1] for key, rows in self.pages.items()},
                "page_bytes": np.array([self.pages["page_bytes"][page].tobytes()], object),
                "pin": np.array([pin], np.int32),
                "ttl_ms": np.array([ttl_ms], np.int64),
            }
            _call(client, "restore", name, inputs, timeout)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a file, whole or not at all, with a checksum for each page."""
        head = {name: getattr(self, name) for name in ("session_id", *_WHOLE)}
        count = len(self.pages["tokens"])
        pages = ({name: rows[n] for name, rows in self.pages.items()} for n in range(count))
        _write(pathlib.Path(path), head, pages)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Maps a file that `save` or `fetch` wrote into memory, and checks it.

        Raises:
            SessionError: It cannot be read, is damaged, or is something else.
        """
        path = pathlib.Path(path)
        try:
            head, record, offset = _read_head(path)
            pages = np.memmap(path, record, "r", offset)
            for page in pages:
                if _checksum(page) != page["crc32"]:
                    raise ValueError("a page does not match its checksum")
            size = len(pages[0]["tokens"])
            if len(pages) != -(-head["held"] // size):
                raise ValueError("pages are missing")
            return cls(**head, pages={name: pages[name] for name in _PAGED})
        except (OSError, KeyError, TypeError, ValueError, IndexError) as error:
            raise failures.SessionError(
                f"{path} is not a saved session, or is damaged ({type(error).__name__}: {error}). "
                "Expected a file that `SavedSession.save` or `tfkv sessions dump` wrote."
            ) from error


def _snapshots(
    client: Predictor, session_id: str, timeout: float | None
) -> Iterator[tuple[dict[str, Any], _Page]]:
    """What a server says of the whole session, and its pages, one after the other.

    Raises:
        RowError: There is no such session, or it cannot be read.
        SessionError: It was changed meanwhile.
    """
    whole: dict[str, Any] = {}
    count, size = 0, 1
    while not whole or count * size < whole["held"]:
        inputs = {"page": np.array([count], np.int32)}
        answer: Mapping[str, Any] = _call(client, "snapshot", session_id, inputs, timeout)
        said = {
            "held": int(answer["held"]),
            "filled": int(answer["filled"]),
            "fingerprint": answer["fingerprint"].decode(),
        }
        if whole and said != whole:
            raise failures.SessionError(
                f"Session {session_id!r} was changed while it was read. "
                "Let its callers rest, and read it again."
            )
        whole, count, size = said, count + 1, len(answer["tokens"])
        page_bytes = np.frombuffer(answer["page_bytes"], np.uint8)
        yield whole, {**{name: answer[name] for name in _PAGED}, "page_bytes": page_bytes}


def _write(path: pathlib.Path, head: Mapping[str, Any], pages: Iterable[_Page]) -> None:
    """Writes head and pages to a new file, which then takes its place."""
    number, part = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            for index, page in enumerate(pages):
                fields = [(name, page[name].dtype, page[name].shape) for name in _PAGED]
                record = np.zeros(1, [*fields, ("crc32", np.uint32)])[0]
                for name in _PAGED:
                    record[name] = page[name]
                record["crc32"] = _checksum(record)
                if index == 0:
                    descr = np.lib.format.dtype_to_descr(record.dtype)
                    text = json.dumps({**head, "record": descr}).encode()
                    file.write(_MAGIC + b"%08x\n" % zlib.crc32(text) + text + b"\n")
                file.write(record.tobytes())
        pathlib.Path(part).replace(path)
    except BaseException:
        pathlib.Path(part).unlink(missing_ok=True)
        raise


def _read_head(path: pathlib.Path) -> tuple[dict[str, Any], np.dtype, int]:
    """Head, type of a page's record, and where the first one begins.

    Raises:
        ValueError: The file is something else.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("another format")
        checksum, text = file.readline().strip(), file.readline()[:-1]
        if b"%08x" % zlib.crc32(text) != checksum:
            raise ValueError("its head does not match its checksum")
        offset = file.tell()
    head = json.loads(text)
    fields = [(name, dtype, *map(tuple, shape)) for name, dtype, *shape in head.pop("record")]
    return head, np.dtype(fields), offset


def _checksum(record: np.void) -> int:
    """CRC-32 of a page, its own checksum left out."""
    return zlib.crc32(record.tobytes()[: -record.dtype["crc32"].itemsize])


def file_name(session_id: str) -> str:
    """Name of a session's file in a directory of them."""
    return urllib.parse.quote(session_id, safe="") + SUFFIX


def _call(
    client: Predictor,
    signature: str,
    session_id: str,
    inputs: Mapping[str, np.ndarray],
    timeout: float | None,
) -> dict[str, np.ndarray]:
    """One row's answer.

    Raises:
        RowError: It was refused.
    """
    who = {"session_id": session_id, "tenant": client.tenant}
    named = {key: np.array([value.encode()], object) for key, value in who.items()}
    outputs = client.predict(signature, {**named, **inputs}, timeout)
    answer = {name: value[0] for name, value in outputs.items()}
    if answer["status"] != Status.OK:
        where = f"`{signature}` of session {session_id!r}"
        raise failures.row_error(int(answer["status"]), int(answer["detail"]), where)
    return answer

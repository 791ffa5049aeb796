"""Sessions as files: kept across a restart, or moved to another replica."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
import urllib.parse
import zipfile
from collections.abc import Mapping
from typing import Any, Protocol, Self

import numpy as np

from tfkv.errors import Status
from tfkv.serving import failures

#: What `snapshot` says of the whole session, and what it says page by page.
_WHOLE = ("held", "filled", "fingerprint")
_PAGED = ("tokens", "kinds", "logprobs", "data")
_FORMAT = 1


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
    it; with other weights, replay the tokens instead. A client that sends the session's
    tokens again from position 0 is answered from it, and pays only for what is new.

    Args:
        session_id: Its name.
        held: Tokens it holds.
        filled: Of those, how many have keys.
        fingerprint: Of the artifact.
        pages: Arrays by name, a row for each page: ``tokens``, ``kinds`` and ``logprobs``
            ``[pages, C]``, ``data`` uint8 ``[pages, page bytes]``.

    Example:
        >>> SavedSession.read(client, "ada").save("ada.npz")
        >>> SavedSession.load("ada.npz").restore(other_client)
    """

    session_id: str
    held: int
    filled: int
    fingerprint: str
    pages: dict[str, np.ndarray]

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
        whole: dict[str, Any] = {}
        pages: dict[str, list[np.ndarray]] = {name: [] for name in _PAGED}
        size = 1
        while not whole or len(pages["tokens"]) * size < whole["held"]:
            inputs = {"page": np.array([len(pages["tokens"])], np.int32)}
            answer = _call(client, "snapshot", session_id, inputs, timeout)
            said = {name: answer[name] for name in _WHOLE}
            if whole and said != whole:
                raise failures.SessionError(
                    f"Session {session_id!r} was changed while it was read. "
                    "Let its callers rest, and read it again."
                )
            whole = said
            for name, arrays in pages.items():
                arrays.append(answer[name])
            size = len(answer["tokens"])
        return cls(
            session_id,
            int(whole["held"]),
            int(whole["filled"]),
            whole["fingerprint"].decode(),
            {name: np.stack(arrays) for name, arrays in pages.items()},
        )

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
                "pin": np.array([pin], np.int32),
                "ttl_ms": np.array([ttl_ms], np.int64),
            }
            _call(client, "restore", name, inputs, timeout)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a file, whole or not at all: NumPy's ``.npz``, every part checksummed."""
        path = pathlib.Path(path)
        head = {name: getattr(self, name) for name in ("session_id", *_WHOLE)}
        text = json.dumps({"format": _FORMAT, **head})
        arrays: dict[str, Any] = {"head": np.array(text), **self.pages}
        number, part = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                np.savez(file, **arrays)
            pathlib.Path(part).replace(path)
        except BaseException:
            pathlib.Path(part).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Reads a file that `save` wrote.

        Raises:
            SessionError: It cannot be read, is damaged, or is something else.
        """
        try:
            with pathlib.Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                head = json.loads(str(file["head"]))
                pages = {name: file[name] for name in _PAGED}
            if head.pop("format") != _FORMAT:
                raise ValueError("another format version")
            return cls(**head, pages=pages)
        except (OSError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise failures.SessionError(
                f"{path} is not a saved session, or is damaged ({type(error).__name__}: {error}). "
                "Expected a file that `SavedSession.save` or `tfkv sessions dump` wrote."
            ) from error


def file_name(session_id: str) -> str:
    """Name of a session's file in a directory of them."""
    return urllib.parse.quote(session_id, safe="") + ".npz"


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

"""More sessions than a server has room for: the idle ones wait in files."""

from __future__ import annotations

import collections
import contextlib
import logging
import pathlib
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING

from tfkv.errors import RowError, Status, TfkvError
from tfkv.serving.retry import Deadline
from tfkv.serving.saved_session import SavedSession, file_name

if TYPE_CHECKING:
    from tfkv.serving.client import Client
    from tfkv.serving.session import Session

_log = logging.getLogger(__name__)


class OffloadTier:
    """Moves idle sessions of a client out to files, and back with their next call.

    Choose it where conversations pause for minutes and are many: when a call is answered
    with FULL, the session of this client that has rested longest is written to a file
    (memory-mapped when it is read, a checksum for each page) and closed on the server, and
    the call is made again. A session that waits in a file is restored before its next call,
    with the keys and values it had: nothing is computed again. Where a file cannot be used,
    because it is damaged or the server has other weights now, the session replays its
    transcript as after a restart.

    Only the client's own sessions move. Those of other clients, and pinned ones, stay.

    Args:
        client: Whose sessions.
        directory: Where the files go; made if missing. They hold the text of the sessions:
            protect it as you would a log of them.

    Reference:
        LMCache, https://github.com/LMCache/LMCache, keeps caches on disk likewise.
    """

    def __init__(self, client: Client, directory: str | pathlib.Path) -> None:
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        #: Sessions moved out, and brought back, so far.
        self.moved_out = self.moved_in = 0
        self._client = client
        self._guard = threading.Lock()
        # On the server, the one that has rested longest first.
        self._present: collections.OrderedDict[str, Session] = collections.OrderedDict()
        self._away: dict[str, pathlib.Path] = {}

    @property
    def waiting(self) -> int:
        """Sessions that wait in files."""
        return len(self._away)

    def touch(self, session: Session, deadline: Deadline) -> None:
        """Notes that a session is about to be called, and brings it back if it is away.

        Call it while the session is locked.
        """
        with self._guard:
            self._present[session.session_id] = session
            self._present.move_to_end(session.session_id)
            path = self._away.pop(session.session_id, None)
        if path is not None:
            self._bring_back(session, path, deadline)

    def forget(self, session_id: str) -> None:
        """Notes that a session was closed; its file goes."""
        with self._guard:
            self._present.pop(session_id, None)
            path = self._away.pop(session_id, None)
        if path is not None:
            path.unlink(missing_ok=True)

    def make_room(self) -> bool:
        """Moves out the session that has rested longest; False where none can be moved."""
        with contextlib.closing(self._resting()) as resting:
            return any(self._move_out(session) for session in resting)

    def _move_out(self, session: Session) -> bool:
        """Writes a session that is held to its file and frees it; False where it stays."""
        path = self.directory / file_name(session.session_id)
        try:
            SavedSession.fetch(self._client, session.session_id, path)
            session.close_quietly()
        except TfkvError as error:
            # Not there any more, or not to be read as a whole: another one may be.
            _log.info("Session %s stays: %s", session.session_id, error)
            path.unlink(missing_ok=True)
            return False
        with self._guard:
            self._away[session.session_id] = path
            self.moved_out += 1
        return True

    def _resting(self) -> Generator[Session, None, None]:
        """Sessions that nobody calls just now, the longest at rest first; each is locked, and
        is not on the server any more as far as this tier knows."""
        with self._guard:
            candidates = list(self._present.values())
        for session in candidates:
            with contextlib.ExitStack() as stack:
                if not session.hold(stack):
                    continue
                with self._guard:
                    self._present.pop(session.session_id, None)
                yield session

    def _bring_back(self, session: Session, path: pathlib.Path, deadline: Deadline) -> None:
        """Restores a session; where that fails, its next answer will be UNKNOWN."""
        try:
            saved = SavedSession.load(path)
            while True:
                try:
                    saved.restore(self._client, **session.lifetime, timeout=deadline.left())
                    break
                except RowError as error:
                    if error.status != Status.FULL or not self.make_room():
                        raise
            with self._guard:
                self.moved_in += 1
        except RowError as error:
            if error.status == Status.FULL:
                with self._guard:
                    self._away[session.session_id] = path  # another time
                raise
            _log.info("Session %s is replayed: %s", session.session_id, error)
        except TfkvError as error:
            _log.warning("Session %s is replayed: %s", session.session_id, error)
        path.unlink(missing_ok=True)

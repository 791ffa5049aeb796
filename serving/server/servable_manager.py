"""Which versions of the model are loaded, and which one a call gets."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

import grpc
from tensorflow_serving.apis import get_model_status_pb2

from tfkv.serving.server.call_error import CallError, not_found
from tfkv.serving.server.servable import Servable

_LOG = logging.getLogger(__name__)
_STATES = get_model_status_pb2.ModelVersionStatus

Loader = Callable[[int, pathlib.Path], Servable]
WarmUp = Callable[[Servable], None]


@dataclasses.dataclass
class _Version:
    state: int = _STATES.START
    error: CallError | None = None
    servable: Servable | None = None
    calls: int = 0


class ServableManager:
    """Polls a model directory and serves its newest version.

    Version directories are named by numbers and must appear complete, by rename. A new
    version loads while the old one serves; then new calls go to the new one, and the old
    is unloaded when its last call has ended. A version that fails is reported and not
    tried again; the old one goes on serving. Without any version directory all versions
    are unloaded, as TensorFlow Serving does.

    Args:
        name: Model name, for messages.
        model_dir: Directory of version directories, or one version directory.
        load: Makes a servable of version and path.
        warm_up: Warms a servable up; while it fails, the version stays LOADING.
        poll_seconds: Seconds between two looks at the directory; 0 = look once.

    Raises:
        CallError: By `acquire` and `states`, for versions that aren't there.
    """

    def __init__(
        self,
        name: str,
        model_dir: pathlib.Path,
        load: Loader,
        warm_up: WarmUp,
        poll_seconds: float = 1.0,
    ) -> None:
        self.name = name
        self._model_dir = model_dir
        self._load = load
        self._warm_up = warm_up
        self._poll_seconds = poll_seconds
        self._changed = threading.Condition()
        self._versions: dict[int, _Version] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Loads the newest version, then keeps polling in a thread.

        Raises:
            CallError: There is no version, or the newest one cannot be served.
        """
        if not self._directories():
            raise not_found(
                f"No versions of servable {self.name} found under base path {self._model_dir}. "
                "Expected version directories named by numbers, such as 1/saved_model.pb."
            )
        self.poll()
        newest = self._versions[max(self._versions)]
        if newest.error is not None:
            raise newest.error
        if self._poll_seconds > 0:
            self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)
            self._thread.start()

    def poll(self) -> None:
        """One look at the directory; loads and unloads what it asks for."""
        directories = self._directories()
        newest = max(directories, default=None)
        if newest is None:
            self._unload_all_but(None)
        elif newest not in self._served():
            known = self._versions.get(newest)
            if known is not None and known.error is not None:
                return
            if self._bring_up(newest, directories[newest]):
                self._unload_all_but(newest)

    def close(self, timeout: float | None = None) -> None:
        """Stops polling and unloads everything, once its calls have ended."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout)
        self._unload_all_but(None, timeout)

    @contextlib.contextmanager
    def acquire(self, name: str, version: int | None, label: str = "") -> Iterator[Servable]:
        """The servable of a call, which is not unloaded before the block ends.

        Args:
            name: Model name the client gave.
            version: Pinned version; None = the newest.
            label: Version label; the embedded server has none.

        Raises:
            CallError: NOT_FOUND, or INVALID_ARGUMENT for a label.
        """
        if label:
            raise CallError(
                grpc.StatusCode.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}"
            )
        with self._changed:
            served = self._served() if name == self.name else {}
            number = max(served, default=None) if version is None else version
            if number not in served:
                wanted = f"Latest({name})" if version is None else f"Specific({name}, {version})"
                raise not_found(f"Servable not found for request: {wanted}")
            entry = served[number]
            entry.calls += 1
        try:
            yield entry.servable  # type: ignore[misc]  # served entries have one
        finally:
            with self._changed:
                entry.calls -= 1
                self._changed.notify_all()

    def states(self, name: str, version: int | None) -> list[tuple[int, int, CallError | None]]:
        """Version, state and error of the versions seen so far, newest first.

        Raises:
            CallError: NOT_FOUND.
        """
        with self._changed:
            known = dict(self._versions) if name == self.name else {}
            if version is not None:
                if version not in known:
                    raise not_found(f"Could not find version {version} of model {name}")
                known = {version: known[version]}
            if not known:
                raise not_found(f"Could not find any versions of model {name}")
            return [(n, known[n].state, known[n].error) for n in sorted(known, reverse=True)]

    def _served(self) -> dict[int, _Version]:
        return {n: v for n, v in self._versions.items() if v.state == _STATES.AVAILABLE}

    def _directories(self) -> dict[int, pathlib.Path]:
        root = self._model_dir
        if (root / "saved_model.pb").exists():
            return {int(root.name) if root.name.isdecimal() else 1: root}
        try:
            children = [child for child in root.iterdir() if child.name.isdecimal()]
        except OSError:
            return {}
        return {int(child.name): child for child in children if child.is_dir()}

    def _bring_up(self, number: int, path: pathlib.Path) -> bool:
        entry = _Version(_STATES.LOADING)
        with self._changed:
            self._versions[number] = entry
        _LOG.info("Loading %s version %d from %s", self.name, number, path)
        servable = None
        failed_state = _STATES.END
        try:
            servable = self._load(number, path)
            failed_state = _STATES.LOADING  # a failing warmup record keeps it loading
            self._warm_up(servable)
        except Exception as error:
            if servable is not None:
                servable.close()
            _LOG.error("Version %d of %s cannot be served: %s", number, self.name, error)
            with self._changed:
                entry.error = (
                    error
                    if isinstance(error, CallError)
                    else CallError(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
                )
                entry.state = failed_state
            return False
        with self._changed:
            entry.servable = servable
            entry.state = _STATES.AVAILABLE
        _LOG.info("Serving %s version %d", self.name, number)
        return True

    def _unload_all_but(self, keep: int | None, timeout: float | None = None) -> None:
        for number, entry in sorted(self._served().items()):
            if number != keep:
                self._unload(number, entry, timeout)

    def _unload(self, number: int, entry: _Version, timeout: float | None) -> None:
        with self._changed:
            entry.state = _STATES.UNLOADING
            drained = self._changed.wait_for(lambda: not entry.calls, timeout)
            servable, entry.servable = entry.servable, None
        if drained and servable is not None:  # closing under a running call would crash
            servable.close()
        with self._changed:
            entry.state = _STATES.END
        _LOG.info("Unloaded %s version %d", self.name, number)

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll_seconds):
            start = time.monotonic()
            try:
                self.poll()
            except Exception:
                _LOG.exception("Polling %s failed", self._model_dir)
            _LOG.debug("Polled in %.3f s", time.monotonic() - start)

"""Caches for a model that knows nothing of them: its layers find their own while it runs."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import Any, Self

import tensorflow as tf

from tfkv.errors import CacheError
from tfkv.layers.store import State

_CURRENT: contextvars.ContextVar[Continuation | None] = contextvars.ContextVar(
    "tfkv_continuation", default=None
)


class Continuation:
    """One chunk on its way through a model, and the caches of the layers that it meets.

    Inside ``with Continuation(...)`` a layer with a cache that is called without a state takes
    the next one, in the order of calls, and leaves what becomes of it; it returns an empty state,
    as in training, so that a functional model sees the outputs that it was built with. It holds
    for the thread that entered it, and for what is traced there.

    Args:
        positions: int32 ``[B, T]``, absolute, of the chunk; −1 = padding.
        states: One for each call of a layer with a cache, in their order; None = empty ones, made
            as the layers come.
        encodes: Whether layers that attend to an encoded sequence keep what they are given, or
            read what they kept.

    Attributes:
        positions: Likewise.
        encodes: Likewise.
        layers: Layers that were called, in their order.
        after: Their states after the chunk.
    """

    def __init__(
        self, positions: tf.Tensor, states: Sequence[State] | None, encodes: bool = False
    ) -> None:
        self.positions = positions
        self.encodes = encodes
        self.layers: list[Any] = []
        self.after: list[State] = []
        self._states = states
        self._named: dict[str, State] = {}

    @classmethod
    def current(cls) -> Continuation | None:
        """The one that holds here."""
        return _CURRENT.get()

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)

    def take(self, layer: Any, name: str) -> State:
        """The state of a layer before the chunk.

        Args:
            layer: Which; it must `give` one back.
            name: What layers that share its keys and values know it by.

        Raises:
            CacheError: More layers ask than did when the states were made.
        """
        number = len(self.layers)
        if self._states is None:
            state = layer.init_state(self.positions.shape[0])
        elif number < len(self._states):
            state = self._states[number]
        else:
            raise CacheError(
                f"A model must call the same layers each time: there are {len(self._states)} "
                f"caches, and layer {layer.name!r} asks for one more. Make the states anew."
            )
        self.layers.append(layer)
        self._named[name] = state
        return state

    def give(self, state: State) -> None:
        """The state after the chunk of the layer that took one last."""
        self.after.append(state)

    def of(self, name: str) -> State:
        """The state before the chunk of a layer that was called already.

        Raises:
            CacheError: There is none of this name.
        """
        if name not in self._named:
            known = ", ".join(map(repr, self._named)) or "none"
            raise CacheError(
                f"`share_kv_with` must name a layer that was called before. Received: "
                f"share_kv_with={name!r}; called so far: {known}."
            )
        return self._named[name]

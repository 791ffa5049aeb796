"""Typed look-ups in the key/value part of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfkv.errors import ModelSourceError

if TYPE_CHECKING:
    from gguf import GGUFReader


class Metadata:
    """What a file says of itself.

    Args:
        name: Of the file, for messages.
        reader: Has it open.
    """

    def __init__(self, name: str, reader: GGUFReader) -> None:
        self.name = name
        self._fields = reader.fields
        self._values: dict[str, Any] = {}  # a vocabulary takes a while to decode

    @property
    def architecture(self) -> str:
        """Of the model, as llama.cpp calls it; its own keys begin with it."""
        return str(self.get("general.architecture", str))

    def find(self, key: str) -> Any:
        """The value, or ``None`` where the file has no such key."""
        if key not in self._values:
            field = self._fields.get(key)
            self._values[key] = None if field is None else field.contents()
        return self._values[key]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value as `kind`; without a default the key is required."""
        value = self.find(key)
        if value is None:
            if default is None:
                raise ModelSourceError(
                    f"{self.name} lacks the metadata {key!r}. Expected a complete model."
                )
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            hint = " Values that differ by layer are not supported." if kind is int else ""
            raise ModelSourceError(
                f"Metadata {key!r} of {self.name} must be of type {kind.__name__}. "
                f"Received: {type(value).__name__}.{hint}"
            )
        return value

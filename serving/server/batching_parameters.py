"""The batching parameters file of TensorFlow Serving."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    message_factory,
    text_format,
    wrappers_pb2,
)

from tfkv.errors import ConfigError

_WRAPPER_FILE = "google/protobuf/wrappers.proto"
_FIELDS = (
    ("max_batch_size", 1, "Int64Value"),
    ("batch_timeout_micros", 2, "Int64Value"),
    ("max_enqueued_batches", 3, "Int64Value"),
    ("num_batch_threads", 4, "Int64Value"),
    ("thread_pool_name", 5, "StringValue"),
    ("allowed_batch_sizes", 6, None),
    ("pad_variable_length_inputs", 7, "bool"),
)


def _message_class() -> Any:
    """Message with the fields of `BatchingParameters`, in a pool of its own."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="tfkv/batching_parameters.proto",
        package="tfkv",
        syntax="proto3",
        dependency=[_WRAPPER_FILE],
    )
    message = file.message_type.add(name="BatchingParameters")
    for name, number, kind in _FIELDS:
        entry = message.field.add(name=name, number=number, label=field.LABEL_OPTIONAL)
        if kind is None:
            entry.type, entry.label = field.TYPE_INT64, field.LABEL_REPEATED
        elif kind == "bool":
            entry.type = field.TYPE_BOOL
        else:
            entry.type, entry.type_name = field.TYPE_MESSAGE, f".google.protobuf.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tfkv.BatchingParameters"))


@dataclasses.dataclass(frozen=True)
class BatchingParameters:
    """How ``--enable_batching`` forms batches.

    Args:
        max_batch_size: Most rows in a batch.
        batch_timeout_micros: Microseconds an open batch waits for company.
        max_enqueued_batches: Batches a queue holds; beyond it calls get UNAVAILABLE.
        num_batch_threads: Batches a queue runs at once, 0 = one a CPU.
        allowed_batch_sizes: Ascending sizes a batch is padded to; the last equals
            ``max_batch_size``. Empty = no padding.
        pad_variable_length_inputs: Pad the axes behind the batch to the widest call.

    Raises:
        ConfigError: A value is out of range or two do not fit together.

    Example:
        >>> BatchingParameters.from_text("max_batch_size { value: 8 }").max_batch_size
        8
    """

    max_batch_size: int = 1000
    batch_timeout_micros: int = 0
    max_enqueued_batches: int = 10
    num_batch_threads: int = 0
    allowed_batch_sizes: tuple[int, ...] = ()
    pad_variable_length_inputs: bool = False

    def __post_init__(self) -> None:
        sizes = self.allowed_batch_sizes
        if sizes and list(sizes) != sorted(set(sizes)):
            raise ConfigError(
                "`allowed_batch_sizes` entries must be monotonically increasing. "
                f"Received: allowed_batch_sizes={sizes}."
            )
        if sizes and sizes[-1] != self.max_batch_size:
            raise ConfigError(
                "Last entry in `allowed_batch_sizes` must match `max_batch_size`; last entry "
                f"was {sizes[-1]}; expected {self.max_batch_size}."
            )
        for name, least in (
            ("max_batch_size", 1),
            ("batch_timeout_micros", 0),
            ("max_enqueued_batches", 1),
            ("num_batch_threads", 0),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"`{name}` must be at least {least}. Received: {name}={getattr(self, name)}."
                )

    @property
    def threads(self) -> int:
        """Batches a queue runs at once."""
        return self.num_batch_threads or os.cpu_count() or 1

    def padded(self, rows: int) -> int:
        """The smallest allowed size that holds so many rows."""
        return next((size for size in self.allowed_batch_sizes if size >= rows), rows)

    @classmethod
    def from_text(cls, text: str) -> BatchingParameters:
        """Parses the text-format proto.

        Raises:
            ConfigError: Not a batching parameters file.
        """
        message = _message_class()()
        try:
            text_format.Parse(text, message)
        except text_format.ParseError as error:
            raise ConfigError(f"Not a batching parameters file: {error}") from error
        values: dict[str, Any] = {
            "allowed_batch_sizes": tuple(message.allowed_batch_sizes),
            "pad_variable_length_inputs": message.pad_variable_length_inputs,
        }
        for name, _, kind in _FIELDS:
            if kind == "Int64Value" and message.HasField(name):
                values[name] = getattr(message, name).value
        return cls(**values)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> BatchingParameters:
        """Reads a parameters file.

        Raises:
            ConfigError: The file is missing or malformed.
        """
        try:
            return cls.from_text(pathlib.Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"Cannot read the batching parameters file {path}: {error}"
            ) from error

"""State that lives in the graph and never on disk."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import tensorflow as tf

#: Two engines of one process must not meet in one resource.
_SERIAL = itertools.count()


class TransientVariable(tf.saved_model.experimental.TrackableResource):
    """A resource variable that is zeroed at load and never checkpointed.

    Choose it for caches, sessions and counters: a pool of any size costs no byte on disk,
    and every load of an artifact starts clean.

    Args:
        name: What it holds; a serial number makes the resource's shared name unique.
        shape: Static shape.
        dtype: Any fixed-size dtype.
        initial: Makes the first value; zeros where left out.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: tf.DType,
        initial: Callable[[], tf.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.dtype = tf.as_dtype(dtype)
        self._name = unique_name(name)
        self._initial = initial
        self._resource_handle = self._create_resource()
        self._initialize()

    def _create_resource(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(
            dtype=self.dtype, shape=self.shape, shared_name=self._name, container="tfkv"
        )

    def _initialize(self) -> None:
        value = self._initial() if self._initial else self._zeros()
        tf.raw_ops.AssignVariableOp(resource=self.resource_handle, value=value)

    def _zeros(self) -> tf.Tensor:
        # tf.zeros would be folded into a constant, and a pool would be held twice.
        return tf.raw_ops.Empty(shape=self.shape, dtype=self.dtype, init=True)

    def _destroy_resource(self) -> None:
        if sys.is_finalizing():
            return
        tf.raw_ops.DestroyResourceOp(resource=self.resource_handle, ignore_lookup_error=True)

    def read(self) -> tf.Tensor:
        """The current value."""
        value = tf.raw_ops.ReadVariableOp(resource=self.resource_handle, dtype=self.dtype)
        return tf.ensure_shape(value, self.shape)

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the value; in place inside an XLA computation."""
        tf.raw_ops.AssignVariableOp(resource=self.resource_handle, value=value)

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        size = self.dtype.size
        for length in self.shape:
            size *= length
        return size


def unique_name(name: str) -> str:
    """A shared name that no other resource of this process has."""
    return f"{name}_{next(_SERIAL)}"

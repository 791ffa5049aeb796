"""The adapters of an artifact by name, and which session has which."""

from __future__ import annotations

import re
from collections.abc import Mapping

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.export.transient import TransientVariable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: Detail of a row refused as ADAPTER.
NO_SUCH, ANOTHER = 0, 1


def check_name(name: str) -> None:
    """Raises `ConfigError` where an adapter cannot be called so."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "An adapter's name must be up to 64 letters, digits, '.', '_' and '-', and begin with "
            f"a letter or a digit. Received: {name!r}."
        )


class AdapterTable:
    """Adapters as numbers, from 1 in the order of the artifact's list; 0 is the base.

    A session has the adapter of the call that made it, as long as it lives: keys and values of
    one mean nothing to another.

    Args:
        fingerprints: Of each adapter, by name.
        slots: Sessions held at once; row `slots` is the spare.

    Attributes:
        of_slot: Number of each session's adapter, where there are adapters.
    """

    def __init__(self, fingerprints: Mapping[str, str], slots: int) -> None:
        self.fingerprints = dict(fingerprints)
        self.of_slot = (
            TransientVariable("session_adapter", (slots + 1,), tf.int32) if fingerprints else None
        )

    def number(self, names: tf.Tensor) -> tf.Tensor:
        """Of ``names [B]``, int32; −1 = there is no such adapter."""
        known = tf.constant(["", *self.fingerprints])
        return _index(names, known)

    def read(self, slots: tf.Tensor) -> tf.Tensor:
        """Adapters of the sessions in ``slots [B]``, int32."""
        if self.of_slot is None:
            return tf.zeros_like(slots, tf.int32)
        return tf.gather(self.of_slot.read(), slots)

    def write(self, slots: tf.Tensor, numbers: tf.Tensor) -> None:
        """Notes the adapters of new sessions, ``[n]`` each."""
        if self.of_slot is not None:
            rows = slots[:, tf.newaxis]
            self.of_slot.assign(tf.tensor_scatter_nd_update(self.of_slot.read(), rows, numbers))

    # --- who may share pages -------------------------------------------------------------

    def owner(self, tenant: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """A number for each pair of a tenant's number, int64 ``[B]``, and an adapter's: only
        sessions that agree in it share pages."""
        if not self.fingerprints:
            return tenant
        return tenant * (len(self.fingerprints) + 1) + tf.cast(tf.maximum(number, 0), tf.int64)

    def of_owner(self, owner: tf.Tensor) -> tf.Tensor | None:
        """The adapter in what `owner` made, int32 ``[B]``; None where there are no adapters."""
        if not self.fingerprints:
            return None
        return tf.cast(tf.math.floormod(owner, len(self.fingerprints) + 1), tf.int32)

    # --- snapshots -----------------------------------------------------------------------

    def marks(self, fingerprint: str) -> tf.Tensor:
        """What a snapshot of a session says of its artifact, by adapter: string ``[n + 1]``."""
        return tf.constant([fingerprint, *self._marks(fingerprint)])

    def of_mark(self, marks: tf.Tensor, fingerprint: str) -> tf.Tensor:
        """Adapters by what a snapshot says, ``[B]``; −1 = of another artifact, or of an adapter
        that this one does not have."""
        return _index(marks, self.marks(fingerprint))

    def _marks(self, fingerprint: str) -> list[str]:
        return [f"{fingerprint}/{name}@{own}" for name, own in self.fingerprints.items()]


def _index(values: tf.Tensor, known: tf.Tensor) -> tf.Tensor:
    """Where each of ``values [B]`` is in ``known [n]``, int32; −1 = nowhere."""
    same = tf.cast(values[:, tf.newaxis] == known, tf.int32)
    at = tf.argmax(same, axis=1, output_type=tf.int32)
    return tf.where(tf.reduce_max(same, axis=1) > 0, at, -1)

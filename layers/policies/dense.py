"""Keep everything."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.entry_layout import EntryLayout
from tfkv.layers.policies.cache_policy import CachePolicy, round_up


@dataclasses.dataclass(frozen=True)
class Dense(CachePolicy):
    """Stores every token of the session and shows all of them to every query.

    Choose it whenever the memory allows: it is exact, and everything (truncate, sharing
    of prefixes, speculation) works with it.
    """

    name = "dense"

    def layout(self, capacity: int, slack: int, page_size: int = 1) -> EntryLayout:
        del slack
        return EntryLayout(round_up(capacity, page_size))

    def first_visible(self, positions: tf.Tensor) -> tf.Tensor:
        return tf.zeros_like(positions)

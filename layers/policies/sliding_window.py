"""Keep the newest tokens, and the first few."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.entry_layout import EntryLayout
from tfkv.layers.policies.cache_policy import CachePolicy, round_up


@dataclasses.dataclass(frozen=True)
class SlidingWindow(CachePolicy):
    """Each query sees itself and the `window` − 1 tokens before it, and the sinks.

    Choose it where memory must not grow with the session. A model that was trained with
    full attention loses what leaves the window; a few sinks keep it from losing its
    footing as well.

    Keys stay rotated at their true positions; the ring holds the window and one chunk, so
    that a chunk's first query still finds all that its window covers.

    Args:
        window: Tokens seen, the query itself included; at least 1.
        sinks: First tokens that are never dropped.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Mistral 7B, https://arxiv.org/abs/2310.06825; sinks: StreamingLLM,
        https://arxiv.org/abs/2309.17453
    """

    name = "sliding_window"
    window: int = 1024
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"`{name}` must be at least {least}. Received: {name}={value!r}.")

    @property
    def bounded(self) -> bool:
        return True

    def layout(self, capacity: int, slack: int, page_size: int = 1) -> EntryLayout:
        del capacity
        sinks = round_up(self.sinks, page_size)
        return EntryLayout(sinks + round_up(self.window + slack, page_size), sinks)

    def first_visible(self, positions: tf.Tensor) -> tf.Tensor:
        return positions - (self.window - 1)

    def rollback(self, layout: EntryLayout) -> int:
        return layout.ring - self.window

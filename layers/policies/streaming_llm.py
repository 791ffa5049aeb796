"""Keep the newest tokens and the first few, and let positions never grow."""

from __future__ import annotations

import dataclasses

from tfkv.layers.policies.sliding_window import SlidingWindow


@dataclasses.dataclass(frozen=True)
class StreamingLLM(SlidingWindow):
    """A sliding window with attention sinks whose positions are those in the cache.

    Choose it for sessions without an end: memory is constant, and no query is ever further
    from a key than sinks and window together, however long the session has become. So the
    session may outgrow the trained context; what has left the window is forgotten.

    A query looks at the window from its own position, and at the sinks as if it stood right
    behind a full cache, at ``min(position, sinks + window - 1)``. That is the same as to keep
    keys unrotated and to rotate them by their place in the cache: rotary embedding sees
    distances only. Keys are stored rotated once, and nothing is rotated again when the window
    moves on. A layer without rotary embedding treats it as a sliding window with sinks.

    Args:
        window: Tokens seen besides the sinks, the query itself included; at least 1.
        sinks: First tokens that are never dropped.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Xiao et al., https://arxiv.org/abs/2309.17453, and its code,
        https://github.com/mit-han-lab/streaming-llm.
    """

    name = "streaming_llm"
    window: int = 1020
    sinks: int = 4

    @property
    def furthest(self) -> int:
        return self.sinks + self.window - 1

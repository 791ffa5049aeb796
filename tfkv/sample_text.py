"""Real text that every Python has, so that measurements need no download."""

from __future__ import annotations

import numpy as np

from tfkv.errors import ConfigError


def language_reference() -> str:
    """Python's language reference, from the standard library: English prose with some code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def passages(ids: np.ndarray, count: int, tokens: int) -> list[np.ndarray]:
    """So many stretches of ``ids [M]``, spread evenly, none of which overlap.

    Raises:
        ConfigError: The text is too short.
    """
    if len(ids) < count * tokens:
        raise ConfigError(
            f"`text` must hold {count} passages of {tokens} tokens. Received: {len(ids)} "
            "tokens. Give a longer text, or ask for less."
        )
    stride = len(ids) // count
    return [ids[first : first + tokens] for first in range(0, stride * count, stride)]

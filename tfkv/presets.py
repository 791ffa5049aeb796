"""Caches by what they are for: names for a policy, a codec and the sizes that go with them.

Standard library only. The figures of each are in docs/choosing-a-cache.md.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from tfkv.config import EngineConfig
from tfkv.errors import ConfigError

__all__ = ["PRESETS", "Preset", "get"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A cache for one kind of use.

    Args:
        name: What it is asked for by.
        use: What it is for, and what it gives up.
        cache: Cache string; every one works in an artifact, without a calibration.
        capacity: Most tokens a session stores.
        length: Tokens of a session that it is meant for, and measured at.
        slots: Sessions held at once.
        batch_sizes: Compiled batch sizes.
    """

    name: str
    use: str
    cache: str
    capacity: int
    length: int
    slots: int = EngineConfig.slots
    batch_sizes: tuple[int, ...] = EngineConfig.batch_sizes

    def engine(self) -> EngineConfig:
        """What to export; change a field with ``dataclasses.replace``.

        Example:
            >>> get("chat").engine().capacity
            2048
        """
        return EngineConfig(
            cache=self.cache,
            capacity=self.capacity,
            slots=self.slots,
            batch_sizes=self.batch_sizes,
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as data."""
        return dataclasses.asdict(self)


_ALL = (
    Preset(
        name="chat",
        use="live conversations; loses next to nothing",
        cache="dense+int8",
        capacity=2048,
        length=2048,
    ),
    Preset(
        name="summarise",
        use="a text and its summary; loses next to nothing",
        cache="dense+int8",
        capacity=1024,
        length=1024,
        slots=16,
    ),
    Preset(
        name="code",
        use="completion of code; loses next to nothing",
        cache="dense+int8",
        capacity=512,
        length=512,
        slots=16,
    ),
    Preset(
        name="long_document",
        use="8k to 32k tokens; what leaves the window of 4k is forgotten",
        cache="streaming_llm(window=4092,sinks=4)+int8",
        capacity=4096,
        length=8192,
        slots=4,
        batch_sizes=(1, 4),
    ),
    Preset(
        name="very_long",
        use="sessions without an end; what leaves the window of 2k is forgotten",
        cache="streaming_llm(window=2044,sinks=4)+k8v4",
        capacity=2048,
        length=65_536,
    ),
    Preset(
        name="throughput",
        use="many long prompts that end with their question; a quarter of 4k is kept",
        cache="snapkv(budget=1024,interval=256,whole_prompt=False)+int8",
        capacity=4096,
        length=4096,
        slots=32,
        batch_sizes=(1, 4, 8, 16),
    ),
)

#: By name.
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def get(name: str) -> Preset:
    """The preset of a name.

    Raises:
        ConfigError: There is none.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"There is no preset {name!r}.{hint} Known presets: {', '.join(PRESETS)}. "
        "`tfkv presets` shows them."
    )

"""Keep more in the first layers than in the last."""

from __future__ import annotations

import dataclasses
from typing import Self

from tfkv.errors import ConfigError
from tfkv.layers.policies.cache_policy import BudgetTables
from tfkv.layers.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with a budget for each layer that falls evenly from the first layer to the last.

    Choose it over SnapKV where early layers spread their attention and late ones do not; the
    budgets of all layers together are those of SnapKV to the entry.

    Args:
        budget: Entries of each KV head, mean over layers.
        beta: The last layer keeps a share of 1 / beta of the mean beyond the window.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Cai et al., PyramidKV, https://arxiv.org/abs/2406.02069, and its code,
        https://github.com/Zefan-Cai/KVCache-Factory.
    """

    name = "pyramid_kv"
    window: int = 8
    kernel_size: int = 7
    pooling: str = "max"
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.beta, int) or self.beta < 1:
            raise ConfigError(f"`beta` must be at least 1. Received: beta={self.beta!r}.")
        if (self.budget - self.window) // self.beta < self.sinks:
            raise ConfigError(
                f"`budget` must leave the last layer its {self.sinks} sinks: at least "
                f"{self.beta * self.sinks + self.window}. Received: budget={self.budget}."
            )

    def at_layer(self, layer: int, layers: int, heads: int, tables: BudgetTables | None) -> Self:
        del heads, tables
        return dataclasses.replace(self, budget=self.budgets_of(layers)[layer], beta=1)

    def budgets_of(self, layers: int) -> list[int]:
        """Budget of each layer; they add up to ``layers * budget`` exactly."""
        share = self.budget - self.window
        if layers == 1:
            return [self.budget]
        least = share // self.beta
        most = 2 * share - least
        found = [most - layer * (most - least) // (layers - 1) for layer in range(layers)]
        # What rounding took or gave goes to the first layers, one each.
        spare = layers * share - sum(found)
        step = 1 if spare > 0 else -1
        for layer in range(abs(spare)):
            found[layer % layers] += step
        return [entries + self.window for entries in found]

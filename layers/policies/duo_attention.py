"""Keep everything in the heads that look far, sinks and newest tokens in the others."""

from __future__ import annotations

import dataclasses
from typing import Self

from tfkv.errors import ConfigError
from tfkv.layers.policies.baselines import RecentTokens
from tfkv.layers.policies.cache_policy import BudgetTables


@dataclasses.dataclass(frozen=True)
class DuoAttention(RecentTokens):
    """Retrieval heads and streaming heads.

    Choose it where a fixed half of the cache has to go and nothing may be looked at: no score
    is computed, and no query is kept.

    Args:
        budget: Entries of a retrieval head: the longest session that it remembers whole.
        sinks: First tokens that a streaming head keeps.
        recent: Newest tokens that a streaming head keeps.
        share: KV heads that are retrieval heads, from 0 to 1; those with the largest share of
            the calibration's table. The paper trains a gate for each head instead.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Xiao et al., DuoAttention, https://arxiv.org/abs/2410.10819.
    """

    name = "duo_attention"
    budget: int = 4096
    sinks: int = 64
    recent: int = 256
    share: float = 0.5
    caps: str = "kvzip"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"`share` must be from 0 to 1. Received: share={self.share!r}.")
        super().__post_init__()

    def at_layer(self, layer: int, layers: int, heads: int, tables: BudgetTables | None) -> Self:
        if tables is None:
            return self
        weights = tables.shares(self.caps, self.budget)
        places = [(row, head) for row in range(layers) for head in range(heads)]
        places.sort(key=lambda place: -weights[place[0]][place[1]])
        whole = set(places[: round(self.share * len(places))])
        budgets = tuple(
            self.budget if (layer, head) in whole else self.guarded for head in range(heads)
        )
        return dataclasses.replace(self, budgets=budgets, caps="")

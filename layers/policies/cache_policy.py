"""What a cache retains: the interface of every policy."""

from __future__ import annotations

import abc
import dataclasses
from typing import Protocol

import tensorflow as tf

from tfkv.layers.entry_layout import EntryLayout


class BudgetTables(Protocol):
    """How a calibration shares budgets out between the KV heads of a model."""

    def shares(self, table: str, budget: int) -> list[list[float]]:
        """What share of all entries each KV head of each layer is worth, ``[L][K]``, where
        they keep `budget` entries in the mean.

        Raises:
            ConfigError: There is no such table.
        """

    def budgets(self, table: str, budget: int, guarded: int) -> list[list[int]]:
        """Entries of each KV head of each layer, ``[L][K]``: `budget` in the mean, to the
        entry, and no less than `guarded` in each.

        Raises:
            ConfigError: There is no such table.
        """


@dataclasses.dataclass(frozen=True)
class CachePolicy(abc.ABC):
    """Decides which tokens of a session stay, and which of them a query sees.

    A policy owns no keys or values and no variables; it is pure arithmetic on positions,
    so that dense stores and pages share it.

    Class attributes:
        name: Its name in a cache string.
        shareable: Whether a stored page depends on the tokens before it alone, so that
            sessions may share it.
        chunk_invariant: Whether the result is the same however the prompt is cut.
        evicts: Whether it is an `EvictingPolicy`.
        selects: Whether a token that is read alone looks at some pages only, as of `Quest`.
        extrapolates: Whether it foresees the scores of queries to come from how they turn.
    """

    name = ""
    shareable = True
    chunk_invariant = True
    evicts = False
    selects = False
    extrapolates = False

    @abc.abstractmethod
    def layout(self, capacity: int, slack: int, page_size: int = 1) -> EntryLayout:
        """Entries of a session.

        Args:
            capacity: Most tokens the session stores where the policy does not say.
            slack: Tokens of the largest chunk; so many can be taken back.
            page_size: Entries and sinks are multiples of it (axis C).
        """

    @abc.abstractmethod
    def first_visible(self, positions: tf.Tensor) -> tf.Tensor:
        """Oldest position that a query at each of `positions` sees, sinks apart; int32."""

    @property
    def sinks(self) -> int:
        """First positions that every query sees."""
        return 0

    @property
    def furthest(self) -> int | None:
        """Position from which later queries look at the sinks, too; None = from their own.

        Where it is a number, a session may outgrow the trained context.
        """
        return None

    @property
    def bounded(self) -> bool:
        """Whether the session may outgrow its entries without losing what it needs."""
        return False

    @property
    def together(self) -> int:
        """Neighbouring tokens that a store reads together."""
        return 1

    def at_layer(
        self, layer: int, layers: int, heads: int, tables: BudgetTables | None
    ) -> CachePolicy:
        """The policy of one layer of a model, where layers differ.

        Args:
            layer: Which.
            layers: Number of layers (axis L).
            heads: KV heads (axis K).
            tables: A calibration of the model.
        """
        del layer, layers, heads, tables
        return self

    def rollback(self, layout: EntryLayout) -> int:
        """Tokens that can be taken back; −1 = all."""
        del layout
        return -1

    def __str__(self) -> str:
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        given = [
            f"{name}={getattr(self, name)!r}".replace(" ", "")
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        return f"{self.name}({','.join(given)})" if given else self.name


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple

"""What every kind of task shares: contexts, questions about them, and hay to hide facts in."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tfkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Question:
    """Asked after a context was read.

    Attributes:
        tokens: Token ids of what is asked.
        answer: Token ids that have to follow greedily.
        depth: Where what it asks for stands, from 0 = first token of the context to 1 = last;
            None where that is everywhere.
    """

    tokens: list[int]
    answer: list[int]
    depth: float | None = None


@dataclasses.dataclass(frozen=True)
class Context:
    """A text and what can be asked about it.

    Attributes:
        tokens: int32 ``[S]``.
        questions: Each is asked of the context alone, as if no other had been.
    """

    tokens: np.ndarray
    questions: list[Question]


class Hay:
    """Real text that facts are hidden in.

    Args:
        tokens: Token ids of the text.
        encode: Token ids of a string.
    """

    def __init__(self, tokens: np.ndarray, encode: Callable[[str], Sequence[int]]) -> None:
        self.tokens = np.asarray(tokens, np.int32)
        self._encode = encode

    def encode(self, text: str) -> list[int]:
        """Token ids of a string."""
        return [int(token) for token in self._encode(text)]

    def stretches(self, length: int, count: int) -> list[np.ndarray]:
        """So many stretches of `length` tokens, spread evenly over the text; in a short text
        they overlap.

        Raises:
            ConfigError: The text is shorter than one.
        """
        room = len(self.tokens) - length
        if room < 0:
            raise ConfigError(
                f"`text` must hold {length} tokens, the length of a task. Received: "
                f"{len(self.tokens)} tokens. Give a longer text, or shorter tasks."
            )
        starts = np.arange(count) * (room // max(count - 1, 1))
        return [self.tokens[start : start + length] for start in starts]

    def hide(
        self, stretch: np.ndarray, facts: Sequence[str], depths: Sequence[float]
    ) -> np.ndarray:
        """A stretch with facts in it, no longer than before: its end makes room for them.

        Args:
            stretch: Token ids ``[S]``.
            facts: What to hide, in the order of their depths.
            depths: Share of the hay before each.

        Returns:
            int32 ``[S]``.

        Raises:
            ConfigError: The stretch is too short.
        """
        hidden = [self.encode(fact) for fact in facts]
        room = len(stretch) - sum(map(len, hidden))
        if room < len(facts):
            raise ConfigError(
                f"A task's length must hold {len(facts)} facts. Received: a length of "
                f"{len(stretch)}."
            )
        cuts = (room * np.array(depths) + 1e-6).astype(int)  # a third of 900 is 300
        pieces = np.split(stretch[:room], cuts)
        told = [part for pair in zip(pieces, [*hidden, []], strict=True) for part in pair]
        return np.concatenate(told).astype(np.int32)


def evenly(count: int) -> list[float]:
    """So many depths, as far from each other as from the ends."""
    return [float(depth) for depth in np.linspace(0, 1, count + 2)[1:-1]]


def drawn(random: np.random.Generator, words: Sequence[str], count: int) -> list[str]:
    """So many different words.

    Raises:
        ConfigError: There are not as many.
    """
    if not 1 <= count <= len(words):
        raise ConfigError(
            f"`depths` must be from 1 to {len(words)}, so that all facts differ. Received: {count}."
        )
    return [str(word) for word in random.choice(words, count, replace=False)]


def numbers(random: np.random.Generator, digits: int, count: int) -> list[int]:
    """So many different numbers of so many digits."""
    choice = random.choice(np.arange(10 ** (digits - 1), 10**digits), count, replace=False)
    return [int(number) for number in choice]


class Task(abc.ABC):
    """A kind of task: makes contexts with questions whose answers are in them.

    A subclass is one file and one line in `TASKS`. It draws everything from the seed, and asks
    so that the model has only to copy: what is measured is the cache, not the model.
    """

    #: Its name on the command line.
    name: str

    @abc.abstractmethod
    def contexts(
        self, hay: Hay, length: int, count: int, depths: int = 5, seed: int = 0
    ) -> list[Context]:
        """Makes contexts.

        Args:
            hay: Text to hide facts in.
            length: Tokens of each context.
            count: Contexts; where a context has a single question, so many for each depth.
            depths: Places that are asked for, spread evenly.
            seed: Of all that is drawn.

        Raises:
            ConfigError: The text is too short, or a context cannot hold its facts.
        """

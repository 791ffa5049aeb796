"""What every method has to beat: to keep or to read at random, and the newest."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen
from tfkv.layers.policies.quest import Quest
from tfkv.layers.shapes import shape_of


@dataclasses.dataclass(frozen=True)
class RandomEviction(EvictingPolicy):
    """Any entries, whatever they hold: a baseline for measurements, not to be served.

    Args:
        recent: Newest tokens that are never evicted.
        seed: Of the choice; the same in every run.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "random_eviction"
    recent: int = 32
    seed: int = 0

    def score(self, seen: Seen) -> tf.Tensor:
        # By position, so that a token that survived once is as likely to as before.
        heads = tf.range(seen.positions.shape[1])[:, tf.newaxis]
        return _mixed(seen.positions * 7919 + heads * 104729 + self.seed)


@dataclasses.dataclass(frozen=True)
class RecentTokens(EvictingPolicy):
    """The newest entries: `SlidingWindow` with sinks, evicted when the others evict.

    Choose it to compare methods that keep a budget; to serve, `SlidingWindow` shares pages.

    Args:
        recent: Newest tokens that are never evicted; all that stay are.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "recent_tokens"
    recent: int = 0

    def score(self, seen: Seen) -> tf.Tensor:
        return tf.cast(seen.positions, tf.float32)


@dataclasses.dataclass(frozen=True)
class RandomPages(Quest):
    """Any pages, and the newest, for each query others: a baseline of `Quest` for measurements,
    not to be served.

    Args:
        seed: Of the choice; the same in every run.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "random_pages"
    seed: int = 0

    def worth(self, queries: tf.Tensor, bounds: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        heads = tf.range(bounds.shape[1])[:, tf.newaxis] * 104729
        newest = tf.reduce_max(numbers, axis=1)[:, tf.newaxis, tf.newaxis]
        # What a query asks differs in its bits at least: sessions and steps choose apart.
        asked = tf.cast(tf.abs(queries[:, :, :1, 0]) * 1e6, tf.int32) % 65537
        return _mixed(numbers[:, tf.newaxis] * 7919 + heads + newest * 31 + asked + self.seed)


@dataclasses.dataclass(frozen=True)
class RecentPages(Quest):
    """The first page and the newest ones: a baseline of `Quest`. What it does not read it keeps,
    and a prompt is read whole, so that only what tokens read alone look at differs.

    Raises:
        ConfigError: A value is out of range.
    """

    name = "recent_pages"

    def worth(self, queries: tf.Tensor, bounds: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
        del queries
        order = tf.where(numbers == 0, tf.int32.max, numbers)
        shape = [*shape_of(bounds)[:2], shape_of(numbers)[1]]
        return tf.broadcast_to(tf.cast(order, tf.float32)[:, tf.newaxis], shape)


def _mixed(numbers: tf.Tensor) -> tf.Tensor:
    """Numbers that look like chance, float32, the same for the same ones."""
    mixed = numbers % 65537
    mixed = (mixed * 75 + 74) % 65537
    return tf.cast((mixed * 75 + 74) % 65537, tf.float32)

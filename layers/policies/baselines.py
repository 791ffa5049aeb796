"""What every method has to beat: to keep tokens at random, and to keep the newest."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen


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
        mixed = (seen.positions * 7919 + heads * 104729 + self.seed) % 65537
        mixed = (mixed * 75 + 74) % 65537
        return tf.cast((mixed * 75 + 74) % 65537, tf.float32)


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

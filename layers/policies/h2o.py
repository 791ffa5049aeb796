"""Keep what got most attention, and the newest tokens."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen


@dataclasses.dataclass(frozen=True)
class H2O(EvictingPolicy):
    """Heavy hitters: entries are worth the attention that all queries so far gave them.

    Choose it to read on without an end where a query-independent choice of old tokens is
    wanted. It looks at every key once more, which other methods do not: for each chunk, and in
    an artifact for all decode steps of a call together.

    Args:
        recent: Newest tokens that are never evicted.
        normalize: Whether to divide by how many queries could see an entry; the plain sum of
            the paper favours old tokens.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Zhang et al., H2O, https://arxiv.org/abs/2306.14048, and its code,
        https://github.com/FMInference/H2O.
    """

    name = "h2o"
    recent: int = 128
    normalize: bool = True

    @property
    def accumulates(self) -> bool:
        return True

    def score(self, seen: Seen) -> tf.Tensor:
        if not self.normalize:
            return seen.mass
        could_see = seen.filled[:, tf.newaxis, tf.newaxis] - seen.positions
        return seen.mass / tf.cast(tf.maximum(could_see, 1), tf.float32)

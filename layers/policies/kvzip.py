"""Keep what it takes to repeat the text."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen


@dataclasses.dataclass(frozen=True)
class KVzip(EvictingPolicy):
    """Entries are worth the highest attention that any query gave them while the text was
    repeated.

    Choose it for a fixed text that many questions are asked about, a document or a system
    prompt: it needs no question, and costs a second reading; see
    `tfkv.prefix_compression.compress_prefix`, which does the reading. Where nobody repeats the
    text, the queries of the text itself count.

    Args:
        recent: Newest tokens that are never evicted.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Kim et al., KVzip, https://arxiv.org/abs/2505.23416, and its code,
        https://github.com/snu-mllab/KVzip.
    """

    name = "kvzip"
    whole_prompt: bool = True
    recent: int = 32

    @property
    def accumulates(self) -> bool:
        return True

    def accumulate(self, mass: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return tf.maximum(mass, tf.reduce_max(weights, axis=2))

    def score(self, seen: Seen) -> tf.Tensor:
        return seen.mass

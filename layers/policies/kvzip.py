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
    prompt: it needs no question, and costs a second reading. An artifact does the reading where a
    session evicts for the first time, with the first decode step behind a prompt that is longer
    than the budget; for a Keras model `tfkv.prefix_compression.PrefixCompressor` does. Where
    nobody repeats the text, as with ``whole_prompt=False`` or after the first eviction, the
    queries of the text itself count.

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

    @property
    def repeats(self) -> bool:
        return self.whole_prompt

    def accumulate(self, mass: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return tf.maximum(mass, tf.reduce_max(weights, axis=2))

    def score(self, seen: Seen) -> tf.Tensor:
        return seen.mass

"""Keep what the newest queries look at."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.policies.evicting_policy import EvictingPolicy, Seen, pool

_KERNELS = ("mean", "max")


@dataclasses.dataclass(frozen=True)
class SnapKV(EvictingPolicy):
    """An observation window votes: the attention of the newest queries, pooled over neighbours.

    Choose it for prompts that end with the question: what the window looks at is what the answer
    needs. A question that comes later finds only what the window of before cared for.

    Args:
        window: Newest queries that vote; their tokens are never evicted.
        kernel_size: Neighbours that are pooled, odd; 1 = none.
        pooling: ``"mean"`` or ``"max"`` of them.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Li et al., SnapKV, https://arxiv.org/abs/2404.14469, and its code,
        https://github.com/FasterDecoding/SnapKV. KV heads of a group share the mean vote.
    """

    name = "snapkv"
    whole_prompt: bool = True
    window: int = 32
    kernel_size: int = 5
    pooling: str = "mean"

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise ConfigError(f"`window` must be at least 1. Received: window={self.window!r}.")
        if (
            not isinstance(self.kernel_size, int)
            or self.kernel_size < 1
            or not self.kernel_size % 2
        ):
            raise ConfigError(
                f"`kernel_size` must be odd. Received: kernel_size={self.kernel_size!r}."
            )
        if self.pooling not in _KERNELS:
            raise ConfigError(f"`pooling` must be mean or max. Received: pooling={self.pooling!r}.")
        super().__post_init__()

    @property
    def recent(self) -> int:
        return self.window

    @property
    def observed(self) -> int:
        return self.window

    def score(self, seen: Seen) -> tf.Tensor:
        return self.votes(seen)

    def votes(self, seen: Seen) -> tf.Tensor:
        """Attention of the window, mean over group and window, pooled; ``[B, K, S]``."""
        mean = tf.reduce_mean(seen.attention(), axis=[2, 3])
        return pool(mean, self.kernel_size, self.pooling)

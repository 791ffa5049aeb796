"""What becomes of a score between its dot product and the softmax, and which count at all."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from tfkv.layers import masks
from tfkv.layers.shapes import shape_of


class Scoring(NamedTuple):
    """Soft cap, ALiBi and window of a layer; what it does not have costs nothing.

    Attributes:
        soft_cap: Scores are squeezed below it; 0 = they are not.
        slopes: What a query loses for each position between it and a key, float32 ``[K, G]``,
            or ``[A, K, G]`` where rows differ; None = nothing.
        window: Newest tokens that a query sees, its own included; 0 = all. A tensor must
            broadcast to masks.
        distances: Keys' positions minus queries', float32 ``[A, T, S]``, or ``[A, K, T, S]``
            where KV heads differ; there where slopes are (see `between`).
    """

    soft_cap: float = 0.0
    slopes: tf.Tensor | None = None
    window: tf.Tensor | int = 0
    distances: tf.Tensor | None = None

    @property
    def adjusts(self) -> bool:
        """Whether scores change."""
        return bool(self.soft_cap) or self.slopes is not None

    def narrow(self, mask: tf.Tensor, queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """``mask [..., T, S]`` of queries at positions ``[..., T]`` and keys at ``[..., S]``,
        within the window."""
        if isinstance(self.window, int) and not self.window:
            return mask
        return mask & masks.within(queries, keys, self.window)

    def of_heads(self, heads: slice) -> Scoring:
        """Of some KV heads."""
        return self if self.slopes is None else self._replace(slopes=self.slopes[..., heads, :])

    def of_owners(self, heads: tf.Tensor) -> Scoring:
        """Of rows that are one KV head each, int32 ``[A]``: as if they had no other."""
        if self.slopes is None:
            return self
        return self._replace(slopes=tf.gather(self.slopes, heads)[:, tf.newaxis])

    def between(self, queries: tf.Tensor, keys: tf.Tensor) -> Scoring:
        """The same for queries at positions ``[..., T]`` and keys at ``[..., S]``."""
        if self.slopes is None:
            return self
        distances = keys[..., tf.newaxis, :] - queries[..., :, tf.newaxis]
        return self._replace(distances=tf.cast(distances, tf.float32))

    def __call__(self, scores: tf.Tensor) -> tf.Tensor:
        """``scores [A, K, Q, S]`` as the softmax gets them; Q is G·T, heads of a group first."""
        scores = soft_cap(scores, self.soft_cap)
        if self.slopes is None or self.distances is None:
            return scores
        rows, heads, grouped, size = shape_of(scores)
        width = shape_of(self.distances)[-2]
        by_head = self.distances if self.distances.shape.rank == 4 else self.distances[:, None]
        slopes = self.slopes[..., tf.newaxis, tf.newaxis]
        biased = tf.reshape(scores, [rows, heads, grouped // width, width, size])
        biased += slopes * by_head[:, :, tf.newaxis]
        return tf.reshape(biased, [rows, heads, grouped, size])


#: Scores stay as they are.
PLAIN = Scoring()


def soft_cap(x: tf.Tensor, cap: float) -> tf.Tensor:
    """``cap · tanh(x / cap)``; `x` where the cap is 0.

    Reference:
        Gemma 2, https://arxiv.org/abs/2408.00118
    """
    return tf.tanh(x / cap) * cap if cap else x


def alibi_slopes(num_query_heads: int) -> list[float]:
    """Slope of each query head.

    Where their number is no power of two, the first ones are those of the power below it, and
    every other one of the power above follows, as in the authors' code.

    Reference:
        Press et al., ALiBi, https://arxiv.org/abs/2108.12409
    """
    below = 2 ** math.floor(math.log2(num_query_heads))
    slopes = [2.0 ** (-8 * (head + 1) / below) for head in range(below)]
    if below == num_query_heads:
        return slopes
    return slopes + alibi_slopes(2 * below)[::2][: num_query_heads - below]


def grouped_slopes(scale: float, heads: int, group: int) -> tf.Tensor | None:
    """Slopes of `Scoring`, ``[K, G]``, multiplied by `scale`; none where it is 0."""
    if not scale:
        return None
    slopes = [scale * slope for slope in alibi_slopes(heads * group)]
    return tf.reshape(tf.constant(slopes, tf.float32), [heads, group])

"""What attention reads of a cache."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfkv.layers.codecs.codec import Coded


class CacheView(NamedTuple):
    """Coded keys and values, and the positions they belong to.

    Attributes:
        keys: Parts of the codec, each ``[B, K, S, ...]``.
        values: Likewise.
        positions: int32 ``[B, S]``, absolute; −1 = empty.
    """

    keys: Coded
    values: Coded
    positions: tf.Tensor

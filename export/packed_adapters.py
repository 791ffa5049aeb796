"""The low-rank factors of all adapters of an artifact, by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.export.lora_adapter import TARGETS, Factors, LoraAdapter
from tfkv.layers.shapes import shape_of

#: In a block's weights: number of each row's adapter, from 1; 0 = none.
CHOSEN = "adapters/chosen"
#: Matrices that only blocks with a plain feed-forward layer have.
FEED_FORWARD = ("gate", "up", "down")


class PackedAdapters(tf.Module):
    """Factors of adapters, stacked by layer.

    A row of a batch may have any adapter, and gathers its own factors in each layer: they are
    narrow, so that a step costs the same however many adapters there are. Number 0 is the base,
    and adds zeros.

    Args:
        config: Architecture.
        adapters: In the order of their numbers; checked.

    Attributes:
        stacked: By ``<matrix>/<G>/a`` ``[L, n + 1, G · r, in]`` and ``<matrix>/<G>/b``
            ``[L, n + 1, out / G, r]``, the base and n adapters whose factors are padded with
            zeros to the largest rank r. L counts the layers that have the matrix.
    """

    def __init__(self, config: DecoderConfig, adapters: Sequence[LoraAdapter]) -> None:
        super().__init__(name="adapters")
        dense = [n for n in range(config.num_layers) if config.experts_of(n) is None]
        self.stacked = {
            name: tf.Variable(value, trainable=False)
            for target in TARGETS
            for name, value in _stacks(
                target, dense if target in FEED_FORWARD else range(config.num_layers), adapters
            )
        }


def _stacks(
    target: str, layers: Sequence[int], adapters: Sequence[LoraAdapter]
) -> Iterator[tuple[str, np.ndarray]]:
    """The stacks of one matrix; one pair for each G that its factors have."""
    names = [f"layers/{layer}/{target}" for layer in layers]
    every = [one.factors[name] for one in adapters for name in names if name in one.factors]
    for parts in sorted({a.shape[1] for a, _ in every}):
        alike = [(a, b) for a, b in every if a.shape[1] == parts]
        rank = max(len(b) for _, b in alike)
        width, out = alike[0][0].shape[0], alike[0][1].shape[1]
        a = np.zeros([len(names), 1 + len(adapters), parts, rank, width], np.float32)
        b = np.zeros([len(names), 1 + len(adapters), out, rank], np.float32)
        for row, name in enumerate(names):
            for number, adapter in enumerate(adapters, start=1):
                found: Factors | None = adapter.factors.get(name)
                if found is not None and found[0].shape[1] == parts:
                    own = len(found[1])
                    a[row, number, :, :own] = found[0].transpose(1, 2, 0)
                    b[row, number, :, :own] = found[1].T
        yield f"{target}/{parts}/a", a.reshape(*a.shape[:2], -1, width)
        yield f"{target}/{parts}/b", b


def add_low_rank(
    weights: dict[str, tf.Tensor], target: str, x: tf.Tensor, product: tf.Tensor
) -> tf.Tensor:
    """The product of a matrix with what each row's adapter adds to it.

    Args:
        weights: Of one block; where it has no factors of the matrix, nothing is added.
        target: Which matrix.
        x: What was multiplied, ``[A, T, in]``.
        product: What came of it, ``[A, T, ...]``.
    """
    for name in [name for name in weights if name.startswith(f"{target}/") and name[-1] == "a"]:
        a, b = (tf.gather(weights[side], weights[CHOSEN]) for side in (name, f"{name[:-1]}b"))
        rows, rank = shape_of(x)[0], b.shape[-1]
        # A product for each row, unlike those with weights that all rows share.
        inner = tf.reshape(tf.matmul(x, a, transpose_b=True), [rows, -1, rank])
        added = tf.matmul(inner, b, transpose_b=True)
        product += tf.reshape(added, shape_of(product))
    return product

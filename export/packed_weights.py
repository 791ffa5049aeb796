"""Weights fused and stacked for decoding: the packing step between training and serving."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfkv.config import DecoderConfig

#: Weights are served in float32.
BYTES_PER_WEIGHT = 4


class PackedWeights(tf.Module):
    """A decoder's weights as few large matrices, stacked by layer.

    Query, key and value are one product, and so are gate and up. Matrices are kept as
    ``[out, in]``: XLA on the CPU reads them in order in a matrix-vector product. Layers are
    stacked, so that one loop body serves all of them and compiles in a second.

    Args:
        config: Architecture.
        weights: Canonical weights, see `tfkv.export.importers`.
    """

    def __init__(self, config: DecoderConfig, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__(name="weights")
        layers = range(config.num_layers)

        def stack(make) -> tf.Variable:  # type: ignore[no-untyped-def]
            return _constant(np.stack([make(f"layers/{i}/") for i in layers]))

        def by_head(name: str, prefix: str) -> np.ndarray:
            return weights[prefix + name].reshape(config.hidden_dim, -1).T

        self.embedding = _constant(weights["token_embedding"])
        self.qkv = stack(
            lambda p: np.concatenate([by_head(name, p) for name in ("query", "key", "value")])
        )
        self.attention_output = stack(
            lambda p: weights[p + "attention_output"].reshape(-1, config.hidden_dim).T
        )
        self.gate_up = stack(lambda p: np.concatenate([weights[p + "gate"].T, weights[p + "up"].T]))
        self.down = stack(lambda p: weights[p + "down"].T)
        self.attention_norm = stack(lambda p: weights[p + "attention_norm"])
        self.feedforward_norm = stack(lambda p: weights[p + "feedforward_norm"])
        self.final_norm = _constant(weights["final_norm"])
        self.output = self.embedding if config.tie_embeddings else _constant(weights["output"])


def _constant(value: np.ndarray) -> tf.Variable:
    return tf.Variable(np.ascontiguousarray(value, np.float32), trainable=False)

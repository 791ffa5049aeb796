"""Weights fused and stacked for decoding: the packing step between training and serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.export.importers.source import HEADS, is_matrix, matrix_shape
from tfkv.export.matrices import StoredMatrix, stored_as

#: Packed matrices. Those that choose experts are float32 in any case.
_PACKED = (
    "qkv",
    "attention_output",
    "gate_up",
    "down",
    "expert_gate_up",
    "expert_down",
    "shared_gate_up",
    "shared_down",
)
_ROUTERS = ("router", "shared_router")
#: Vectors of a block that are stacked as they are, where it has them.
_VECTORS = (
    "attention_output_bias",
    "query_norm",
    "key_norm",
    "attention_norm",
    "attention_norm_bias",
    "feedforward_norm",
    "feedforward_norm_bias",
    "post_attention_norm",
    "post_attention_norm_bias",
    "post_feedforward_norm",
    "post_feedforward_norm_bias",
)


class PackedWeights(tf.Module):
    """A decoder's weights as few large matrices, stacked by layer.

    Query, key and value are one product, and so are gate and up. Matrices are kept as
    ``[out, in]``: XLA on the CPU reads them in order in a matrix-vector product. Layers are
    stacked, so that one loop body serves all of them and compiles in a second. Feed-forward
    layers are stacked apart from mixtures of experts, where a model has both.

    Args:
        config: Architecture.
        weights: Canonical weights, see `tfkv.export.importers`.
        dtype: What matrices are stored as: one of `tfkv.config.WEIGHT_TYPES`.

    Attributes:
        embedding: ``[V, D]``.
        output: ``[V, D]``, the same where tied.
        outer: Other weights beside the blocks, by canonical name.
        stacked: Those of the blocks by packed name, layers first.
    """

    def __init__(
        self, config: DecoderConfig, weights: Mapping[str, np.ndarray], dtype: str = "float32"
    ) -> None:
        super().__init__(name="weights")
        self.embedding = self.output = StoredMatrix(weights["token_embedding"], dtype)
        if not config.tie_embeddings:
            self.output = StoredMatrix(weights["output"], dtype)
        apart = ("token_embedding", "output")
        self.outer = {
            name: _constant(value)
            for name, value in weights.items()
            if not name.startswith("layers/") and name not in apart
        }
        blocks = [_block(weights, layer) for layer in range(config.num_layers)]
        sparse = [block for block in blocks if "router" in block]
        dense = [block for block in blocks if "router" not in block]
        kinds = ((blocks, _attention), (dense, _feed_forward), (sparse, _experts))
        self.stacked = {
            name: stored
            for own, pack in kinds
            for name, stored in _stacked([pack(block) for block in own], dtype).items()
        }


Block = Mapping[str, np.ndarray]


def as_served(weights: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """Canonical weights with the roundings of what an engine stores."""

    def rounded(name: str, value: np.ndarray) -> np.ndarray:
        if not is_matrix(name):
            return value
        if name in ("token_embedding", "output"):
            return stored_as(value, dtype)
        *lead, out, width = matrix_shape(name, value.shape)
        by_input = value.reshape(*lead, width, out)
        coded = stored_as(np.swapaxes(by_input, -1, -2), dtype)
        return np.swapaxes(coded, -1, -2).reshape(value.shape)

    return {name: rounded(name, value) for name, value in weights.items()}


def _block(weights: Mapping[str, np.ndarray], layer: int) -> Block:
    prefix = f"layers/{layer}/"
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _attention(block: Block) -> Block:
    """Of a block, with all of its norms."""
    width = block["query"].shape[0]
    packed = {
        "qkv": np.concatenate([block[name].reshape(width, -1).T for name in HEADS]),
        "attention_output": block["attention_output"].reshape(-1, width).T,
    }
    if "query_bias" in block:
        biases = [block[f"{name}_bias"].reshape(-1) for name in HEADS]
        packed["qkv_bias"] = np.concatenate(biases)
    return packed | {name: block[name] for name in _VECTORS if name in block}


def _feed_forward(block: Block) -> Block:
    inner = ("gate", "up") if "gate" in block else ("up",)
    packed = {
        "gate_up": np.concatenate([block[name].T for name in inner]),
        "down": block["down"].T,
    }
    if "down_bias" in block:
        packed["gate_up_bias"] = np.concatenate([block[f"{name}_bias"] for name in inner])
        packed["down_bias"] = block["down_bias"]
    return packed


def _experts(block: Block) -> Block:
    def turned(name: str) -> np.ndarray:
        return np.swapaxes(block[name], -1, -2)

    def gate_up(kind: str) -> np.ndarray:
        return np.concatenate([turned(f"{kind}_gate"), turned(f"{kind}_up")], axis=-2)

    packed = {
        "router": turned("router"),
        "expert_gate_up": gate_up("expert"),
        "expert_down": turned("expert_down"),
    }
    if "shared_router" in block:
        packed["shared_router"] = turned("shared_router")
        packed["shared_gate_up"] = gate_up("shared")
        packed["shared_down"] = turned("shared_down")
    return packed


def _stacked(blocks: Sequence[Block], dtype: str) -> dict[str, tf.Variable | StoredMatrix]:
    def stored(name: str) -> tf.Variable | StoredMatrix:
        value = np.stack([block[name] for block in blocks])
        if name in _PACKED:
            return StoredMatrix(value, dtype)
        return StoredMatrix(value, "float32") if name in _ROUTERS else _constant(value)

    return {name: stored(name) for name in (blocks[0] if blocks else ())}


def _constant(value: np.ndarray) -> tf.Variable:
    return tf.Variable(np.ascontiguousarray(value, np.float32), trainable=False)

"""Decoder blocks over packed weights: all of them but attention itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfkv.architecture import Experts
from tfkv.config import DecoderConfig
from tfkv.export.layer_options import Angles
from tfkv.export.layer_pools import Layer
from tfkv.export.matrices import Matrix, StoredMatrix
from tfkv.export.packed_adapters import CHOSEN, FEED_FORWARD, PackedAdapters, add_low_rank
from tfkv.export.packed_weights import PackedWeights
from tfkv.layers.feed_forward import activate, mix_experts, route
from tfkv.layers.normalization import normalize, rms_normalize
from tfkv.layers.rotary import rotate
from tfkv.layers.scoring import soft_cap
from tfkv.layers.shapes import shape_of

#: Packed weights that only layers with a plain feed-forward layer have, and only those with
#: experts.
_DENSE = ("gate_up", "gate_up_bias", "down", "down_bias")
_SPARSE = (
    "router",
    "expert_gate_up",
    "expert_down",
    "shared_router",
    "shared_gate_up",
    "shared_down",
)

#: Packed weights of one block, or those beside the blocks, by name: vectors, and matrices.
Block = dict[str, Any]


class Weights(NamedTuple):
    """`PackedWeights` read once for a computation, and `PackedAdapters` where rows have some.

    Attributes:
        embedding: ``[V, D]``.
        output: ``[V, D]``.
        outer: Beside the blocks.
        stacked: Of the blocks, layers first.
        adapters: What adapters add to those.
        chosen: int32 ``[B]``, number of each row's adapter, 0 = none; None where none has one.
    """

    embedding: Matrix
    output: Matrix
    outer: Block
    stacked: Block
    adapters: Block
    chosen: tf.Tensor | None

    def of_row(self, row: tf.Tensor) -> Weights:
        """Those of one row, ``[1]``, by its number."""
        if self.chosen is None:
            return self
        return self._replace(chosen=tf.gather(self.chosen, row)[tf.newaxis])


def read_weights(
    packed: PackedWeights, adapters: PackedAdapters | None = None, chosen: tf.Tensor | None = None
) -> Weights:
    """All weights as tensors, for use inside loops.

    Args:
        packed: Those of the base.
        adapters: What adapters add to them.
        chosen: See `Weights`; where left out, adapters are not read.
    """
    stacks = adapters.stacked if adapters is not None and chosen is not None else {}
    return Weights(
        packed.embedding.read(),
        packed.output.read(),
        {name: weight.read_value() for name, weight in packed.outer.items()},
        {
            name: weight.read() if isinstance(weight, StoredMatrix) else weight.read_value()
            for name, weight in packed.stacked.items()
        },
        {name: factors.read_value() for name, factors in stacks.items()},
        chosen if stacks else None,
    )


class PackedBlocks:
    """What a model computes around attention, with its options; one that is off adds nothing.

    Args:
        config: Architecture.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def embed(self, weights: Weights, tokens: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """What the first block gets, ``[A, T, D]``, of ``tokens [A, T]`` at ``positions
        [A, T]``; −1 = not a token."""
        c, outer = self.config, weights.outer
        x = weights.embedding.take(tokens)
        if c.embedding_scale != 1:
            x *= c.embedding_scale
        if c.positions.kind == "learned":
            x += tf.gather(outer["position_embedding"], tf.maximum(positions, 0))
        return self._normal(outer, "embedding_norm", x) if c.norms.embedding else x

    @staticmethod
    def weights_of(weights: Weights, layer: Layer) -> Block:
        """Weights of one block."""
        others = _DENSE if layer.sparse else _SPARSE

        def of_layer(name: str, value: tf.Tensor | Matrix) -> tf.Tensor | Matrix:
            index = layer.feed if name in (*_DENSE, *_SPARSE) else layer.number
            return value.at(index) if isinstance(value, Matrix) else value[index]

        own = {
            name: of_layer(name, value)
            for name, value in weights.stacked.items()
            if name not in others
        }
        if weights.chosen is None:
            return own
        for name, factors in weights.adapters.items():
            feeds = name.startswith(FEED_FORWARD)
            if not (feeds and layer.sparse):
                own[name] = factors[layer.feed if feeds else layer.number]
        return {**own, CHOSEN: weights.chosen}

    def project(
        self, w: Block, x: tf.Tensor, angles: Angles
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Queries ``[A, T, N, H]``, keys and values ``[A, T, K, H]``, rotated."""
        c = self.config
        heads = [c.num_query_heads, c.num_key_value_heads, c.num_key_value_heads]
        normal = self._normal(w, "attention_norm", x)
        fused = linear(normal, w["qkv"], w.get("qkv_bias"))
        q, k, v = tf.split(
            tf.reshape(fused, [*shape_of(x)[:2], sum(heads), c.head_dim]), heads, axis=2
        )
        q, k, v = (
            add_low_rank(w, name, normal, product)
            for name, product in (("query", q), ("key", k), ("value", v))
        )
        epsilon = c.attention.query_key_epsilon
        if epsilon:
            q = rms_normalize(q, w["query_norm"], epsilon)
            k = rms_normalize(k, w["key_norm"], epsilon)
        if angles is None:
            return q, k, v
        return rotate(q, *angles), rotate(k, *angles), v

    def attention_output(self, w: Block, seen: tf.Tensor) -> tf.Tensor:
        """What attention adds, of what its heads saw, ``[A, T, N · H]``."""
        added = linear(seen, w["attention_output"], w.get("attention_output_bias"))
        added = add_low_rank(w, "attention_output", seen, added)
        if not self.config.norms.post_attention:
            return added
        return self._normal(w, "post_attention_norm", added)

    def feed_forward(self, w: Block, x: tf.Tensor, sparse: bool) -> tf.Tensor:
        """What the feed-forward layer adds to ``x [A, T, D]``."""
        c = self.config
        normal = self._normal(w, "feedforward_norm", x)
        if sparse and c.experts is not None:
            added = self._experts(w, normal, c.experts)
        else:
            inner = linear(normal, w["gate_up"], w.get("gate_up_bias"))
            # Without a gate, what is activated is called `up`.
            names = ("gate", "up") if c.feed_forward.gated else ("up",)
            parts = tf.split(inner, len(names), axis=-1) if c.feed_forward.gated else [inner]
            gate, *up = (
                add_low_rank(w, name, normal, part) for name, part in zip(names, parts, strict=True)
            )
            inner = activate(gate, up[0] if up else None, c.feed_forward.activation)
            added = linear(inner, w["down"], w.get("down_bias"))
            added = add_low_rank(w, "down", inner, added)
        if not c.norms.post_feedforward:
            return added
        return self._normal(w, "post_feedforward_norm", added)

    def _experts(self, w: Block, normal: tf.Tensor, experts: Experts) -> tf.Tensor:
        """What a mixture of experts makes of ``[A, T, D]``."""
        activation = self.config.feed_forward.activation
        rows = tf.reshape(normal, [-1, self.config.hidden_dim])
        weights = route(linear(rows, w["router"]), experts.top_k, experts.normalize)
        every = w["expert_gate_up"].times(rows[tf.newaxis])
        gate, up = tf.split(every, 2, axis=-1)
        inner = activate(gate, up, activation)
        mixed = mix_experts(w["expert_down"].times(inner), weights)
        if experts.shared_dim:
            gate, up = tf.split(linear(rows, w["shared_gate_up"]), 2, axis=-1)
            shared = linear(activate(gate, up, activation), w["shared_down"])
            mixed += shared * tf.sigmoid(linear(rows, w["shared_router"]))
        return tf.reshape(mixed, shape_of(normal))

    def logits(self, weights: Weights, x: tf.Tensor) -> tf.Tensor:
        """Logits ``[..., V]`` of block outputs ``[..., D]``."""
        outer = weights.outer
        bias, epsilon = outer.get("final_norm_bias"), self.config.final_epsilon
        normal = normalize(x, outer["final_norm"], bias, epsilon)
        return soft_cap(linear(normal, weights.output), self.config.final_soft_cap)

    def _normal(self, weights: Block, name: str, x: tf.Tensor) -> tf.Tensor:
        """``x [..., D]`` through a norm."""
        bias = weights.get(f"{name}_bias")
        return normalize(x, weights[name], bias, self.config.rms_epsilon)


def linear(x: tf.Tensor, weight: Matrix, bias: tf.Tensor | None = None) -> tf.Tensor:
    """``x [..., in]`` times ``weight [out, in]``, plus a bias where there is one.

    One matrix product: left to itself, a product with a batch axis would repeat the weights
    for each row.
    """
    *lead, width = shape_of(x)
    flat = weight.times(tf.reshape(x, [-1, width]))
    flat = flat if bias is None else flat + bias
    return tf.reshape(flat, [*lead, weight.numbers.shape[0]])

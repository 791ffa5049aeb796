"""A mixture of feed-forward layers as a Keras layer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfkv.architecture import Experts as Options
from tfkv.architecture import read
from tfkv.layers.feed_forward import activate, mix_experts, route
from tfkv.layers.keras_api import keras
from tfkv.layers.shapes import shape_of


@keras.saving.register_keras_serializable(package="tfkv")
class Experts(keras.layers.Layer):
    """Gated feed-forward layers of which a router chooses some for each token.

    All experts are computed and those not chosen weighted with 0: exact, differentiable in the
    router, and as fast as it gets for many tokens at once. Nothing balances the experts in
    training: a loss that does so is the caller's.

    Args:
        options: How many, how wide, how chosen; or a dict of that.
        activation: One of `tfkv.architecture.ACTIVATIONS`.

    Call arguments:
        x: ``[..., D]``.

    Returns:
        Tensor of the shape of `x`, in the compute dtype.

    Reference:
        Jiang et al., Mixtral, https://arxiv.org/abs/2401.04088; Qwen team,
        https://qwenlm.github.io/blog/qwen-moe
    """

    def __init__(
        self, options: Options | dict[str, Any], activation: str = "silu", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.options: Options = read(Options, options)
        self.activation = activation

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        width, options = input_shape[-1], self.options
        count, inner = options.count, options.intermediate_dim
        self.router = self._weight("router", (width, count))
        self.gate = self._weight("gate", (count, width, inner))
        self.up = self._weight("up", (count, width, inner))
        self.down = self._weight("down", (count, inner, width))
        if options.shared_dim:
            self.shared_router = self._weight("shared_router", (width, 1))
            self.shared_gate = self._weight("shared_gate", (width, options.shared_dim))
            self.shared_up = self._weight("shared_up", (width, options.shared_dim))
            self.shared_down = self._weight("shared_down", (options.shared_dim, width))
        self.built = True

    def _weight(self, name: str, shape: tuple[int | None, ...]) -> keras.Variable:
        return self.add_weight(name=name, shape=shape, initializer="glorot_uniform")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        rows = tf.reshape(x, [-1, x.shape[-1]])
        weights = route(tf.matmul(rows, self.router), self.options.top_k, self.options.normalize)
        gate, up = (tf.einsum("ad,edf->eaf", rows, one) for one in (self.gate, self.up))
        inner = activate(gate, up, self.activation)
        mixed = mix_experts(tf.einsum("eaf,efd->ead", inner, self.down), weights)
        if self.options.shared_dim:
            gate, up = (tf.matmul(rows, one) for one in (self.shared_gate, self.shared_up))
            shared = tf.matmul(activate(gate, up, self.activation), self.shared_down)
            mixed += shared * tf.sigmoid(tf.matmul(rows, self.shared_router))
        return tf.reshape(mixed, shape_of(x))

    def get_config(self) -> dict[str, Any]:
        options = {name: getattr(self.options, name) for name in self.options.__dataclass_fields__}
        return {**super().get_config(), "options": options, "activation": self.activation}

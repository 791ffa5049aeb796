"""The feed-forward layer's parts as pure functions: activation, routing, mixing of experts."""

from __future__ import annotations

import tensorflow as tf

from tfkv.errors import ConfigError

_ACTIVATIONS = {
    "silu": tf.nn.silu,
    "gelu": lambda x: tf.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True),
    "relu": tf.nn.relu,
}


def activate(inner: tf.Tensor, up: tf.Tensor | None, activation: str) -> tf.Tensor:
    """What the last product of a feed-forward layer gets.

    Args:
        inner: ``[..., F]``, the product that is activated: "gate", where there is one.
        up: ``[..., F]``, what it multiplies; None = nothing.
        activation: One of `tfkv.architecture.ACTIVATIONS`.

    Raises:
        ConfigError: The activation is unknown.

    Reference:
        Shazeer, GLU variants, https://arxiv.org/abs/2002.05202
    """
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"`activation` must be one of {', '.join(_ACTIVATIONS)}. "
            f"Received: activation={activation!r}."
        )
    active = _ACTIVATIONS[activation](inner)
    return active if up is None else active * up


def route(logits: tf.Tensor, top_k: int, normalize: bool) -> tf.Tensor:
    """Weight of each expert for each token, float32 ``[A, E]``: 0 for those not chosen.

    Args:
        logits: ``[A, E]`` of the router.
        top_k: How many experts a token passes.
        normalize: Whether their weights are divided by their sum.

    Reference:
        Shazeer et al., https://arxiv.org/abs/1701.06538
    """
    shares = tf.nn.softmax(tf.cast(logits, tf.float32), axis=-1)
    best, chosen = tf.math.top_k(shares, top_k)
    if normalize:
        best /= tf.reduce_sum(best, axis=-1, keepdims=True)
    places = tf.one_hot(chosen, logits.shape[-1], dtype=tf.float32)
    return tf.reduce_sum(places * best[..., tf.newaxis], axis=-2)


def mix_experts(outputs: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """What tokens get of their experts, ``[A, D]``, of ``outputs [E, A, D]`` of all of them and
    ``weights [A, E]`` of `route`."""
    by_expert = tf.cast(tf.transpose(weights), outputs.dtype)[..., tf.newaxis]
    return tf.reduce_sum(outputs * by_expert, axis=0)

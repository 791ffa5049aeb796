"""keras-nlp's rotary embedding layers as `tfkv.architecture.Rope`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfkv.architecture import Rope
from tfkv.errors import ModelSourceError


def rope_of(layer: Any, head_dim: int, channels: int = 0, context_length: int = 0) -> Rope:
    """The rotation that a layer computes.

    Args:
        layer: Of keras-nlp.
        head_dim: Width of a head (axis H).
        channels: First channels of a head that it turns; 0 = all.
        context_length: Positions that sessions may reach, where the rotation depends on it.

    Raises:
        ModelSourceError: A layer, or a setting of it, that is not supported.
    """
    known = _KINDS.get(type(layer).__name__)
    if known is None:
        raise ModelSourceError(
            f"The rotary embedding {type(layer).__name__} is not supported. Expected one of "
            f"{', '.join(_KINDS)}."
        )
    return known(layer, head_dim, channels, context_length)


def _plain(layer: Any, head_dim: int, channels: int, context_length: int) -> Rope:
    del context_length
    rope = Rope(float(layer.max_wavelength), channels)
    if layer.rope_type == "linear":
        return rope.linear(float(layer.scaling_factor))
    if layer.rope_type == "yarn":
        original = layer.original_max_position_embeddings
        betas = (layer.beta_fast, layer.beta_slow)
        return rope.yarn(head_dim, layer.scaling_factor, original, *betas, layer.truncate)
    raise ModelSourceError(
        f"Only RoPE of the types 'linear' and 'yarn' is supported. Received: "
        f"rope_type={layer.rope_type!r}."
    )


def _llama(layer: Any, head_dim: int, channels: int, context_length: int) -> Rope:
    del context_length
    if layer.position_scaling_factor not in (None, 1):
        raise ModelSourceError(
            "keras-nlp's Llama takes `rope_position_scaling_factor` and computes nothing with "
            "it, so that nobody knows what is meant. Expected: 1. Received: "
            f"{layer.position_scaling_factor!r}."
        )
    rope = Rope(float(layer.max_wavelength), channels)
    if layer.low_freq_factor is None:
        return rope
    return rope.llama3(
        head_dim,
        layer.frequency_adjustment_factor,
        layer.low_freq_factor,
        layer.high_freq_factor,
        layer.pretraining_sequence_length,
    )


def _su(layer: Any, head_dim: int, channels: int, context_length: int) -> Rope:
    """LongRoPE as Phi-3 has it. keras-nlp takes the long factors for a text that is longer than
    the first training; keys in a cache cannot turn anew when a session gets there, so that
    here the context length decides, once for all sessions."""
    del head_dim
    long = context_length > layer.pretraining_sequence_length
    factors = layer.inverese_freq_long_factor if long else layer.inverese_freq_short_factor
    return Rope(
        float(layer.max_wavelength),
        channels,
        tuple(map(float, factors)),
        float(layer.embedding_scaling_factor),
    )


def _smollm3(layer: Any, head_dim: int, channels: int, context_length: int) -> Rope:
    del head_dim, context_length
    rope = Rope(float(layer.rope_theta), channels)
    return dataclasses.replace(rope, magnitude=float(layer.attention_scaling))


_KINDS: dict[str, Callable[[Any, int, int, int], Rope]] = {
    "RotaryEmbedding": _plain,
    "LlamaRotaryEmbedding": _llama,
    "Phi3SuScaledRotaryEmbedding": _su,
    "SmolLM3RotaryEmbedding": _smollm3,
}

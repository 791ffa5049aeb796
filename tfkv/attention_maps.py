"""Attention weights of all layers and heads over a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfkv.causal_lm import CausalLM
from tfkv.errors import ConfigError
from tfkv.layers.cached_multi_head_attention import KeysValues

__all__ = ["attention_maps"]


def attention_maps(model: CausalLM, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """What each token of a text attends to, in every layer and query head.

    The text is read at once, without a cache: the weights are those of a policy's window, and
    of a codec and an eviction they say nothing. Of a served session, `Session.attention` does.

    Args:
        model: Decoder.
        tokens: Token ids ``[T]``. The result grows with their square: 1,000 tokens take 1 GB
            in SmolLM2.

    Returns:
        float32 ``[L, N, T, T]``; row t sums to 1 over what token t sees.

    Raises:
        ConfigError: There is no token.
    """
    ids = np.asarray(tokens, np.int32)
    if ids.ndim != 1 or not ids.size:
        raise ConfigError(f"`tokens` must be a list of token ids. Received: shape={ids.shape}.")
    positions = tf.range(ids.size)[tf.newaxis]
    x, found = model.token_embedding(ids[np.newaxis]), []
    shared: dict[int, KeysValues] = {}
    for index, block in enumerate(model.blocks):
        kv = shared.get(model.config.kv_source(index))
        weights = block.attention.attention_weights(block.attention_norm(x), positions, kv)
        found.append(weights.numpy()[0])
        x, _, *made = block(x, positions=positions, kv=kv, return_kv=index in model.shared_layers)
        for made_kv in made:
            shared[index] = made_kv
    return np.stack(found)

"""Gemma: scales of which 1 was taken off, embeddings times √D, gated GELU."""

from __future__ import annotations

import math
from typing import Any

from tfkv.export.importers.families.family import (
    EMBEDDINGS,
    Family,
    Take,
    Weights,
    heads_first,
    plus_one,
)

_MODEL: Weights = {**EMBEDDINGS, "final_norm": Take("layer_norm.scale", plus_one)}
_BLOCK: Weights = {
    "query": Take("attention.query_dense.kernel", heads_first),
    "key": Take("attention.key_dense.kernel", heads_first),
    "value": Take("attention.value_dense.kernel", heads_first),
    "attention_output": "attention.output_dense.kernel",
    "attention_norm": Take("pre_attention_norm.scale", plus_one),
    "post_attention_norm": Take("post_attention_norm.scale", plus_one),
    "feedforward_norm": Take("pre_ffw_norm.scale", plus_one),
    "post_feedforward_norm": Take("post_ffw_norm.scale", plus_one),
    "gate": "gating_ffw.kernel",
    "up": "gating_ffw_2.kernel",
    "down": "ffw_linear.kernel",
}


def _options(backbone: Any) -> dict[str, Any]:
    attention = backbone.transformer_layers[0].attention
    scale = 0.0
    if not attention.query_head_dim_normalize:
        scale = (backbone.hidden_dim // backbone.num_query_heads) ** -0.5
    return {
        "intermediate_dim": backbone.transformer_layers[0].gating_ffw.kernel.shape[-1],
        "attention": {"soft_cap": float(attention.logit_soft_cap or 0.0), "query_scale": scale},
        "norms": {
            "post_attention": backbone.use_post_attention_norm,
            "post_feedforward": backbone.use_post_ffw_norm,
        },
        "feed_forward": {"activation": "gelu_tanh"},
        "embedding_scale": math.sqrt(backbone.hidden_dim),
    }


def _window(block: Any) -> int:
    attention = block.attention
    return attention.sliding_window_size if attention.use_sliding_window_attention else 0


def _gemma3_refusal(backbone: Any) -> str:
    if backbone.vision_encoder is not None:
        return "it reads images as well; build it with vision_encoder=None"
    if backbone.use_bidirectional_attention or backbone.is_embedding_model:
        return "it is made for embeddings, and its tokens look ahead"
    return ""


#: Gemma 1 and 2, which keras-nlp has as one class. It reorders what RoPE turned, in queries and
#: keys alike, which their products do not see.
GEMMA = Family(
    "Gemma",
    "GemmaBackbone",
    _MODEL,
    _BLOCK,
    options=_options,
    rotary="attention.rope_layer",
    window=_window,
)
GEMMA_3 = Family(
    "Gemma 3",
    "Gemma3Backbone",
    _MODEL,
    {
        **_BLOCK,
        "query_norm": Take("attention.query_norm.scale", plus_one),
        "key_norm": Take("attention.key_norm.scale", plus_one),
    },
    options=_options,
    rotary="attention.rope_layer",
    window=_window,
    refusal=_gemma3_refusal,
)

"""A tiny random model of each family, with all of its options on."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras_hub import models

_SIZES = {"vocabulary_size": 61, "num_layers": 3, "hidden_dim": 24, "intermediate_dim": 40}
_HEADS = {**_SIZES, "num_query_heads": 4, "num_key_value_heads": 2}
_OLD_HEADS = {**_SIZES, "num_heads": 6}
_LLAMA_3_ROPE = {
    "rope_max_wavelength": 500.0,
    "rope_frequency_adjustment_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_pretraining_sequence_length": 32,
}
_GEMMA = {
    **_HEADS,
    "head_dim": 8,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "attention_logit_soft_cap": 2.0,
    "final_logit_soft_cap": 3.0,
    "use_sliding_window_attention": True,
    "sliding_window_size": 7,
}
_QWEN_MOE = {
    **_HEADS,
    "num_layers": 4,
    "moe_intermediate_dim": 16,
    "num_experts": 6,
    "top_k": 3,
    "decoder_sparse_step": 2,
}
_PHI_3_ROPE = {
    "rope_scaling_type": "su",
    "rope_scaling_short_factor": [1.0, 1.5, 2.5],
    "rope_scaling_long_factor": [1.5, 4.0, 9.0],
}

#: Name of a case, its family, class, and settings.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt_2": ("GPT-2", "GPT2Backbone", {**_OLD_HEADS, "max_sequence_length": 128}),
    "opt": ("OPT", "OPTBackbone", {**_OLD_HEADS, "max_sequence_length": 128}),
    "llama": ("Llama", "LlamaBackbone", {**_HEADS, "tie_word_embeddings": False}),
    "llama_3": (
        "Llama 3",
        "Llama3Backbone",
        {**_HEADS, "tie_word_embeddings": True, **_LLAMA_3_ROPE},
    ),
    "mistral": (
        "Mistral",
        "MistralBackbone",
        {**_HEADS, "head_dim": 8, "sliding_window": 7, "rope_scaling_factor": 2.0},
    ),
    "gemma_1": (
        "Gemma",
        "GemmaBackbone",
        {**_HEADS, "num_key_value_heads": 1, "head_dim": 8, "layer_norm_epsilon": 0.01},
    ),
    "gemma_2": ("Gemma", "GemmaBackbone", _GEMMA),
    "gemma_3": (
        "Gemma 3",
        "Gemma3Backbone",
        {
            **_GEMMA,
            "num_layers": 7,
            "image_size": 8,
            "use_query_key_norm": True,
            "global_rope_scaling_factor": 8.0,
        },
    ),
    "qwen_2": (
        "Qwen 2",
        "QwenBackbone",
        {
            **_HEADS,
            "rope_scaling_factor": 2.0,
            "tie_word_embeddings": False,
            "use_sliding_window_attention": True,
            "sliding_window_size": 9,
        },
    ),
    "qwen_3": (
        "Qwen 3",
        "Qwen3Backbone",
        {**_HEADS, "head_dim": 8, "sliding_window_size": 9, "tie_word_embeddings": True},
    ),
    "phi_3": (
        "Phi-3",
        "Phi3Backbone",
        {
            **_HEADS,
            **_PHI_3_ROPE,
            "max_sequence_length": 256,
            "pretraining_sequence_length": 128,
        },
    ),
    "smollm_3": (
        "SmolLM3",
        "SmolLM3Backbone",
        {
            **_SIZES,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "rope_layer_enabled_list": [True, False, True],
            "layer_types": ["full_attention"] * 3,
            "mlp_bias": True,
            "layer_norm_epsilon": 1e-6,
            "max_position_embeddings": 128,
            "rope_theta": 500.0,
            "partial_rotary_factor": 1.0,
        },
    ),
    "falcon": (
        "Falcon",
        "FalconBackbone",
        {**_SIZES, "num_attention_heads": 6, "layer_norm_epsilon": 1e-4},
    ),
    "gpt_neo_x": (
        "GPT-NeoX",
        "GPTNeoXBackbone",
        {**_SIZES, "num_heads": 3, "rotary_percentage": 0.25, "rotary_max_wavelength": 500},
    ),
    "bloom": ("Bloom", "BloomBackbone", _OLD_HEADS),
    "mixtral": (
        "Mixtral",
        "MixtralBackbone",
        {**_HEADS, "num_experts": 5, "top_k": 2, "sliding_window": 7},
    ),
    "qwen_moe": (
        "Qwen MoE",
        "QwenMoeBackbone",
        {
            **_QWEN_MOE,
            "shared_expert_intermediate_dim": 20,
            "norm_top_k_prob": True,
            "use_sliding_window_attention": True,
            "sliding_window_size": 9,
        },
    ),
    "qwen_3_moe": (
        "Qwen 3 MoE",
        "Qwen3MoeBackbone",
        {**_QWEN_MOE, "head_dim": 8, "mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
}


def build(case: str, **changes: Any) -> Any:
    """The backbone of a case, in float32 unless changed, with all weights random.

    Matrices are as strong as keeps a residual stream alive; scales, biases and embeddings are
    no zeros and ones either.
    """
    _, name, settings = CASES[case]
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(changes.pop("dtype", "float32"))
    try:
        backbone = getattr(models, name)(**{**settings, **changes})
    finally:
        keras.config.set_dtype_policy(policy)
    draw = np.random.default_rng(sum(map(ord, case)))
    for weight in backbone.trainable_weights:
        weight.assign(_random(draw, weight))
    return backbone


def _random(draw: np.random.Generator, weight: Any) -> np.ndarray:
    shape = tuple(weight.shape)
    scale = weight.path.endswith(("scale", "gamma"))
    if scale and "gemma" in weight.path or len(shape) < 2 and not scale:
        return draw.uniform(-0.3, 0.3, shape)
    if scale:
        return draw.uniform(0.7, 1.3, shape)
    if "embedding" in weight.path:
        return draw.normal(size=shape) * 0.5
    fan_in = shape[0] if len(shape) == 2 or "query_key_value" in weight.path else shape[-2]
    return draw.normal(size=shape) / np.sqrt(fan_in)

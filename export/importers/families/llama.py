"""Llama and what is built like it: RMSNorm, RoPE, SwiGLU."""

from __future__ import annotations

from typing import Any

from tfkv.export.importers.families.family import EMBEDDINGS, Family, Weights

_ATTENTION = "_self_attention_layer"
_MODEL: Weights = {**EMBEDDINGS, "final_norm": "layer_norm.scale"}
#: Of a block whose parts are called as in keras-nlp's Llama.
HEADS = {
    "query": f"{_ATTENTION}._query_dense.kernel",
    "key": f"{_ATTENTION}._key_dense.kernel",
    "value": f"{_ATTENTION}._value_dense.kernel",
    "attention_output": f"{_ATTENTION}._output_dense.kernel",
    "attention_norm": "_self_attention_layernorm.scale",
    "feedforward_norm": "_feedforward_layernorm.scale",
}
_FEED_FORWARD = {
    "gate": "_feedforward_gate_dense.kernel",
    "up": "_feedforward_intermediate_dense.kernel",
    "down": "_feedforward_output_dense.kernel",
}
ROTARY = f"{_ATTENTION}.rotary_embedding_layer"
QUERY_KEY_NORMS = {
    "query_norm": f"{_ATTENTION}._query_dense_layer_norm.scale",
    "key_norm": f"{_ATTENTION}._key_dense_layer_norm.scale",
}
HEAD_BIASES = {
    "query_bias": f"{_ATTENTION}._query_dense.bias",
    "key_bias": f"{_ATTENTION}._key_dense.bias",
    "value_bias": f"{_ATTENTION}._value_dense.bias",
}


def _qwen_window(block: Any) -> int:
    attention = block._self_attention_layer
    return attention.sliding_window_size if attention.use_sliding_window_attention else 0


def _smollm3_options(backbone: Any) -> dict[str, Any]:
    return {
        "attention": {"bias": backbone.attention_bias},
        "feed_forward": {"bias": backbone.mlp_bias},
    }


LLAMA = Family("Llama", "LlamaBackbone", _MODEL, {**HEADS, **_FEED_FORWARD}, rotary=ROTARY)
LLAMA_3 = Family("Llama 3", "Llama3Backbone", _MODEL, {**HEADS, **_FEED_FORWARD}, rotary=ROTARY)
MISTRAL = Family(
    "Mistral",
    "MistralBackbone",
    _MODEL,
    {**HEADS, **_FEED_FORWARD},
    rotary=ROTARY,
    window=lambda block: block.sliding_window or 0,
)
QWEN = Family(
    "Qwen 2",
    "QwenBackbone",
    _MODEL,
    {**HEADS, **HEAD_BIASES, **_FEED_FORWARD},
    options=lambda backbone: {"attention": {"bias": True}},
    rotary=ROTARY,
    window=_qwen_window,
)
QWEN_3 = Family(
    "Qwen 3",
    "Qwen3Backbone",
    _MODEL,
    {**HEADS, **QUERY_KEY_NORMS, **_FEED_FORWARD},
    rotary=ROTARY,
    window=lambda block: block._self_attention_layer.sliding_window_size or 0,
)
PHI_3 = Family(
    "Phi-3",
    "Phi3Backbone",
    _MODEL,
    {
        "query": "attention.query_dense.kernel",
        "key": "attention.key_dense.kernel",
        "value": "attention.value_dense.kernel",
        "attention_output": "attention.output_dense.kernel",
        "attention_norm": "pre_attention_layernorm.scale",
        "feedforward_norm": "post_attention_layernorm.scale",
        "gate": "feedforward_gate_dense.kernel",
        "up": "feedforward_intermediate_dense.kernel",
        "down": "feedforward_output_dense.kernel",
    },
    rotary="attention.rotary_embedding_layer",
    # Beyond the first training its rotation is another one, for those who ask for it.
    context=lambda backbone: min(
        backbone.max_sequence_length, backbone.pretraining_sequence_length
    ),
)
SMOLLM_3 = Family(
    "SmolLM3",
    "SmolLM3Backbone",
    {**EMBEDDINGS, "final_norm": "norm.scale"},
    {
        **{
            f"{name}{end}": f"self_attn.{short}_proj.{kind}"
            for name, short in {"query": "q", "key": "k", "value": "v"}.items()
            for end, kind in {"": "kernel", "_bias": "bias"}.items()
        },
        "attention_output": "self_attn.o_proj.kernel",
        "attention_norm": "input_layernorm.scale",
        "feedforward_norm": "post_attention_layernorm.scale",
        **{
            f"{name}{end}": f"mlp.{name}_proj.{kind}"
            for name in ("gate", "up", "down")
            for end, kind in {"": "kernel", "_bias": "bias"}.items()
        },
    },
    options=_smollm3_options,
    rotary="self_attn.rotary_embedding",
    turns=lambda block: bool(block.self_attn.use_rope),
    channels=lambda block: 2 * block.self_attn.rotary_embedding.inv_freq.shape[0],
    context=lambda backbone: backbone.max_position_embeddings,
)

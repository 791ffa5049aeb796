"""Families with a mixture of experts: Mixtral, Qwen MoE, Qwen 3 MoE."""

from __future__ import annotations

from typing import Any

from tfkv.export.importers.families.family import EMBEDDINGS, Family, Take, Weights, part
from tfkv.export.importers.families.llama import HEADS, QUERY_KEY_NORMS, ROTARY

_MODEL: Weights = {**EMBEDDINGS, "final_norm": "layer_norm.scale"}
_PUBLIC_HEADS = {
    name: path.replace("._query", ".query").replace("._key", ".key").replace("._value", ".value")
    for name, path in HEADS.items()
}


def _mixtral_options(backbone: Any) -> dict[str, Any]:
    return {
        "experts": {
            "count": backbone.num_experts,
            "top_k": backbone.top_k,
            "intermediate_dim": backbone.intermediate_dim,
            "normalize": True,
        }
    }


def _qwen_options(backbone: Any) -> dict[str, Any]:
    blocks = backbone.transformer_layers
    sparse = tuple(n for n, block in enumerate(blocks) if hasattr(block.mlp, "expert_bank"))
    if not sparse:
        return {}
    return {
        "experts": {
            "count": backbone.num_experts,
            "top_k": backbone.top_k,
            "intermediate_dim": backbone.moe_intermediate_dim,
            "normalize": backbone.norm_top_k_prob,
            "shared_dim": getattr(backbone, "shared_expert_intermediate_dim", 0),
            "layers": () if len(sparse) == len(blocks) else sparse,
        }
    }


def _qwen_window(block: Any) -> int:
    attention = block._self_attention_layer
    return attention.sliding_window_size if attention.use_sliding_window_attention else 0


MIXTRAL = Family(
    "Mixtral",
    "MixtralBackbone",
    _MODEL,
    {
        **_PUBLIC_HEADS,
        "attention_output": "_self_attention_layer.output_dense.kernel",
        "router": "_sparse_moe_block._sparse_feedforward_gate_dense.kernel",
        "expert_gate": "_sparse_moe_block.expert_bank._expert_feedforward_gate_dense",
        "expert_up": "_sparse_moe_block.expert_bank._expert_feedforward_intermediate_dense",
        "expert_down": "_sparse_moe_block.expert_bank._expert_feedforward_output_dense",
    },
    options=_mixtral_options,
    rotary=ROTARY,
    window=lambda block: block.sliding_window or 0,
)
_EXPERTS: Weights = {
    "gate": "mlp._feedforward_gate_dense.kernel",
    "up": "mlp._feedforward_intermediate_dense.kernel",
    "down": "mlp._feedforward_output_dense.kernel",
    "router": "mlp._sparse_feedforward_gate_dense.kernel",
    "expert_gate": Take("mlp.expert_bank._expert_feedforward_gate_dense", part(0, 2)),
    "expert_up": Take("mlp.expert_bank._expert_feedforward_gate_dense", part(1, 2)),
    "expert_down": "mlp.expert_bank._expert_feedforward_output_dense",
}
QWEN_MOE = Family(
    "Qwen MoE",
    "QwenMoeBackbone",
    _MODEL,
    {
        **_PUBLIC_HEADS,
        "query_bias": "_self_attention_layer.query_dense.bias",
        "key_bias": "_self_attention_layer.key_dense.bias",
        "value_bias": "_self_attention_layer.value_dense.bias",
        **_EXPERTS,
        "shared_router": "mlp.shared_expert_gate_dense.kernel",
        "shared_gate": "mlp.shared_expert_dense._feedforward_gate_dense.kernel",
        "shared_up": "mlp.shared_expert_dense._feedforward_intermediate_dense.kernel",
        "shared_down": "mlp.shared_expert_dense._feedforward_output_dense.kernel",
    },
    options=lambda backbone: {"attention": {"bias": True}, **_qwen_options(backbone)},
    rotary=ROTARY,
    window=_qwen_window,
)
QWEN_3_MOE = Family(
    "Qwen 3 MoE",
    "Qwen3MoeBackbone",
    _MODEL,
    {**HEADS, **QUERY_KEY_NORMS, **_EXPERTS},
    options=_qwen_options,
    rotary=ROTARY,
    window=lambda block: block._self_attention_layer.sliding_window_size or 0,
)

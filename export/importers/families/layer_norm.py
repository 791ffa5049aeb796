"""Families with LayerNorm and biases: GPT-2, OPT, Falcon, GPT-NeoX, Bloom."""

from __future__ import annotations

from typing import Any

from tfkv.export.importers.families.family import EMBEDDINGS, Family, Take, Weights, part


def _norm(name: str, path: str) -> Weights:
    return {name: f"{path}.gamma", f"{name}_bias": f"{path}.beta"}


def _dense(name: str, path: str) -> Weights:
    return {name: f"{path}.kernel", f"{name}_bias": f"{path}.bias"}


def _options(activation: str, **more: Any) -> dict[str, Any]:
    return {
        "attention": {"bias": True, "output_bias": True},
        "norms": {"kind": "layer", "embedding": more.pop("embedding_norm", False)},
        "feed_forward": {"activation": activation, "gated": False, "bias": True},
        **more,
    }


#: Of keras-nlp's `TransformerDecoder`.
_TRANSFORMER: Weights = {
    **_dense("query", "_self_attention_layer._query_dense"),
    **_dense("key", "_self_attention_layer._key_dense"),
    **_dense("value", "_self_attention_layer._value_dense"),
    **_dense("attention_output", "_self_attention_layer._output_dense"),
    **_norm("attention_norm", "_self_attention_layer_norm"),
    **_norm("feedforward_norm", "_feedforward_layer_norm"),
    **_dense("up", "_feedforward_intermediate_dense"),
    **_dense("down", "_feedforward_output_dense"),
}
GPT_2 = Family(
    "GPT-2",
    "GPT2Backbone",
    {
        **EMBEDDINGS,
        "position_embedding": "position_embedding.position_embeddings",
        **_norm("final_norm", "layer_norm"),
    },
    _TRANSFORMER,
    options=lambda backbone: _options("gelu_tanh", positions={"kind": "learned"}),
    context=lambda backbone: backbone.max_sequence_length,
)
#: Its checkpoints begin to count positions at 2: keras-nlp leaves the first two rows out.
OPT = Family(
    "OPT",
    "OPTBackbone",
    {
        **EMBEDDINGS,
        "position_embedding": "embeddings.position_embedding.position_embeddings",
        **_norm("final_norm", "layer_norm"),
    },
    _TRANSFORMER,
    options=lambda backbone: _options("relu", positions={"kind": "learned"}),
    context=lambda backbone: backbone.max_sequence_length,
)


def _falcon_options(backbone: Any) -> dict[str, Any]:
    """ALiBi is added before scores are divided by √H, so that it is divided as well."""
    head_dim = backbone.hidden_dim // backbone.num_attention_heads
    return _options("gelu", positions={"kind": "alibi", "alibi_scale": head_dim**-0.5})


FALCON = Family(
    "Falcon",
    "FalconBackbone",
    {**EMBEDDINGS, **_norm("final_norm", "final_layernorm")},
    {
        **_dense("query", "attention_layer.query_dense"),
        **_dense("key", "attention_layer.key_dense"),
        **_dense("value", "attention_layer.value_dense"),
        **_dense("attention_output", "attention_layer.output_dense"),
        **_norm("attention_norm", "input_layernorm"),
        **_norm("feedforward_norm", "post_attention_layernorm"),
        **_dense("up", "dense_h_to_4h"),
        **_dense("down", "dense_4h_to_h"),
    },
    options=_falcon_options,
)
_FUSED = "_self_attention_layer._qkv_dense"
GPT_NEO_X = Family(
    "GPT-NeoX",
    "GPTNeoXBackbone",
    {**EMBEDDINGS, **_norm("final_norm", "layer_norm")},
    {
        **{
            f"{name}{end}": Take(f"{_FUSED}.{kind}", part(number, 3), of_last_axis=True)
            for number, name in enumerate(("query", "key", "value"))
            for end, kind in {"": "kernel", "_bias": "bias"}.items()
        },
        **_dense("attention_output", "_self_attention_layer._output_dense"),
        **_norm("attention_norm", "_self_attention_layer_norm"),
        **_norm("feedforward_norm", "_feedforward_layer_norm"),
        **_dense("up", "_feedforward_intermediate_dense"),
        **_dense("down", "_feedforward_output_dense"),
    },
    options=lambda backbone: _options("gelu_tanh", parallel_residual=True),
    rotary="_self_attention_layer.rotary_embedding_layer",
    channels=lambda block: block._self_attention_layer.rotary_dim,
    context=lambda backbone: backbone.max_sequence_length,
)
BLOOM = Family(
    "Bloom",
    "BloomBackbone",
    {
        **EMBEDDINGS,
        **_norm("embedding_norm", "embeddings_layer_norm"),
        **_norm("final_norm", "layer_norm"),
    },
    {
        **_dense("query", "_self_attention_layer._query_dense"),
        **_dense("key", "_self_attention_layer._key_dense"),
        **_dense("value", "_self_attention_layer._value_dense"),
        **_dense("attention_output", "_self_attention_layer._output_dense"),
        **_norm("attention_norm", "_pre_attention_layernorm"),
        **_norm("feedforward_norm", "_post_attention_layernorm"),
        **_dense("up", "_mlp_intermediate_dense"),
        **_dense("down", "_mlp_output_dense"),
    },
    options=lambda backbone: _options(
        "gelu_tanh", positions={"kind": "alibi"}, embedding_norm=True
    ),
)

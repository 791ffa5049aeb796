"""Architectures of GGUF files, each by what it is called on the Hugging Face Hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tfkv.config import DecoderConfig
from tfkv.export.importers.hugging_face_models import MODELS, Model, Rule

#: Tensors of a block, by what they are called on the Hub; `_NAMES` has those beside the blocks.
_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NORMS_ON_BOTH_SIDES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_NAMES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}

#: Looks up a key suffix of the architecture; None where the file has none.
Find = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """An architecture as llama.cpp converts it.

    Args:
        model: Its class in `transformers`.
        paired: Whether rows of queries and keys are stored for RoPE over neighbouring pairs.
        names: Tensors of a block that are called otherwise than in Llama.
        windowed: Whether layers have the window that a file gives; others must not give one.
        more: Further settings of a ``config.json`` that only this architecture has.
    """

    model: str
    paired: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    windowed: bool = False
    more: Callable[[Find], Mapping[str, Any]] = lambda find: {}

    @property
    def declared(self) -> Model:
        """What the Hub's files of it are; the converter has added 1 to the scales of norms."""
        return dataclasses.replace(MODELS[self.model], plus_one=False)

    def rules(self, config: DecoderConfig) -> Iterator[Rule]:
        """Every tensor of a file, under its name there."""
        for rule in self.declared.rules(config):
            yield rule._replace(stored=self._name(rule.stored))

    def _name(self, name: str) -> str:
        stem, _, leaf = name.rpartition(".")
        if stem in _NAMES:
            return f"{_NAMES[stem]}.{leaf}"
        _, layer, inner = stem.split(".", 2)
        return f"blk.{layer}.{self.names.get(inner) or _BLOCK[inner]}.{leaf}"

    def pairs(self, name: str, config: DecoderConfig) -> int:
        """Heads of a tensor whose rows are stored in pairs, else 0."""
        heads = {"attn_q": config.num_query_heads, "attn_k": config.num_key_value_heads}
        return heads.get(name.split(".")[-2], 0) if self.paired else 0


def _gemma2(find: Find) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": find("attn_logit_softcapping"),
        "final_logit_softcapping": find("final_logit_softcapping"),
        "query_pre_attn_scalar": _scaled_by(find, of_27b=46),
    }


def _gemma3(find: Find) -> dict[str, Any]:
    return {"query_pre_attn_scalar": _scaled_by(find, of_27b=62)}


def _scaled_by(find: Find, of_27b: int) -> int:
    """What scores are divided by the root of, which no file says: the head width, and in models
    of 27B, known by their layers, the hidden width over the heads."""
    width = int(find("embedding_length")) // int(find("attention.head_count"))
    return width if find("block_count") == of_27b else int(find("attention.key_length") or width)


_GEMMA_2: dict[str, Any] = {"names": _NORMS_ON_BOTH_SIDES, "windowed": True}

#: A new architecture adds its line here.
GGUF_MODELS: dict[str, GgufModel] = {
    "llama": GgufModel("LlamaForCausalLM", paired=True),
    "qwen2": GgufModel("Qwen2ForCausalLM"),
    "qwen3": GgufModel("Qwen3ForCausalLM"),
    "phi3": GgufModel("Phi3ForCausalLM", windowed=True),
    "smollm3": GgufModel("SmolLM3ForCausalLM", paired=True),
    "gemma": GgufModel("GemmaForCausalLM"),
    "gemma2": GgufModel("Gemma2ForCausalLM", more=_gemma2, **_GEMMA_2),
    "gemma3": GgufModel("Gemma3ForCausalLM", more=_gemma3, **_GEMMA_2),
}

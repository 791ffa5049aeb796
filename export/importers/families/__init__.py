"""keras-nlp's families of decoders, each as a declaration of its options and its weights."""

from __future__ import annotations

from typing import Any

from tfkv.errors import ModelSourceError
from tfkv.export.importers.families.family import Family
from tfkv.export.importers.families.gemma import GEMMA, GEMMA_3
from tfkv.export.importers.families.layer_norm import BLOOM, FALCON, GPT_2, GPT_NEO_X, OPT
from tfkv.export.importers.families.llama import (
    LLAMA,
    LLAMA_3,
    MISTRAL,
    PHI_3,
    QWEN,
    QWEN_3,
    SMOLLM_3,
)
from tfkv.export.importers.families.mixtures import MIXTRAL, QWEN_3_MOE, QWEN_MOE

__all__ = ["FAMILIES", "Family", "family_of"]

#: A new family adds its line here.
FAMILIES = (
    GPT_2,
    OPT,
    LLAMA,
    LLAMA_3,
    MISTRAL,
    GEMMA,
    GEMMA_3,
    QWEN,
    QWEN_3,
    PHI_3,
    SMOLLM_3,
    FALCON,
    GPT_NEO_X,
    BLOOM,
    MIXTRAL,
    QWEN_MOE,
    QWEN_3_MOE,
)


def family_of(model: Any) -> tuple[Family, Any]:
    """The family of a keras-nlp model, and its backbone.

    Args:
        model: A backbone, or a causal LM.

    Raises:
        ModelSourceError: It is of none; says which there are.
    """
    from keras_hub import models

    # Subclasses may compute something else: only the classes that are known are taken.
    for family in FAMILIES:
        if type(model) is getattr(models, family.causal_lm):
            return family, model.backbone
        if type(model) is getattr(models, family.backbone):
            return family, model
    raise ModelSourceError(
        f"{type(model).__module__}.{type(model).__name__} is not supported. Expected a keras-nlp "
        f"backbone or causal LM of one of: {', '.join(family.name for family in FAMILIES)}."
    )

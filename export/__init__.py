"""Model importers, the in-graph session engine and the exporter of SavedModels.

Importing this package stays cheap: TensorFlow is loaded by the names that need it, on
first use.

Example:
    >>> import tfkv.export
    >>> tfkv.export.export("smollm2", "artifacts/smollm2", cache="int8")  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfkv.export.cache_eval import EvalPlan, evaluate_caches
    from tfkv.export.calibrating import calibrate_model
    from tfkv.export.engine import Engine
    from tfkv.export.exporter import export
    from tfkv.export.importers.keras_lora import lora_from_keras_nlp
    from tfkv.export.importers.keras_nlp import from_keras_nlp
    from tfkv.export.keras_exporter import TextFiles, export_keras
    from tfkv.export.lora_adapter import LoraAdapter
    from tfkv.export.planner import MemoryPlan, plan_memory
    from tfkv.export.verification import LoadedArtifact

__all__ = [
    "Engine",
    "EvalPlan",
    "LoadedArtifact",
    "LoraAdapter",
    "MemoryPlan",
    "TextFiles",
    "calibrate_model",
    "evaluate_caches",
    "export",
    "export_keras",
    "from_keras_nlp",
    "lora_from_keras_nlp",
    "plan_memory",
]

_HOMES = {
    "Engine": "engine",
    "EvalPlan": "cache_eval",
    "LoadedArtifact": "verification",
    "LoraAdapter": "lora_adapter",
    "MemoryPlan": "planner",
    "TextFiles": "keras_exporter",
    "calibrate_model": "calibrating",
    "evaluate_caches": "cache_eval",
    "export": "exporter",
    "export_keras": "keras_exporter",
    "from_keras_nlp": "importers.keras_nlp",
    "lora_from_keras_nlp": "importers.keras_lora",
    "plan_memory": "planner",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Calls the signatures of an engine in this process, nothing exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfkv.config import EngineConfig
from tfkv.export.engine import Engine
from tfkv.export.importers import ModelSource
from tfkv.export.lora_adapter import LoraAdapter
from tfkv.export.signatures import build_signatures
from tfkv.export.verification import complete_inputs
from tfkv.layers.codecs import CodecTables
from tfkv.manifest import MAX_STOP_TOKENS, signature_table


class EngineCalls:
    """Answers as the artifact would that `tfkv.export.export` makes of the same arguments.

    A signature is traced and compiled by its first call. Called like a `LoadedArtifact`.

    Args:
        model: Architecture, weights and stop tokens.
        engine: What to compile for.
        calibration: Of the same weights, for a codec that needs one.
        adapters: By name, checked against the weights.

    Attributes:
        engine: Likewise.

    Raises:
        ConfigError: Model and engine do not fit together.
    """

    def __init__(
        self,
        model: ModelSource,
        engine: EngineConfig,
        calibration: CodecTables | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
    ) -> None:
        self.engine = engine
        self._engine = Engine(
            model.config, model.weights, engine, calibration=calibration, adapters=adapters
        )
        self._table = signature_table(
            engine,
            model.stop_tokens[:MAX_STOP_TOKENS],
            self._engine.page_bytes,
            bool(adapters),
        )
        self._signatures = build_signatures(self._engine, self._table)
        self._traced: dict[str, Callable[..., dict[str, tf.Tensor]]] = {}

    def call(self, signature: str, **inputs: object) -> dict[str, np.ndarray]:
        """See `LoadedArtifact.call`."""
        if signature not in self._traced:
            self._traced[signature] = self._signatures[signature].get_concrete_function()
        complete = complete_inputs(self._table[signature], inputs)
        tensors = {name: tf.constant(value) for name, value in complete.items()}
        answer = self._traced[signature](**tensors)
        return {name: value.numpy() for name, value in answer.items()}

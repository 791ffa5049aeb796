"""Adapters of an export, from wherever they are."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from tfkv.errors import ModelSourceError
from tfkv.export.adapter_table import check_name
from tfkv.export.importers import ModelSource
from tfkv.export.importers.keras_lora import SUFFIX, lora_from_file, lora_from_keras_nlp
from tfkv.export.lora_adapter import LoraAdapter


def load_adapters(
    adapters: Mapping[str, object], base: ModelSource, model: object = None
) -> dict[str, LoraAdapter]:
    """Reads adapters, and checks each against the base.

    Args:
        adapters: Name to a `LoraAdapter` or its file, a ``.lora.h5`` file of keras-nlp, or a
            keras-nlp model with LoRA weights.
        base: What they add to.
        model: What `base` was read from; files of keras-nlp need it where it is a keras-nlp model.

    Returns:
        The adapters, in order.

    Raises:
        ConfigError: One has no proper name.
        ModelSourceError: One cannot be read, or does not fit the base; says which.
    """
    found = {}
    for name, source in adapters.items():
        check_name(name)
        try:
            adapter = _load(source, base, model)
            adapter.check(base.config, base.weights)
        except ModelSourceError as error:
            raise ModelSourceError(f"Adapter {name!r}: {error}") from error
        found[name] = adapter
    return found


def _load(source: object, base: ModelSource, model: object) -> LoraAdapter:
    if isinstance(source, LoraAdapter):
        return source
    if not isinstance(source, str | pathlib.Path):
        return lora_from_keras_nlp(source, base)
    if str(source).endswith(SUFFIX):
        described = isinstance(model, str | pathlib.Path | ModelSource)
        return lora_from_file(source, base.config, None if described else model)
    return LoraAdapter.load(source)

"""Adapters of the tiny model, each lively enough to change what it says."""

from __future__ import annotations

import numpy as np
import tiny_model

from tfkv.config import DecoderConfig
from tfkv.export import LoraAdapter
from tfkv.export.importers import expected_tensors
from tfkv.export.importers.source import matrix_shape
from tfkv.export.lora_adapter import TARGETS

_HEADED = ("query", "key", "value")


def make_adapter(
    seed: int,
    targets: tuple[str, ...] = ("query", "value"),
    rank: int = 3,
    by_head: bool = True,
    config: DecoderConfig = tiny_model.CONFIG,
) -> LoraAdapter:
    """Random factors of all layers.

    Args:
        seed: Of the random numbers.
        targets: Matrices that it adds to.
        rank: Of its factors.
        by_head: Whether queries, keys and values have the form of keras-nlp.
        config: Of the base.
    """
    draw = np.random.default_rng([11, seed])
    factors = {}
    for name, shape in expected_tensors(config):
        target = name.rpartition("/")[2]
        if name.startswith("layers/") and target in targets:
            out, width = matrix_shape(name, shape)
            parts = shape[1] if by_head and target in _HEADED else 1
            a = draw.normal(size=(width, parts, rank)) / np.sqrt(width)
            b = draw.normal(size=(rank, out // parts)) / np.sqrt(rank)
            factors[name] = (a.astype(np.float32), b.astype(np.float32))
    return LoraAdapter(factors)


#: As keras-nlp's default; and one that adds to every matrix, with another rank and form.
ADAPTERS = {
    "legal": make_adapter(1),
    "medical": make_adapter(2, TARGETS, rank=2, by_head=False),
}
MERGED = {
    "": tiny_model.WEIGHTS,
    **{name: one.merged(tiny_model.WEIGHTS) for name, one in ADAPTERS.items()},
}

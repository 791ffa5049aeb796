"""Weights of a layer by path, whichever Keras it is of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfkv.layers.keras_api import LEGACY


def by_path(layer: Any) -> dict[str, Any]:
    """Every weight under the names of the layers that lead to it, as Keras 3 writes it."""
    return dict(_walk(layer, "")) if LEGACY else {w.path: w for w in layer.weights}


def _walk(layer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    here = f"{prefix}{layer.name}/"
    for weight in (*layer._trainable_weights, *layer._non_trainable_weights):
        yield here + weight.name.rpartition("/")[2].removesuffix(":0"), weight
    for inner in layer._flatten_layers(recursive=False, include_self=False):
        yield from _walk(inner, here)

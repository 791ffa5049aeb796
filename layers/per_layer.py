"""The cache of each layer of a model: one string, exceptions, and what a calibration adds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from tfkv.errors import ConfigError
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs.calibrated_codec import CodecTables
from tfkv.layers.policies.cache_policy import BudgetTables


class CalibrationTables(BudgetTables, CodecTables, Protocol):
    """What a calibration tells policies and codecs; `tfkv.calibration.Calibration` is one."""


def layer_caches(
    cache: CacheSpec | str,
    layers: int,
    heads: int,
    exceptions: Sequence[str] = (),
    tables: CalibrationTables | None = None,
) -> list[CacheSpec]:
    """What each layer keeps.

    Args:
        cache: Of all layers but the exceptions.
        layers: Number of layers (axis L).
        heads: KV heads (axis K).
        exceptions: ``"0-1=int8"``: layers 0 and 1; ``"3,5-7=sliding_window(window=512)"``. One
            that names a policy alone keeps the codec, and the other way round. Later ones win.
        tables: A calibration, for policies whose `caps` name a table of it, and for codecs that
            need one.

    Raises:
        ConfigError: An exception cannot be read or names a layer that is not there, or a
            calibration is needed and none was given.

    Example:
        >>> [str(c) for c in layer_caches("k4v4", 3, 2, ["0=int8"])]
        ['dense+int8', 'dense+k4v4', 'dense+k4v4']
    """
    specs = with_exceptions(cache, layers, exceptions)
    return [_at_layer(spec, layer, layers, heads, tables) for layer, spec in enumerate(specs)]


def with_exceptions(
    cache: CacheSpec | str, layers: int, exceptions: Sequence[str]
) -> list[CacheSpec]:
    """What was asked for each layer, before a calibration adds to it; as `layer_caches`."""
    specs = [CacheSpec.parse(cache)] * layers
    for text in exceptions:
        numbers, equals, other = text.partition("=")
        if not equals:
            raise ConfigError(f"Expected layers=cache, such as '0-1=int8'. Received: {text!r}.")
        for layer in _layers(numbers, layers, text):
            specs[layer] = specs[layer].changed(other)
    return specs


def normal_form(
    cache: CacheSpec | str, layers: int, exceptions: Sequence[str]
) -> tuple[CacheSpec, tuple[str, ...]]:
    """A cache and its exceptions as they are written down, however they were asked for: one
    exception for each cache that differs, none where all layers are alike.

    Example:
        >>> normal_form("k4v4", 4, ["0=int8", "3=int8"])[1]
        ('0,3=int8',)
        >>> str(normal_form("k4v4", 4, ["0-3=int8"])[0])
        'dense+int8'
    """
    specs = with_exceptions(cache, layers, exceptions)
    names = [str(spec) for spec in specs]
    usual = CacheSpec.parse(cache)
    usual = usual if str(usual) in names else specs[0]
    others = [name for name in dict.fromkeys(names) if name != str(usual)]
    # A codec alone keeps the policy.
    return usual, tuple(
        f"{_spans([layer for layer, name in enumerate(names) if name == other])}="
        + other.removeprefix(f"{usual.policy}+")
        for other in others
    )


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as ``0-1,5``."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    pairs = zip(firsts, lasts, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def _at_layer(
    spec: CacheSpec, layer: int, layers: int, heads: int, tables: CalibrationTables | None
) -> CacheSpec:
    policy = spec.policy.at_layer(layer, layers, heads, tables)
    if getattr(policy, "caps", ""):
        raise ConfigError(
            f"{policy.name!r} shares its budget out by table {policy.caps!r} of a calibration. "  # type: ignore[attr-defined]
            "Make one with `tfkv calibrate` and pass it, or give caps='' for equal budgets."
        )
    codec = spec.codec
    if codec.needs_calibration and tables is not None:
        codec = codec.bind(tables, layer)
    return dataclasses.replace(spec, policy=policy, codec=codec)


def _layers(numbers: str, count: int, text: str) -> list[int]:
    found: list[int] = []
    for part in numbers.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"Expected layers=cache, such as '0-1=int8'. Received: {text!r}.")
        span = range(int(first), int(last if dash else first) + 1)
        if not span or span[-1] >= count:
            raise ConfigError(
                f"The model has layers 0 to {count - 1}. Received: layers {part.strip()!r} in "
                f"{text!r}."
            )
        found += span
    return found

"""A LoRA adapter: what a fine-tuning adds to some matrices of a model, kept apart from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Self

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ModelSourceError
from tfkv.export.importers.source import HEADS, expected_tensors, matrix_shape

#: Matrices of a block that an adapter may add to.
TARGETS = ("query", "key", "value", "attention_output", "gate", "up", "down")
_FORMAT = "tfkv lora 1"

#: ``a [in, G, r]`` and ``b [r, out / G]``.
Factors = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class LoraAdapter:
    """Low-rank additions to a model's matrices; reference: https://arxiv.org/abs/2106.09685.

    Choose it to serve several fine-tunings of one model from one artifact: see ``adapters`` of
    `tfkv.export.export`. `tfkv.export.lora_from_keras_nlp` makes one of a keras-nlp model.

    A matrix ``[in, out]``, its heads side by side, gets the sum over r of ``a [in, G, r]`` times
    ``b [r, out / G]``. G is 1; or the number of heads, for queries, keys and values of the
    families whose kernels keras-nlp has head by head: Keras then trains an ``a`` for each head,
    and one ``b`` for all of them.

    Args:
        factors: Canonical name of a matrix, such as ``layers/3/query``, to ``(a, b)``, float32.
            The scale alpha / r is part of ``b``.
        base: `fingerprint_of_weights` of what it was trained beside; empty where it is not known.
        description: Where it came from, for people.

    Example:
        >>> adapter = lora_from_keras_nlp(model)
        >>> adapter.save("legal.safetensors")
        >>> export("smollm2", "out", adapters={"legal": LoraAdapter.load("legal.safetensors")})
    """

    factors: Mapping[str, Factors]
    base: str = ""
    description: str = ""

    @property
    def rank(self) -> int:
        """The largest r of its factors."""
        return max((b.shape[0] for _, b in self.factors.values()), default=0)

    @property
    def targets(self) -> tuple[str, ...]:
        """Which of `TARGETS` it adds to."""
        named = {name.rpartition("/")[2] for name in self.factors}
        return tuple(name for name in TARGETS if name in named)

    @property
    def fingerprint(self) -> str:
        """Equal for equal factors."""
        digest = hashlib.sha256()
        for name, factors in sorted(self.factors.items()):
            for factor in factors:
                digest.update(f"{name}{factor.shape}".encode() + np.ascontiguousarray(factor).data)
        return digest.hexdigest()

    def check(self, config: DecoderConfig, weights: Mapping[str, np.ndarray]) -> None:
        """Checks that it fits a model.

        Args:
            config: Of the model.
            weights: Canonical weights.

        Raises:
            ModelSourceError: It adds to what the model does not have or an adapter cannot, has
                factors of other shapes or without a value, or was trained beside other weights.
        """
        shapes = dict(expected_tensors(config))
        if not self.factors:
            raise ModelSourceError("The adapter adds to nothing. Expected at least one matrix.")
        for name, (a, b) in self.factors.items():
            if name not in shapes or name.rpartition("/")[2] not in TARGETS:
                raise ModelSourceError(
                    f"The adapter adds to {name!r}. Expected {', '.join(TARGETS)} of a block "
                    f"'layers/0' to 'layers/{config.num_layers - 1}' that has it."
                )
            _check_factors(name, a, b, matrix_shape(name, shapes[name]), shapes[name])
        beside = fingerprint_of_weights(weights) if self.base else ""
        if self.base != beside:
            raise ModelSourceError(
                "The adapter was trained beside other weights than the base has: fingerprint "
                f"{self.base}, of the base {beside}. Give the base that "
                "it was trained on."
            )

    def merged(self, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Canonical weights with the additions in them; those it leaves alone are shared."""
        changed = dict(weights)
        for name, (a, b) in self.factors.items():
            added = np.matmul(a, b).reshape(weights[name].shape)
            changed[name] = (weights[name] + added).astype(np.float32)
        return changed

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a safetensors file: ``<name>/a`` and ``<name>/b`` of each matrix."""
        from safetensors.numpy import save_file

        tensors = {
            f"{name}/{side}": np.ascontiguousarray(factor)
            for name, factors in self.factors.items()
            for side, factor in zip("ab", factors, strict=True)
        }
        about = {"format": _FORMAT, "base": self.base, "description": self.description}
        save_file(tensors, path, metadata={"tfkv": json.dumps(about)})

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            ModelSourceError: It is not such a file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                about = json.loads((file.metadata() or {})["tfkv"])
                if about["format"] != _FORMAT:
                    raise ValueError(f"another format, {about['format']!r}")
                names = sorted({name.rpartition("/")[0] for name in file.keys()})  # noqa: SIM118
                factors = {
                    name: (file.get_tensor(f"{name}/a"), file.get_tensor(f"{name}/b"))
                    for name in names
                }
            return cls(factors, about["base"], about["description"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelSourceError(
                f"{path} is not an adapter ({type(error).__name__}: {error}). Expected a file of "
                "`LoraAdapter.save`, or one of keras-nlp's `save_lora_weights`, which ends in "
                ".lora.h5."
            ) from error


def fingerprint_of_weights(weights: Mapping[str, np.ndarray]) -> str:
    """Equal for equal weights."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name]).data)
    return digest.hexdigest()


def _check_factors(
    name: str, a: np.ndarray, b: np.ndarray, matrix: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    heads = shape[1] if name.rpartition("/")[2] in HEADS else 1
    out, width = matrix
    forms = [((width, parts), out // parts) for parts in dict.fromkeys((1, heads))]
    fits = a.ndim == 3 and b.ndim == 2 and (a.shape[:2], b.shape[1]) in forms
    if not fits or a.shape[2] != b.shape[0] or not b.shape[0]:
        expected = " or ".join(f"{(*lead, 'r')} and {('r', last)}" for lead, last in forms)
        raise ModelSourceError(
            f"The adapter's factors of {name!r} have the wrong shapes. Expected: {expected}. "
            f"Received: {a.shape} and {b.shape}."
        )
    if a.dtype != np.float32 or b.dtype != np.float32:
        raise ModelSourceError(
            f"The adapter's factors of {name!r} have the wrong dtype. Expected: float32. "
            f"Received: {a.dtype} and {b.dtype}."
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ModelSourceError(
            f"The adapter's factors of {name!r} hold values that are not finite: the file is "
            "damaged or training diverged."
        )

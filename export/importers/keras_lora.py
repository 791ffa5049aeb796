"""LoRA adapters of keras-nlp: models with `enable_lora`, and files of `save_lora_weights`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ModelSourceError
from tfkv.export.importers.families import Family, family_of
from tfkv.export.importers.families.llama import LLAMA
from tfkv.export.importers.source import ModelSource, expected_tensors, matrix_shape
from tfkv.export.lora_adapter import TARGETS, LoraAdapter, fingerprint_of_weights

if TYPE_CHECKING:
    import h5py

#: End of the names of keras-nlp's files.
SUFFIX = ".lora.h5"


def lora_from_keras_nlp(model: Any, base: ModelSource | None = None) -> LoraAdapter:
    """Takes the LoRA weights out of a keras-nlp model, apart from the frozen ones.

    keras-nlp 0.32 adds to queries and values by default, with alpha = rank; other layers can be
    named, all but embeddings, experts and routers can be taken. A model quantised underneath is
    refused.

    Args:
        model: A backbone or a causal LM on which ``backbone.enable_lora(rank)`` was called.
        base: Model that it shall add to; where left out, whichever has its frozen weights.

    Returns:
        The adapter; it knows the frozen weights by their fingerprint.

    Raises:
        ModelSourceError: The model has no LoRA weights, has some on a layer that cannot be
            taken, or its frozen weights are not those of `base`.
    """
    from tfkv.export.importers.keras_nlp import read_frozen

    family, backbone = family_of(model)
    frozen = read_frozen(model)
    adapted = [layer for layer in _layers(backbone) if getattr(layer, "lora_enabled", False)]
    factors, taken = {}, set()
    for name, layer in _targets(family, backbone, frozen.config):
        if getattr(layer, "lora_enabled", False):
            b = np.asarray(layer.lora_kernel_b) * (layer.lora_alpha / layer.lora_rank)
            factors[name] = _canonical(
                family, frozen.config, name, np.asarray(layer.lora_kernel_a), b
            )
            taken.add(id(layer))
    _refuse_others([layer.path for layer in adapted if id(layer) not in taken])
    if not factors:
        raise ModelSourceError(
            f"The {family.name} has no LoRA weights. Call `backbone.enable_lora(rank)` before it "
            "is trained; a model trained as a whole is exported by itself."
        )
    if base is not None:
        _require_same(frozen.weights, base.weights)
    about = f"keras-nlp {type(model).__name__} {model.name!r}"
    return LoraAdapter(factors, fingerprint_of_weights(frozen.weights), about)


def lora_from_file(
    path: str | pathlib.Path, config: DecoderConfig, model: Any = None
) -> LoraAdapter:
    """Reads a file of keras-nlp's ``backbone.save_lora_weights``.

    Such a file numbers layers, and says neither their names nor the frozen weights: that it
    belongs to the base can be told by shapes alone. `LoraAdapter.save` remembers more.

    Args:
        path: Ends in ``.lora.h5``.
        config: Of the base.
        model: The base as a keras-nlp model; where left out, the base must be a Llama.

    Raises:
        ModelSourceError: It is not such a file, adds to a layer that cannot be taken, or numbers
            layers in another way than the base.
    """
    import h5py

    family, block, distance = _numbering(config, model)
    try:
        with h5py.File(path, "r") as file:
            stored = dict(_read(file))
    except (OSError, KeyError, ValueError) as error:
        raise ModelSourceError(
            f"{path} is not a file of keras-nlp's `save_lora_weights` "
            f"({type(error).__name__}: {error})."
        ) from error
    factors = {}
    for layer in range(config.num_layers):
        for number, name in block.items():
            found = stored.pop(number + layer * distance, None)
            if found is not None:
                full = f"layers/{layer}/{name}"
                factors[full] = _canonical(family, config, full, *found)
    _refuse_others([f"number {number}" for number in sorted(stored)])
    return LoraAdapter(factors, description=f"keras-nlp {pathlib.Path(path).name}")


def _read(file: h5py.File) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Number of each layer in a file, and its kernels."""
    for key, group in file["lora"].items():
        if key != "vars":
            kernels = group["vars"]
            yield int(key), (kernels["lora_kernel_a"][()], kernels["lora_kernel_b"][()])


def _numbering(config: DecoderConfig, model: Any) -> tuple[Family, dict[int, str], int]:
    """How keras-nlp numbers layers that have weights.

    Returns:
        The family; number to name of the first block's matrices; and the distance to the next
        block's.
    """
    if model is None:
        family, backbone = LLAMA, _two_blocks(config)
    else:
        family, backbone = family_of(model)
    number_of = {id(layer): number for number, layer in enumerate(_layers(backbone))}
    of_name = {
        name: number_of[id(layer)]
        for name, layer in _targets(family, backbone, config)
        if name.startswith(("layers/0/", "layers/1/"))
    }
    first = {n: name.rpartition("/")[2] for name, n in of_name.items() if "/0/" in name}
    if config.num_layers == 1:
        return family, first, 0
    distances = {of_name[f"layers/1/{name}"] - number for number, name in first.items()}
    if len(distances) != 1:
        raise ModelSourceError(
            "The blocks of the base differ, so that numbers of layers do not tell them apart. "
            "Give the adapter as a keras-nlp model."
        )
    return family, first, distances.pop()


def _two_blocks(config: DecoderConfig) -> Any:
    """A Llama that has all the layers of a block, and next to no weights."""
    from keras_hub.models import LlamaBackbone

    from tfkv.export.importers.keras_nlp import is_plain_llama

    if not is_plain_llama(config):
        raise ModelSourceError(
            "A .lora.h5 file numbers the layers of a keras-nlp model, and this base is no plain "
            "Llama. Give the base as a keras-nlp model, or the adapter as one."
        )
    return LlamaBackbone(
        vocabulary_size=2,
        num_layers=min(config.num_layers, 2),
        num_query_heads=1,
        hidden_dim=2,
        intermediate_dim=2,
        num_key_value_heads=1,
    )


def _layers(backbone: Any) -> list[Any]:
    """Layers with weights, in the order in which `save_lora_weights` numbers them."""
    return [layer for layer in backbone._flatten_layers(include_self=False) if layer.weights]


def _targets(family: Family, backbone: Any, config: DecoderConfig) -> Iterator[tuple[str, Any]]:
    """Canonical names of the matrices an adapter may add to, and the layers that own them."""
    blocks = len(backbone.transformer_layers)
    for name, _ in expected_tensors(config):
        inside = name.startswith("layers/") and int(name.split("/")[1]) < blocks
        if inside and name.rpartition("/")[2] in TARGETS:
            layer, key, _ = family.find(backbone, name)
            if key == "kernel":
                yield name, layer


def _canonical(
    family: Family, config: DecoderConfig, name: str, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Factors of keras-nlp's kernel as those of the canonical matrix, see `LoraAdapter`."""
    convert_a, convert_b = family.convert_factors(name)
    a, b = convert_a(a), convert_b(b)
    out, width = matrix_shape(name, dict(expected_tensors(config))[name])
    rank, part = b.shape
    parts = max(out // part, 1)
    if a.size != width * parts * rank or parts * part != out:
        raise ModelSourceError(
            f"The adapter's factors do not fit {name!r} of the base, {width} by {out} numbers. "
            f"Received: {a.shape} and {b.shape}. Is it of another model?"
        )
    shaped = a.reshape(width, parts, rank)
    return np.array(shaped, np.float32, order="C"), np.array(b, np.float32, order="C")


def _require_same(frozen: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray]) -> None:
    for name, value in base.items():
        other = frozen.get(name)
        if other is None or other.shape != value.shape or not np.array_equal(other, value):
            what = "is missing" if other is None else "differs"
            raise ModelSourceError(
                f"The adapter was trained beside other weights than the base has: {name!r} {what}. "
                "Give the base as it was before the training; one that has LoRA weights itself is "
                "taken with them."
            )


def _refuse_others(places: list[str]) -> None:
    if places:
        raise ModelSourceError(
            f"The adapter adds to the layer {places[0]}, which is none of {', '.join(TARGETS)} of "
            "a block that the base has. Merge it: export the keras-nlp model itself."
        )

"""What a family of keras-nlp decoders says of itself: options, and where its weights lie."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfkv.architecture import Attention, Norms, Positions, Rope
from tfkv.config import DecoderConfig
from tfkv.errors import ModelSourceError
from tfkv.export.importers.families.ropes import rope_of

#: A keras-nlp backbone, or one of its blocks.
Layer = Any


@dataclasses.dataclass(frozen=True)
class Take:
    """Where a weight lies, and how it becomes the canonical one.

    What comes of it is reshaped, in order, so that a matrix over all heads need not be said
    to be one by head.

    Args:
        path: Attributes from the backbone, or from one of its blocks, to the weight.
        convert: Of the weight as keras-nlp has it.
        of_last_axis: Whether that is about the last axis of a matrix, and leaves the others alone;
            else it is the other way round. Factors of a product are converted by it.
    """

    path: str
    convert: Callable[[np.ndarray], np.ndarray] = lambda weight: weight
    of_last_axis: bool = False


Weights = Mapping[str, str | Take]
Convert = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of decoders.

    Args:
        name: As people call it.
        backbone: Class in ``keras_hub.models``.
        model: Canonical name to place, of weights beside the blocks.
        block: Likewise, of a block's. What a config does not expect is not looked for.
        options: Fields of `DecoderConfig` in which it differs from Llama, beside its sizes, its
            epsilons, and its rotations and windows.
        rotary: Path from a block to its rotary embedding layer; "" = there is none.
        turns: Whether a block turns queries and keys.
        channels: First channels of a head that turn; 0 = all.
        window: Newest tokens that a block's queries see; 0 = all.
        refusal: Why a backbone cannot be taken; "" = it can.
        context: Positions that it was trained on; 0 = it does not say.
    """

    name: str
    backbone: str
    model: Weights
    block: Weights
    options: Callable[[Layer], Mapping[str, Any]] = lambda backbone: {}
    rotary: str = ""
    turns: Callable[[Layer], bool] = lambda block: True
    channels: Callable[[Layer], int] = lambda block: 0
    window: Callable[[Layer], int] = lambda block: 0
    refusal: Callable[[Layer], str] = lambda backbone: ""
    context: Callable[[Layer], int] = lambda backbone: 0

    @property
    def causal_lm(self) -> str:
        """Class in ``keras_hub.models`` of the model with an output matrix."""
        return self.backbone.replace("Backbone", "CausalLM")

    def config(self, backbone: Layer, context_length: int) -> DecoderConfig:
        """The architecture of a backbone.

        Raises:
            ConfigError: Something in it is out of range.
            ModelSourceError: A rotation is not supported.
        """
        options = dict(self.options(backbone))
        sizes = sizes_of(backbone) | {k: options.pop(k) for k in tuple(options) if k in _SIZES}
        attention, norms = Attention(**options.pop("attention", {})), options.pop("norms", {})
        windows = tuple(map(self.window, backbone.transformer_layers))
        # One that holds the whole context hides nothing.
        windows = tuple(window if window < context_length else 0 for window in windows)
        if any(windows):
            attention = dataclasses.replace(attention, windows=windows)
        if self._normalizes_heads(backbone):
            between = self._epsilon(backbone, "query_norm")
            attention = dataclasses.replace(attention, query_key_epsilon=between)
        epsilon = self._epsilon(backbone, "attention_norm")
        final = float(owner(backbone, self._path(self.model["final_norm"])).epsilon)
        return DecoderConfig(
            **sizes,
            **self._rotation(backbone, sizes["head_dim"], context_length),
            rms_epsilon=epsilon,
            context_length=context_length,
            # The layer decides: `get_config` of keras-nlp 0.32 forgets `tie_word_embeddings`.
            tie_embeddings=bool(backbone.token_embedding.tie_weights),
            attention=attention,
            norms=Norms(**norms, final_epsilon=0.0 if final == epsilon else final),
            final_soft_cap=float(backbone.token_embedding.logit_soft_cap or 0.0),
            **options,
        )

    def _normalizes_heads(self, backbone: Layer) -> bool:
        if "query_norm" not in self.block:
            return False
        *steps, norm, _ = self._path(self.block["query_norm"]).split(".")
        return hasattr(functools.reduce(getattr, steps, backbone.transformer_layers[0]), norm)

    def _epsilon(self, backbone: Layer, name: str) -> float:
        path = self._path(self.block[name])
        found = {float(owner(block, path).epsilon) for block in backbone.transformer_layers}
        if len(found) > 1:
            raise ModelSourceError(
                f"The blocks have different epsilons in {name!r}, which is not supported. "
                f"Received: {sorted(found)}."
            )
        return found.pop()

    def _rotation(self, backbone: Layer, head_dim: int, context_length: int) -> dict[str, Any]:
        """`positions` and `rope_max_wavelength`; plain where they can be."""
        if not self.rotary:
            return {}
        each = [
            self._rope(block, head_dim, context_length) if self.turns(block) else None
            for block in backbone.transformer_layers
        ]
        ropes = list(dict.fromkeys(rope for rope in each if rope is not None))
        if not ropes:
            return {"positions": Positions(of_layers=(-1,) * len(each))}
        of_layers = tuple(-1 if rope is None else ropes.index(rope) for rope in each)
        longest = max(rope.max_wavelength for rope in ropes)
        plain = ropes == [Rope(longest)]
        positions = Positions(
            ropes=() if plain else tuple(ropes), of_layers=of_layers if any(of_layers) else ()
        )
        return {"positions": positions, "rope_max_wavelength": longest}

    def _rope(self, block: Layer, head_dim: int, context_length: int) -> Rope:
        layer = functools.reduce(getattr, self.rotary.split("."), block)
        channels = self.channels(block)
        turned = 0 if channels == head_dim else channels
        return rope_of(layer, head_dim, turned, context_length)

    def find(self, backbone: Layer, name: str) -> tuple[Layer, str, Callable[..., np.ndarray]]:
        """The layer that owns a weight, its attribute there, and how it is converted.

        Args:
            backbone: Of this family.
            name: Canonical name.

        Raises:
            ModelSourceError: The family has no such weight.
        """
        start, table, short = backbone, self.model, name
        if name.startswith("layers/"):
            _, number, short = name.split("/")
            start, table = backbone.transformer_layers[int(number)], self.block
        if short not in table:
            raise ModelSourceError(
                f"{self.name} has no weight {short!r}, which its options ask for. Expected one "
                f"of {', '.join(sorted(table))}."
            )
        place = table[short]
        path = self._path(place)
        convert = place.convert if isinstance(place, Take) else _as_it_is
        return owner(start, path), path.rpartition(".")[2], convert

    def convert_factors(self, name: str) -> tuple[Convert, Convert]:
        """How ``a [..., r]`` and ``b [r, X]`` are converted, whose product is added to a block's
        matrix ``[..., X]`` of this canonical name."""
        place = self.block[name.rpartition("/")[2]]
        if not isinstance(place, Take):
            return _as_it_is, _as_it_is
        if place.of_last_axis:
            return _as_it_is, place.convert
        return place.convert, _as_it_is

    @staticmethod
    def _path(place: str | Take) -> str:
        return place.path if isinstance(place, Take) else place


_SIZES = ("head_dim", "intermediate_dim")


def sizes_of(backbone: Layer) -> dict[str, int]:
    """The sizes of a backbone, whatever it calls them."""

    def first(*names: str) -> Any:
        values = (getattr(backbone, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    heads = first("num_query_heads", "num_attention_heads", "num_heads")
    return {
        "vocabulary_size": backbone.vocabulary_size,
        "num_layers": backbone.num_layers,
        "hidden_dim": backbone.hidden_dim,
        "num_query_heads": heads,
        "num_key_value_heads": first("num_key_value_heads") or heads,
        "head_dim": first("head_dim") or backbone.hidden_dim // heads,
        "intermediate_dim": backbone.intermediate_dim,
    }


def owner(start: Layer, path: str) -> Layer:
    """What the path without its last attribute leads to."""
    return functools.reduce(getattr, path.split(".")[:-1], start)


def _as_it_is(weight: np.ndarray) -> np.ndarray:
    return weight


# Conversions.


def turned(weight: np.ndarray) -> np.ndarray:
    """``[D, V]`` to ``[V, D]``."""
    return weight.T


def heads_first(weight: np.ndarray) -> np.ndarray:
    """``[N, D, H]`` to ``[D, N, H]``."""
    return weight.transpose(1, 0, 2)


def plus_one(weight: np.ndarray) -> np.ndarray:
    """A scale of which 1 was taken off, as it is applied."""
    return 1 + weight


def part(number: int, of: int) -> Callable[[np.ndarray], np.ndarray]:
    """One of several equal parts of the last axis."""
    return lambda weight: np.split(weight, of, axis=-1)[number]


#: Of all families that call them so.
EMBEDDINGS: Weights = {
    "token_embedding": "token_embedding.embeddings",
    "output": Take("token_embedding.reverse_embeddings", turned),
}

"""Architectures of the Hugging Face Hub, each as a declaration of options and tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfkv.architecture import Attention, FeedForward, Norms, Positions, Rope
from tfkv.config import DecoderConfig
from tfkv.errors import ModelSourceError

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


class Settings:
    """Look-ups in a ``config.json``.

    Args:
        folder: Name of the folder, for messages.
        values: What the file holds.
    """

    def __init__(self, folder: str, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self._values = values

    @property
    def architecture(self) -> str:
        """Class in `transformers`."""
        found = self._values.get("architectures") or ["none"]
        return str(found[0])

    def find(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A number that must be there where no default is given."""
        value = self.find(key, default)
        if type(value) is not int:
            raise ModelSourceError(
                f"config.json of {self.folder} must give {key!r} as a whole number. "
                f"Received: {value!r}."
            )
        return value

    def refuse(self, key: str, expected: str) -> ModelSourceError:
        """What is raised for a value that is not supported."""
        return ModelSourceError(
            f"config.json of {self.folder} sets {key!r} to {self.find(key)!r}, which is not "
            f"supported. Expected {expected}."
        )


class Rule(NamedTuple):
    """How a stored tensor becomes weights.

    Attributes:
        stored: Its name, without ``model.``.
        shape: As it is stored.
        take: Canonical names and arrays of it.
    """

    stored: str
    shape: tuple[int, ...]
    take: Callable[[np.ndarray], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Model:
    """An architecture.

    Args:
        options: Fields of `DecoderConfig` in which it differs from Llama, beside its sizes and
            its rotation.
        windows: Newest tokens that each layer's queries see, 0 = all; or none.
        positions: Of a rotation; see `Positions`.
        fused: Whether query, key and value are one tensor, and gate and up.
        plus_one: Whether 1 is to be added to the scales of norms.
        norms: Canonical name to stored one, of a block's norms.
    """

    options: Callable[[Settings], dict[str, Any]] = lambda settings: {}
    windows: Callable[[Settings], tuple[int, ...]] = lambda settings: ()
    positions: Callable[[Settings, Rope], Positions] = lambda settings, rope: Positions(
        ropes=(rope,)
    )
    fused: bool = False
    plus_one: bool = False
    norms: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "attention_norm": "input_layernorm",
            "feedforward_norm": "post_attention_layernorm",
        }
    )

    def config(self, settings: Settings, tied: bool) -> DecoderConfig:
        """The architecture that a file describes."""
        width, heads = settings.integer("hidden_size"), settings.integer("num_attention_heads")
        head_dim = settings.integer("head_dim", width // max(heads, 1))
        options = self.options(settings)
        attention = Attention(**options.pop("attention", {}), windows=_needed(settings, self))
        rope = _rope(settings, head_dim)
        positions = self.positions(settings, rope)
        if positions == Positions(ropes=(Rope(rope.max_wavelength),)):
            positions = Positions()
        activation = settings.find("hidden_activation") or settings.find("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise settings.refuse("hidden_act", f"one of {', '.join(_ACTIVATIONS)}")
        feed_forward = FeedForward(
            **{"activation": _ACTIVATIONS[activation], **options.pop("feed_forward", {})}
        )
        return DecoderConfig(
            vocabulary_size=settings.integer("vocab_size"),
            num_layers=settings.integer("num_hidden_layers"),
            hidden_dim=width,
            num_query_heads=heads,
            num_key_value_heads=settings.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_dim=settings.integer("intermediate_size"),
            rope_max_wavelength=rope.max_wavelength,
            rms_epsilon=float(settings.find("rms_norm_eps", 1e-6)),
            context_length=settings.integer("max_position_embeddings"),
            tie_embeddings=tied,
            positions=positions,
            attention=attention,
            feed_forward=feed_forward,
            **options,
        )

    def rules(self, config: DecoderConfig) -> Iterator[Rule]:
        """Every tensor of a folder."""
        vocabulary, width = config.vocabulary_size, config.hidden_dim
        yield Rule("embed_tokens.weight", (vocabulary, width), _as("token_embedding"))
        for layer in range(config.num_layers):
            yield from self._block(config, f"layers.{layer}.", f"layers/{layer}/")
        yield self._norm("norm", "final_norm", width)
        if not config.tie_embeddings:
            yield Rule("lm_head.weight", (vocabulary, width), _as("output"))

    def _block(self, config: DecoderConfig, old: str, new: str) -> Iterator[Rule]:
        width, head, inner = config.hidden_dim, config.head_dim, config.intermediate_dim
        queries, groups = config.num_query_heads, config.num_key_value_heads
        heads = {"query": queries, "key": groups, "value": groups}
        attention, mlp = f"{old}self_attn.", f"{old}mlp."

        def by_head(name: str, count: int) -> Callable[[np.ndarray], Mapping[str, np.ndarray]]:
            return lambda rows: {new + name: rows.T.reshape(width, count, head)}

        def cut(names: tuple[str, ...], sizes: list[int], rows: np.ndarray) -> list[Any]:
            parts = np.split(rows, np.cumsum(sizes)[:-1])
            return list(zip(names, parts, strict=True))

        if self.fused:
            sizes = [count * head for count in heads.values()]
            yield Rule(
                f"{attention}qkv_proj.weight",
                (sum(sizes), width),
                lambda rows: {
                    new + name: part.T.reshape(width, heads[name], head)
                    for name, part in cut(tuple(heads), sizes, rows)
                },
            )
            yield Rule(
                f"{mlp}gate_up_proj.weight",
                (2 * inner, width),
                lambda rows: {
                    new + name: part.T for name, part in cut(("gate", "up"), [inner, inner], rows)
                },
            )
        else:
            for name, count in heads.items():
                stored = f"{attention}{name[0]}_proj"
                yield Rule(f"{stored}.weight", (count * head, width), by_head(name, count))
                if config.attention.bias:
                    shaped = _as(f"{new}{name}_bias", (count, head))
                    yield Rule(f"{stored}.bias", (count * head,), shaped)
            for name in ("gate", "up"):
                yield from _dense(f"{mlp}{name}_proj", new + name, (inner, width), config)
        yield Rule(
            f"{attention}o_proj.weight",
            (width, queries * head),
            lambda rows: {f"{new}attention_output": rows.T.reshape(queries, head, width)},
        )
        if config.attention.output_bias:
            bias = _as(f"{new}attention_output_bias")
            yield Rule(f"{attention}o_proj.bias", (width,), bias)
        yield from _dense(f"{mlp}down_proj", f"{new}down", (width, inner), config)
        for name, stored in self.norms.items():
            yield self._norm(old + stored, new + name, width)
        if config.attention.query_key_epsilon:
            yield self._norm(f"{attention}q_norm", f"{new}query_norm", head)
            yield self._norm(f"{attention}k_norm", f"{new}key_norm", head)

    def _norm(self, stored: str, name: str, width: int) -> Rule:
        add = 1.0 if self.plus_one else 0.0
        return Rule(f"{stored}.weight", (width,), lambda scale: {name: scale + np.float32(add)})


def _as(
    name: str, shape: tuple[int, ...] | None = None
) -> Callable[[np.ndarray], Mapping[str, np.ndarray]]:
    return lambda value: {name: value if shape is None else value.reshape(shape)}


def _dense(stored: str, name: str, shape: tuple[int, int], config: DecoderConfig) -> Iterator[Rule]:
    """Of a feed-forward layer."""
    yield Rule(f"{stored}.weight", shape, lambda rows: {name: rows.T})
    if config.feed_forward.bias:
        yield Rule(f"{stored}.bias", shape[:1], _as(f"{name}_bias"))


def _needed(settings: Settings, model: Model) -> tuple[int, ...]:
    """Windows that hide something."""
    context = settings.integer("max_position_embeddings")
    windows = tuple(window if window < context else 0 for window in model.windows(settings))
    return windows if any(windows) else ()


# Rotations.


def _rope(settings: Settings, head_dim: int) -> Rope:
    """RoPE of a file, scaled as it says; that of global layers, where there are two."""
    scaling = settings.find("rope_scaling") or settings.find("rope_parameters") or {}
    scaling = scaling.get("full_attention", scaling)
    base = float(scaling.get("rope_theta") or settings.find("rope_theta", 10000.0))
    share = float(settings.find("partial_rotary_factor", 1.0))
    channels = int(head_dim * share)
    rope = Rope(base, 0 if channels == head_dim else channels)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    original = scaling.get("original_max_position_embeddings") or settings.find(
        "original_max_position_embeddings"
    )
    if kind == "default":
        return rope
    if kind == "linear":
        return rope.linear(float(scaling["factor"]))
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return rope.llama3(head_dim, float(scaling["factor"]), low, high, original)
    if kind == "yarn" and not {"mscale", "mscale_all_dim", "attention_factor"} & set(scaling):
        original = original or settings.integer("max_position_embeddings")
        fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        truncate = scaling.get("truncate", True)
        return rope.yarn(head_dim, float(scaling["factor"]), original, fast, slow, truncate)
    raise settings.refuse("rope_scaling", "linear, llama3, or yarn with no other factors")


def _kinds(settings: Settings, default: Callable[[int], bool]) -> list[bool]:
    """Whether each layer is local: as the file lists it, or by its number."""
    layers = settings.integer("num_hidden_layers")
    kinds = settings.find("layer_types")
    if kinds is None:
        return [default(layer) for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise settings.refuse("layer_types", f"one of two kinds for each of {layers} layers")
    return [kind == "sliding_attention" for kind in kinds]


# Architectures.


def _everywhere(settings: Settings) -> tuple[int, ...]:
    return (settings.find("sliding_window", 0),) * settings.integer("num_hidden_layers")


def _where_asked(settings: Settings) -> tuple[int, ...]:
    """Of Qwen and SmolLM3: no layer unless the file asks for it, and then the last ones."""
    if not settings.find("use_sliding_window", False):
        return ()
    first = settings.find("max_window_layers", 0)
    local = _kinds(settings, lambda layer: layer >= first)
    return tuple(settings.find("sliding_window", 0) if one else 0 for one in local)


def _gemma_windows(pattern: int) -> Callable[[Settings], tuple[int, ...]]:
    def windows(settings: Settings) -> tuple[int, ...]:
        every = settings.find("sliding_window_pattern", pattern)
        local = _kinds(settings, lambda layer: (layer + 1) % every != 0)
        return tuple(settings.find("sliding_window", 4096) if one else 0 for one in local)

    return windows


def _llama(settings: Settings) -> dict[str, Any]:
    bias = bool(settings.find("attention_bias", False))
    return {
        "attention": {"bias": bias, "output_bias": bias},
        "feed_forward": {"bias": bool(settings.find("mlp_bias", False))},
    }


def _qwen3(settings: Settings) -> dict[str, Any]:
    bias = bool(settings.find("attention_bias", False))
    epsilon = float(settings.find("rms_norm_eps", 1e-6))
    return {"attention": {"bias": bias, "output_bias": bias, "query_key_epsilon": epsilon}}


def _gemma(settings: Settings) -> dict[str, Any]:
    # transformers computes the tanh approximation whatever `hidden_act` says.
    return {
        "feed_forward": {"activation": "gelu_tanh"},
        "embedding_scale": math.sqrt(settings.integer("hidden_size")),
    }


def _gemma2(settings: Settings) -> dict[str, Any]:
    return {
        **_gemma(settings),
        "attention": {
            "soft_cap": float(settings.find("attn_logit_softcapping", 0.0)),
            "query_scale": float(settings.find("query_pre_attn_scalar", 256)) ** -0.5,
        },
        "norms": Norms(post_attention=True, post_feedforward=True),
        "final_soft_cap": float(settings.find("final_logit_softcapping", 0.0)),
    }


def _gemma3(settings: Settings) -> dict[str, Any]:
    options = _gemma2(settings)
    epsilon = float(settings.find("rms_norm_eps", 1e-6))
    return {**options, "attention": {**options["attention"], "query_key_epsilon": epsilon}}


def _gemma3_positions(settings: Settings, rope: Rope) -> Positions:
    """Local layers turn by a base of their own, unscaled."""
    named = (settings.find("rope_parameters") or {}).get("sliding_attention", {})
    base = named.get("rope_theta") or settings.find("rope_local_base_freq", 10000.0)
    local = Rope(float(base))
    every = settings.find("sliding_window_pattern", 6)
    kinds = _kinds(settings, lambda layer: (layer + 1) % every != 0)
    return Positions(ropes=(rope, local), of_layers=tuple(map(int, kinds)))


def _smollm3_positions(settings: Settings, rope: Rope) -> Positions:
    """Every fourth layer has no positions."""
    layers = settings.integer("num_hidden_layers")
    every = settings.find("no_rope_layer_interval", 4)
    turns = settings.find("no_rope_layers") or [(n + 1) % every != 0 for n in range(layers)]
    return Positions(ropes=(rope,), of_layers=tuple(0 if one else -1 for one in turns))


_GEMMA2_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "feedforward_norm": "pre_feedforward_layernorm",
    "post_feedforward_norm": "post_feedforward_layernorm",
}

#: A new architecture adds its line here.
MODELS: dict[str, Model] = {
    "LlamaForCausalLM": Model(_llama),
    "MistralForCausalLM": Model(windows=_everywhere),
    "Qwen2ForCausalLM": Model(lambda settings: {"attention": {"bias": True}}, _where_asked),
    "Qwen3ForCausalLM": Model(_qwen3, _where_asked),
    "Phi3ForCausalLM": Model(windows=_everywhere, fused=True),
    "SmolLM3ForCausalLM": Model(_llama, _where_asked, _smollm3_positions),
    "GemmaForCausalLM": Model(_gemma, plus_one=True),
    "Gemma2ForCausalLM": Model(_gemma2, _gemma_windows(2), plus_one=True, norms=_GEMMA2_NORMS),
    "Gemma3ForCausalLM": Model(
        _gemma3, _gemma_windows(6), _gemma3_positions, plus_one=True, norms=_GEMMA2_NORMS
    ),
}

"""`ModelSource`: a decoder's weights, tokenizer and template, whatever they came from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from tfkv.architecture import Experts
from tfkv.config import DecoderConfig
from tfkv.errors import ModelSourceError

#: Projections into heads.
HEADS = ("query", "key", "value")
#: Matrices that an engine may store in fewer bits. Those that choose experts are not among them.
_MATRICES = (
    "token_embedding",
    "output",
    *HEADS,
    "attention_output",
    *("gate", "up", "down"),
    *("expert_gate", "expert_up", "expert_down"),
    *("shared_gate", "shared_up", "shared_down"),
)


def is_matrix(name: str) -> bool:
    """Whether a canonical weight is a matrix that an engine may store in fewer bits."""
    return name.rsplit("/", 1)[-1] in _MATRICES


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axes ``[..., out, in]`` of a canonical matrix of a `shape`, its heads side by side.

    Example:
        >>> matrix_shape("layers/0/query", (576, 9, 64))
        (576, 576)
    """
    leaf = name.rsplit("/", 1)[-1]
    if leaf in ("token_embedding", "output"):
        return shape
    if leaf in HEADS:
        return math.prod(shape[1:]), shape[0]
    if leaf == "attention_output":
        return shape[-1], math.prod(shape[:-1])
    return *shape[:-2], shape[-1], shape[-2]


def expected_tensors(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of a decoder: the only source of both.

    Axes: V vocabulary, D hidden, N query heads, K key/value heads, H head dim, F
    feed-forward, E experts. Names and layouts are those of keras-nlp's Llama; an option adds
    its weights behind those that a block without it has.

    Args:
        config: Architecture.

    Yields:
        Canonical name and shape, embedding first, then block by block.
    """
    width, normal = config.hidden_dim, config.norms.kind == "layer"
    yield "token_embedding", (config.vocabulary_size, width)
    if config.positions.kind == "learned":
        yield "position_embedding", (config.context_length, width)
    if config.norms.embedding:
        yield from _norm("embedding_norm", width, normal)
    for layer in range(config.num_layers):
        for name, shape in (*_attention(config, layer), *_feed_forward(config, layer)):
            yield f"layers/{layer}/{name}", shape
    yield from _norm("final_norm", width, normal)
    if not config.tie_embeddings:
        yield "output", (config.vocabulary_size, width)


_Tensors = Iterator[tuple[str, tuple[int, ...]]]


def _norm(name: str, width: int, biased: bool) -> _Tensors:
    yield name, (width,)
    if biased:
        yield f"{name}_bias", (width,)


def _attention(config: DecoderConfig, layer: int) -> _Tensors:
    """Of a block, with its norms."""
    width, head, options = config.hidden_dim, config.head_dim, config.attention
    heads = {"query": config.num_query_heads}
    shares = config.kv_source(layer) != layer
    if not shares:
        heads |= dict.fromkeys(("key", "value"), config.num_key_value_heads)
    for name, count in heads.items():
        yield name, (width, count, head)
    yield "attention_output", (config.num_query_heads, head, width)
    if options.bias:
        for name, count in heads.items():
            yield f"{name}_bias", (count, head)
    if options.output_bias:
        yield "attention_output_bias", (width,)
    if options.query_key_epsilon:
        yield "query_norm", (head,)
        if not shares:
            yield "key_norm", (head,)
    norms = {
        "attention_norm": True,
        "feedforward_norm": True,
        "post_attention_norm": config.norms.post_attention,
        "post_feedforward_norm": config.norms.post_feedforward,
    }
    for name, there in norms.items():
        if there:
            yield from _norm(name, width, config.norms.kind == "layer")


def _feed_forward(config: DecoderConfig, layer: int) -> _Tensors:
    width, inner, options = config.hidden_dim, config.intermediate_dim, config.feed_forward
    experts = config.experts_of(layer)
    if experts is not None:
        yield from _experts(experts, width)
        return
    shapes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
    for name, shape in shapes.items():
        if name != "gate" or options.gated:
            yield name, shape
            if options.bias:
                yield f"{name}_bias", shape[1:]


def _experts(experts: Experts, width: int) -> _Tensors:
    count, inner, shared = experts.count, experts.intermediate_dim, experts.shared_dim
    yield "router", (width, count)
    yield "expert_gate", (count, width, inner)
    yield "expert_up", (count, width, inner)
    yield "expert_down", (count, inner, width)
    if shared:
        yield "shared_router", (width, 1)
        yield "shared_gate", (width, shared)
        yield "shared_up", (width, shared)
        yield "shared_down", (shared, width)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSource:
    """Everything an export needs of a model, independent of the file or object it came from.

    Importers make it; use `tfkv.export.importers.load` unless the weights come from
    somewhere else, in which case fill it in by hand and call `validate`. To give a source
    another tokenizer or template, use ``dataclasses.replace``.

    Args:
        config: Architecture.
        weights: Canonical name (see `expected_tensors`) to a float32 array:
            ``token_embedding [V, D]``; in each block ``layers/{i}/``: ``query [D, N, H]``,
            ``key`` and ``value [D, K, H]``, ``attention_output [N, H, D]``,
            ``attention_norm`` and ``feedforward_norm [D]``, ``gate`` and ``up [D, F]``,
            ``down [F, D]``; ``final_norm [D]``; ``output [V, D]`` only where it is not
            tied to the embedding; and those that options add. RoPE turns pairs (i, i + H/2),
            "rotate half".
        tokenizer_json: Tokenizer for the ``tokenizers`` library, ``None`` where the source
            has none that can be expressed so.
        chat_template: Jinja2 template of a conversation, empty where there is none.
        special_tokens: Role (``bos``, ``eos``, ``unk``, ``pad``) to token text.
        stop_tokens: Ids that end a turn, the end-of-sequence token first.
        description: Where the weights came from, for people.
    """

    config: DecoderConfig
    weights: dict[str, np.ndarray]
    tokenizer_json: str | None = None
    chat_template: str = ""
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    stop_tokens: tuple[int, ...] = ()
    description: str = ""

    def validate(self) -> None:
        """Checks names, shapes, dtypes and finiteness of all weights, and the stop tokens.

        Raises:
            ModelSourceError: Something is missing, superfluous, misshapen, not float32 or
                not finite; the message names what was expected and what came.
        """
        seen = set()
        for name, shape in expected_tensors(self.config):
            if name not in self.weights:
                raise ModelSourceError(
                    f"Weight {name!r} is missing. Expected a float32 array of shape {shape}."
                )
            _check_tensor(name, self.weights[name], shape)
            seen.add(name)
        superfluous = sorted(set(self.weights) - seen)
        if superfluous:
            raise ModelSourceError(
                f"Weight {superfluous[0]!r} has no place in the model. Expected the names that "
                f"`expected_tensors` gives for {self.config!r}."
            )
        for token in self.stop_tokens:
            if not 0 <= token < self.config.vocabulary_size:
                raise ModelSourceError(
                    "`stop_tokens` must lie within the vocabulary of "
                    f"{self.config.vocabulary_size}. Received: stop_tokens={self.stop_tokens!r}."
                )


def _check_tensor(name: str, value: object, shape: tuple[int, ...]) -> None:
    if not isinstance(value, np.ndarray):
        raise ModelSourceError(
            f"Weight {name!r} must be a NumPy array. Received: {type(value).__name__}."
        )
    if value.shape != shape:
        raise ModelSourceError(
            f"Weight {name!r} has the wrong shape. Expected: {shape}. Received: {value.shape}."
        )
    if value.dtype != np.float32:
        raise ModelSourceError(
            f"Weight {name!r} has the wrong dtype. Expected: float32. Received: {value.dtype}."
        )
    if not np.isfinite(value).all():
        raise ModelSourceError(
            f"Weight {name!r} holds {int((~np.isfinite(value)).sum())} values that are not "
            "finite. Expected finite numbers: the file is damaged or training diverged."
        )

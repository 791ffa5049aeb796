"""`ModelSource`: a decoder's weights, tokenizer and template, whatever they came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ModelSourceError


def expected_tensors(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight of a decoder: the only source of both.

    Axes: V vocabulary, D hidden, N query heads, K key/value heads, H head dim, F
    feed-forward. Names and layouts are those of keras-nlp's Llama.

    Args:
        config: Architecture.

    Yields:
        Canonical name and shape, embedding first, then block by block.
    """
    width, head = config.hidden_dim, config.head_dim
    queries, groups = config.num_query_heads, config.num_key_value_heads
    yield "token_embedding", (config.vocabulary_size, width)
    for layer in range(config.num_layers):
        prefix = f"layers/{layer}/"
        yield prefix + "query", (width, queries, head)
        yield prefix + "key", (width, groups, head)
        yield prefix + "value", (width, groups, head)
        yield prefix + "attention_output", (queries, head, width)
        yield prefix + "attention_norm", (width,)
        yield prefix + "feedforward_norm", (width,)
        yield prefix + "gate", (width, config.intermediate_dim)
        yield prefix + "up", (width, config.intermediate_dim)
        yield prefix + "down", (config.intermediate_dim, width)
    yield "final_norm", (width,)
    if not config.tie_embeddings:
        yield "output", (config.vocabulary_size, width)


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
            tied to the embedding. RoPE turns pairs (i, i + H/2), "rotate half".
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

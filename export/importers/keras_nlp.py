"""keras-nlp models, from and to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError, ModelSourceError
from tfkv.export.importers.bpe import BpeVocabulary
from tfkv.export.importers.families import Family, family_of
from tfkv.export.importers.families.llama import LLAMA
from tfkv.export.importers.families.parity import check_parity
from tfkv.export.importers.sentence_piece import SentencePieceVocabulary
from tfkv.export.importers.source import ModelSource, expected_tensors

if TYPE_CHECKING:
    from keras_hub.models import LlamaBackbone

_EXACT_IN_FLOAT32 = ("float32", "bfloat16", "float16")
_END_TOKENS = ("end_token", "end_token2")
#: Positions of a model that does not say how many it was trained on.
_CONTEXT_LENGTH = 2048


def from_keras_nlp(
    model: Any, context_length: int | None = None, check: bool = True
) -> ModelSource:
    """Takes the weights out of a keras-nlp decoder, pretrained or fine-tuned, and proves that it
    computes the same with them.

    Choose it to export what was trained in Keras. LoRA adapters are merged into the
    kernels; `lora_from_keras_nlp` takes them apart from the base instead. Weights in bfloat16
    or float16 are widened to float32, exactly; the export computes in float32 whatever the
    model's compute dtype was. `families.FAMILIES` has the families, docs/families.md what of
    each.

    The tokenizer comes along if the model has a preprocessor whose tokenizer is a
    ``Llama3Tokenizer``, or that of GPT-2, OPT or GPT-NeoX or a plain ``BytePairTokenizer``;
    text is cut into words as in Llama 3 and GPT-2 respectively, as the weights were trained.
    (keras-nlp 0.32 itself cuts like GPT-2 in ``tf.data`` and, called eagerly, not at all,
    since it passes its pattern to ``tokenizers`` as a literal string; ids of numbers and
    newlines can differ from these.) Tokenizers of SentencePiece, of Llama, Mistral, Gemma,
    Phi-3 and Mixtral, come along as well. Another class gives ``tokenizer_json=None``; set it
    with ``dataclasses.replace``.

    Args:
        model: A backbone or a causal LM of one of the families.
        context_length: Positions the model was trained on, in tokens; where left out, what the
            model says, or 2048. LongRoPE takes its long factors if it is beyond the first
            training.
        check: Whether logits of random tokens are compared with keras-nlp's, in float32; for
            that time both models are in memory.

    Returns:
        A validated `ModelSource`; no chat template, since keras-nlp has none.

    Raises:
        ModelSourceError: Another class, an option that is not supported, quantised weights,
            weights whose dtype float32 cannot hold, or logits that differ.
    """
    family, backbone = family_of(model)
    refusal = family.refusal(backbone)
    if refusal:
        raise ModelSourceError(f"This {family.name} cannot be exported: {refusal}.")
    length = context_length or family.context(backbone) or _CONTEXT_LENGTH
    config = _read_config(family, backbone, length)
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    vocabulary = _vocabulary(model.preprocessor) if tokenizer is not None else None
    source = ModelSource(
        config=config,
        weights={
            name: _weight(family, backbone, name, shape) for name, shape in expected_tensors(config)
        },
        tokenizer_json=vocabulary.to_tokenizer_json() if vocabulary else None,
        special_tokens=_special_tokens(tokenizer),
        stop_tokens=_stop_tokens(tokenizer),
        description=f"keras-nlp {type(model).__name__} {model.name!r}",
    )
    source.validate()
    if check:
        check_parity(source, family, backbone)
    return source


def read_frozen(model: Any) -> ModelSource:
    """Architecture and weights of a keras-nlp decoder as they are beneath its LoRA weights.

    Args:
        model: A backbone or a causal LM of one of the families.

    Raises:
        ModelSourceError: As of `from_keras_nlp`.
    """
    family, backbone = family_of(model)
    config = _read_config(family, backbone, family.context(backbone) or _CONTEXT_LENGTH)
    weights = {
        name: _weight(family, backbone, name, shape, frozen=True)
        for name, shape in expected_tensors(config)
    }
    return ModelSource(config, weights)


def is_plain_llama(config: DecoderConfig) -> bool:
    """Whether a decoder has none of the options that a Llama of keras-nlp lacks."""
    plain = {field: getattr(config, field) for field in _LLAMA_FIELDS}
    return config == DecoderConfig(**plain)


def to_keras_nlp(source: ModelSource, dtype: str = "float32") -> LlamaBackbone:
    """A keras-nlp backbone with the weights of a source: to compare with, or to train on.

    Args:
        source: Weights and architecture.
        dtype: Dtype policy of the backbone.

    Returns:
        A ``LlamaBackbone``; its outputs are hidden states ``[B, T, D]``, and
        ``backbone.token_embedding(hidden, reverse=True)`` gives the logits ``[B, T, V]``.

    Raises:
        ModelSourceError: The source is inconsistent, or its heads do not fill the hidden
            dimension, which keras-nlp requires.
    """
    from keras_hub.models import LlamaBackbone

    source.validate()
    config = source.config
    if not is_plain_llama(config):
        raise ModelSourceError(
            "Only a Llama can become a keras-nlp backbone again. Received a model with other "
            f"options: {config!r}."
        )
    if config.head_dim * config.num_query_heads != config.hidden_dim:
        raise ModelSourceError(
            "keras-nlp requires hidden_dim = num_query_heads * head_dim. Received: "
            f"hidden_dim={config.hidden_dim}, num_query_heads={config.num_query_heads}, "
            f"head_dim={config.head_dim}."
        )
    backbone = LlamaBackbone(
        vocabulary_size=config.vocabulary_size,
        num_layers=config.num_layers,
        num_query_heads=config.num_query_heads,
        hidden_dim=config.hidden_dim,
        intermediate_dim=config.intermediate_dim,
        num_key_value_heads=config.num_key_value_heads,
        rope_max_wavelength=config.rope_max_wavelength,
        layer_norm_epsilon=config.rms_epsilon,
        tie_word_embeddings=config.tie_embeddings,
        dtype=dtype,
    )
    for name, _ in expected_tensors(config):
        layer, key, _ = LLAMA.find(backbone, name)
        value = source.weights[name]
        getattr(layer, key).assign(value.T if name == "output" else value)
    return backbone


_LLAMA_FIELDS = (
    "vocabulary_size",
    "num_layers",
    "hidden_dim",
    "num_query_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_dim",
    "rope_max_wavelength",
    "rms_epsilon",
    "context_length",
    "tie_embeddings",
)


def _read_config(family: Family, backbone: Any, context_length: int) -> DecoderConfig:
    try:
        config = family.config(backbone, context_length)
    except ConfigError as error:
        raise ModelSourceError(f"The keras-nlp model cannot be exported: {error}") from error
    table = family.context(backbone)
    if config.positions.kind == "learned" and context_length != table:
        raise ModelSourceError(
            f"The model has learned {table} positions, no more and no less. Received: "
            f"context_length={context_length}. Leave it out."
        )
    return config


def _weight(
    family: Family, backbone: Any, name: str, shape: tuple[int, ...], frozen: bool = False
) -> np.ndarray:
    layer, key, convert = family.find(backbone, name)
    if frozen and key == "kernel" and getattr(layer, "lora_enabled", False):
        key = "_kernel"  # `kernel` is the sum
    value = convert(_to_numpy(name, layer, key))
    if value.size != math.prod(shape):
        raise ModelSourceError(
            f"Weight {name!r} has the wrong shape. Expected: {shape}, or as many numbers. "
            f"Received: {value.shape}."
        )
    return np.ascontiguousarray(value.reshape(shape))


def _to_numpy(name: str, layer: Any, key: str) -> np.ndarray:
    from keras import ops

    mode = getattr(layer, "quantization_mode", None)
    if mode is not None:
        raise ModelSourceError(
            f"Weight {name!r} is quantised ({mode}). Export the model as it was before "
            "`quantize`: tfkv has its own codecs."
        )
    value = np.asarray(ops.convert_to_numpy(getattr(layer, key)))
    if value.dtype.name not in _EXACT_IN_FLOAT32:
        raise ModelSourceError(
            f"Weight {name!r} has the wrong dtype. Expected one of "
            f"{', '.join(_EXACT_IN_FLOAT32)}. Received: {value.dtype.name}."
        )
    return np.array(value, dtype=np.float32, order="C")


def _vocabulary(preprocessor: Any) -> BpeVocabulary | SentencePieceVocabulary | None:
    from keras_hub import tokenizers

    tokenizer = preprocessor.tokenizer
    adds_start = getattr(preprocessor, "add_start_token", False)
    bos = getattr(tokenizer, "start_token", None) if adds_start else None
    if isinstance(tokenizer, tokenizers.SentencePieceTokenizer):
        if tokenizer.proto is None:
            return None
        return SentencePieceVocabulary.from_proto(tokenizer.proto, bos)
    names = ("BytePairTokenizer", "GPT2Tokenizer", "OPTTokenizer", "GPTNeoXTokenizer")
    cuts = {getattr(tokenizers, name): "gpt-2" for name in names}
    cuts[tokenizers.Llama3Tokenizer] = "llama-bpe"
    cut = cuts.get(type(tokenizer))
    if cut is None or tokenizer.vocabulary is None:
        return None
    lines = [line.split(" ") for line in tokenizer.merges if "#version:" not in line]
    return BpeVocabulary(
        tokens=dict(tokenizer.vocabulary),
        merges=[(left, right) for left, right in lines],
        special=list(tokenizer.unsplittable_tokens or ()),
        pre_tokenizer=cut,
        add_prefix_space=tokenizer.add_prefix_space,
        ignore_merges=cut == "llama-bpe",
        bos=bos,
    )


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    roles = {"bos": "start_token", "eos": "end_token", "pad": "pad_token"}
    texts = {role: getattr(tokenizer, name, None) for role, name in roles.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _stop_tokens(tokenizer: Any) -> tuple[int, ...]:
    ids = [getattr(tokenizer, f"{name}_id", None) for name in _END_TOKENS]
    return tuple(dict.fromkeys(int(index) for index in ids if index is not None))

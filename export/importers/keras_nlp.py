"""keras-nlp Llama models, from and to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError, ModelSourceError
from tfkv.export.importers.bpe import BpeVocabulary
from tfkv.export.importers.source import ModelSource

if TYPE_CHECKING:
    from keras_hub.models import LlamaBackbone

_EXACT_IN_FLOAT32 = ("float32", "bfloat16", "float16")
_ROPE_SETTINGS = {
    "rope_position_scaling_factor": (None, 1, 1.0),
    "rope_frequency_adjustment_factor": (None,),
    "rope_low_freq_factor": (None,),
    "rope_high_freq_factor": (None,),
    "rope_pretraining_sequence_length": (None,),
}
_END_TOKENS = ("end_token", "end_token2")


def from_keras_nlp(model: Any, context_length: int = 2048) -> ModelSource:
    """Takes the weights out of a keras-nlp Llama, pretrained or fine-tuned.

    Choose it to export what was trained in Keras. LoRA adapters are merged into the
    kernels. Weights in bfloat16 or float16 are widened to float32, exactly; the export
    computes in float32 whatever the model's compute dtype was.

    The tokenizer comes along if the model has a preprocessor whose tokenizer is a
    ``Llama3Tokenizer`` or a plain ``BytePairTokenizer``; text is cut into words as in
    Llama 3 and GPT-2 respectively, as the weights were trained. (keras-nlp 0.32 itself cuts
    like GPT-2 in ``tf.data`` and, called eagerly, not at all, since it passes its pattern
    to ``tokenizers`` as a literal string; ids of numbers and newlines can differ from
    these.) The SentencePiece ``LlamaTokenizer`` and other classes give
    ``tokenizer_json=None``; set it with ``dataclasses.replace``.

    Args:
        model: ``LlamaBackbone``, ``LlamaCausalLM``, ``Llama3Backbone`` or
            ``Llama3CausalLM``.
        context_length: Positions the model was trained on, in tokens; keras-nlp models do
            not say.

    Returns:
        A validated `ModelSource`; no chat template, since keras-nlp has none.

    Raises:
        ModelSourceError: Another class, scaled RoPE, soft-capped logits, quantised weights,
            or weights whose dtype float32 cannot hold.
    """
    backbone = _backbone(model)
    _check_supported(backbone)
    weights = {name: _to_numpy(name, layer, key) for name, layer, key in _layers(backbone)}
    if "output" in weights:
        weights["output"] = np.ascontiguousarray(weights["output"].T)
    tokenizer = getattr(getattr(model, "preprocessor", None), "tokenizer", None)
    vocabulary = _vocabulary(model.preprocessor) if tokenizer is not None else None
    source = ModelSource(
        config=_read_config(backbone, context_length),
        weights=weights,
        tokenizer_json=vocabulary.to_tokenizer_json() if vocabulary else None,
        special_tokens=_special_tokens(tokenizer),
        stop_tokens=_stop_tokens(tokenizer),
        description=f"keras-nlp {type(model).__name__} {model.name!r}",
    )
    source.validate()
    return source


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
    for name, layer, key in _layers(backbone):
        value = source.weights[name]
        getattr(layer, key).assign(value.T if name == "output" else value)
    return backbone


def _backbone(model: Any) -> Any:
    from keras_hub import models

    if type(model) in (models.LlamaCausalLM, models.Llama3CausalLM):
        model = model.backbone
    # Subclasses may compute something else: only the classes that are known are taken.
    if type(model) not in (models.LlamaBackbone, models.Llama3Backbone):
        raise ModelSourceError(
            f"{type(model).__module__}.{type(model).__name__} is not supported. Expected a "
            "keras-nlp LlamaBackbone, LlamaCausalLM, Llama3Backbone or Llama3CausalLM."
        )
    return model


def _check_supported(backbone: Any) -> None:
    for name, neutral in _ROPE_SETTINGS.items():
        value = getattr(backbone, name)
        if value not in neutral:
            raise ModelSourceError(
                f"Scaled RoPE is not supported: only plain RoPE is. Received: {name}={value!r}."
            )
    soft_cap = backbone.token_embedding.logit_soft_cap
    if soft_cap is not None:
        raise ModelSourceError(
            f"Soft-capped logits are not supported. Received: logit_soft_cap={soft_cap!r}."
        )


def _read_config(backbone: Any, context_length: int) -> DecoderConfig:
    try:
        return DecoderConfig(
            vocabulary_size=backbone.vocabulary_size,
            num_layers=backbone.num_layers,
            hidden_dim=backbone.hidden_dim,
            num_query_heads=backbone.num_query_heads,
            num_key_value_heads=backbone.num_key_value_heads,
            head_dim=backbone.hidden_dim // backbone.num_query_heads,
            intermediate_dim=backbone.intermediate_dim,
            rope_max_wavelength=float(backbone.rope_max_wavelength),
            rms_epsilon=float(backbone.layer_norm_epsilon),
            context_length=context_length,
            # The layer decides: `get_config` of keras-nlp 0.32 forgets `tie_word_embeddings`.
            tie_embeddings=bool(backbone.token_embedding.tie_weights),
        )
    except ConfigError as error:
        raise ModelSourceError(f"The keras-nlp model cannot be exported: {error}") from error


def _layers(backbone: Any) -> Iterator[tuple[str, Any, str]]:
    """Canonical name, the layer that owns the weight, and its attribute there.

    The blocks have no public accessors; these are the ones keras-nlp's own converters use.
    """
    yield "token_embedding", backbone.token_embedding, "embeddings"
    for index, block in enumerate(backbone.transformer_layers):
        prefix, attention = f"layers/{index}/", block._self_attention_layer
        yield prefix + "query", attention._query_dense, "kernel"
        yield prefix + "key", attention._key_dense, "kernel"
        yield prefix + "value", attention._value_dense, "kernel"
        yield prefix + "attention_output", attention._output_dense, "kernel"
        yield prefix + "attention_norm", block._self_attention_layernorm, "scale"
        yield prefix + "feedforward_norm", block._feedforward_layernorm, "scale"
        yield prefix + "gate", block._feedforward_gate_dense, "kernel"
        yield prefix + "up", block._feedforward_intermediate_dense, "kernel"
        yield prefix + "down", block._feedforward_output_dense, "kernel"
    yield "final_norm", backbone.layer_norm, "scale"
    if not backbone.token_embedding.tie_weights:
        yield "output", backbone.token_embedding, "reverse_embeddings"


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


def _vocabulary(preprocessor: Any) -> BpeVocabulary | None:
    from keras_hub import tokenizers

    tokenizer = preprocessor.tokenizer
    cuts = {tokenizers.Llama3Tokenizer: "llama-bpe", tokenizers.BytePairTokenizer: "gpt-2"}
    cut = cuts.get(type(tokenizer))
    if cut is None or tokenizer.vocabulary is None:
        return None
    lines = [line.split(" ") for line in tokenizer.merges if "#version:" not in line]
    adds_start = getattr(preprocessor, "add_start_token", False)
    return BpeVocabulary(
        tokens=dict(tokenizer.vocabulary),
        merges=[(left, right) for left, right in lines],
        special=list(tokenizer.unsplittable_tokens or ()),
        pre_tokenizer=cut,
        add_prefix_space=tokenizer.add_prefix_space,
        ignore_merges=cut == "llama-bpe",
        bos=getattr(tokenizer, "start_token", None) if adds_start else None,
    )


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    roles = {"bos": "start_token", "eos": "end_token", "pad": "pad_token"}
    texts = {role: getattr(tokenizer, name, None) for role, name in roles.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _stop_tokens(tokenizer: Any) -> tuple[int, ...]:
    ids = [getattr(tokenizer, f"{name}_id", None) for name in _END_TOKENS]
    return tuple(dict.fromkeys(int(index) for index in ids if index is not None))

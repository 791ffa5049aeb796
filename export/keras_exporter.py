"""Writes artifacts of Keras models of one's own."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfkv._version import __version__
from tfkv.cached_model import CachedModel
from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError
from tfkv.export.exporter import Progress, publish, staged, write_texts
from tfkv.export.keras_engine import KerasEngine, variables_of
from tfkv.export.signatures import build_signatures
from tfkv.export.verification import verify_keras
from tfkv.export.warmup import write_warmup
from tfkv.manifest import (
    MAX_STOP_TOKENS,
    WARMUP_PATH,
    Manifest,
    SignatureSpec,
    signature_table,
)

#: Signatures that such an artifact has, of those of the contract.
KERAS_SIGNATURES = ("generate", "decode", "truncate", "fork", "close", "stats")


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """What a client needs to speak text with an artifact.

    Args:
        tokenizer_json: Tokenizer for the ``tokenizers`` library.
        chat_template: Jinja2 template of a conversation, empty where there is none.
        special_tokens: Role (``bos``, ``eos``, ...) to token text, for the template.
    """

    tokenizer_json: str
    chat_template: str = ""
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)


def export_keras(
    model: Any,
    out_dir: str | pathlib.Path,
    engine: EngineConfig | None = None,
    *,
    context_length: int | None = None,
    stop_tokens: Sequence[int] = (),
    text: TextFiles | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
    """Turns a Keras model of one's own into an artifact with sessions, and proves it.

    Stock TensorFlow Serving serves it, and `tfkv.serving` calls it as any other. Sessions hold
    their caches in one piece, a slot each, as the model's layers were made: there are no pages,
    hence no shared prompts, and of the contract's signatures no ``score``, ``snapshot``,
    ``restore`` and ``attention``. A model that `tfkv.export.export` can read is served better by
    it.

    Args:
        model: A `CachedModel`, a `CausalLM`, or a Keras model that a `CachedModel` takes.
        out_dir: Model directory; the artifact becomes ``out_dir/<next number>``.
        engine: What to compile for. Slots, limits of a call, batch sizes, lifetimes and XLA count;
            caches and capacity are the layers' own.
        context_length: Most tokens of a session; what the caches hold where left out. Needed
            where all layers forget.
        stop_tokens: Ids that end a turn unless the caller says otherwise.
        text: Tokenizer and template, for clients.
        progress: Called as the export goes on.

    Returns:
        The version directory.

    Raises:
        ConfigError: The model cannot be served so; it says why.
        ExportError: The artifact does not answer as the model does; nothing is left.
    """
    report = progress or (lambda stage, done, total: None)
    decoder = model if isinstance(model, (CachedModel, CausalLM)) else CachedModel(model)
    positions = _positions(decoder, context_length)
    config = _engine_config(decoder, engine or EngineConfig(), positions)
    if isinstance(decoder, CachedModel):
        decoder.check()
    with staged(out_dir) as stage:
        report("export", 0, 1)
        _write(decoder, config, positions, tuple(stop_tokens), text, stage)
        report("export", 1, 1)
        verify_keras(decoder, stage, positions, report)
        return publish(stage)


def _positions(decoder: CachedModel | CausalLM, context_length: int | None) -> int:
    most = decoder.most_tokens
    if context_length is None and isinstance(decoder, CausalLM):
        context_length = decoder.config.context_length
    if context_length is None and most < 0:
        raise ConfigError(
            "`context_length` must say how long a session may grow where all layers forget. "
            "Received: context_length=None. Give the positions that the model was trained on."
        )
    limits = [limit for limit in (most, context_length) if limit is not None and limit >= 0]
    return min(limits)


def _engine_config(
    decoder: CachedModel | CausalLM, engine: EngineConfig, positions: int
) -> EngineConfig:
    """The engine as it is written down: with the caches that the layers have.

    Raises:
        ConfigError: It speculates.
    """
    if engine.speculation:
        raise ConfigError(
            "A Keras model's own caches cannot take wrong guesses back, so that its artifacts do "
            f"not speculate. Received: speculation={engine.speculation!r}. Leave it empty, or "
            "export a CausalLM's weights with `tfkv.export.export`."
        )
    if isinstance(decoder, CausalLM):
        names = [str(cache) for cache in decoder.caches]
    else:
        names = [str(layer.cache) for layer in decoder.layers]
    exceptions = tuple(f"{n}={name}" for n, name in enumerate(names) if name != names[0])
    return dataclasses.replace(
        engine, cache=names[0], layer_caches=exceptions, capacity=positions, text=False
    )


def _write(
    decoder: CachedModel | CausalLM,
    config: EngineConfig,
    positions: int,
    stops: tuple[int, ...],
    text: TextFiles | None,
    stage: pathlib.Path,
) -> None:
    engine = KerasEngine(decoder, config, positions, _fingerprint(decoder, config))
    whole = signature_table(config, stops[:MAX_STOP_TOKENS], engine.pools.page_bytes)
    table = {name: whole[name] for name in KERAS_SIGNATURES}
    engine.served = build_signatures(engine, table)
    tf.saved_model.save(engine, str(stage), signatures=dict(engine.served))
    manifest = _manifest(decoder, engine, table, stops, text)
    write_texts(stage, manifest, None if text is None else text.tokenizer_json)
    write_warmup(stage / WARMUP_PATH, table, config.batch_sizes)


def _manifest(
    decoder: CachedModel | CausalLM,
    engine: KerasEngine,
    table: dict[str, SignatureSpec],
    stops: tuple[int, ...],
    text: TextFiles | None,
) -> Manifest:
    model = getattr(decoder, "model", decoder)
    return Manifest(
        model=decoder.config if isinstance(decoder, CausalLM) else None,
        engine=engine.engine,
        signatures=table,
        fingerprint=engine.fingerprint,
        bytes_per_token=engine.bytes_per_token,
        bytes_per_session=engine.pools.page_bytes,
        positions=engine.groups.positions,
        rollback=engine.groups.rollback,
        stop_tokens=stops[:MAX_STOP_TOKENS],
        chat_template=text.chat_template if text is not None else "",
        special_tokens=dict(text.special_tokens) if text is not None else {},
        source=f"Keras model {getattr(model, 'name', type(model).__name__)!r}",
        tfkv_version=__version__,
    )


def _fingerprint(decoder: CachedModel | CausalLM, config: EngineConfig) -> str:
    """Equal for equal weights and caches."""
    digest = hashlib.sha256(f"{config.cache}{config.layer_caches}".encode())
    for variable in variables_of(decoder):
        digest.update(np.ascontiguousarray(variable.numpy()).data)
    return digest.hexdigest()

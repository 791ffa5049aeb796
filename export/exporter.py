"""Writes an artifact: one version directory that TensorFlow Serving loads."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from tfkv._version import __version__
from tfkv.calibration import Calibration, fingerprint_of
from tfkv.config import EngineConfig
from tfkv.errors import ExportError
from tfkv.export import model_text
from tfkv.export.adapter_sources import load_adapters
from tfkv.export.engine import Engine
from tfkv.export.importers import ModelSource, load
from tfkv.export.lora_adapter import LoraAdapter
from tfkv.export.prompt_lookup import PromptLookup
from tfkv.export.signatures import build_signatures
from tfkv.export.text_signature import TextFace
from tfkv.export.verification import verify
from tfkv.export.warmup import write_warmup
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.per_layer import layer_caches, normal_form
from tfkv.layers.policies import EvictingPolicy
from tfkv.manifest import (
    MANIFEST_PATH,
    MAX_STOP_TOKENS,
    TOKENIZER_PATH,
    WARMUP_PATH,
    Manifest,
    signature_table,
    text_signature,
)
from tfkv.prefix_compression import REPEAT

#: Called with the stage, what is done of it, and how much there is.
Progress = Callable[[str, int, int], None]


def export(
    source: object,
    out_dir: str | pathlib.Path,
    engine: EngineConfig | None = None,
    *,
    cache: str | None = None,
    calibration: Calibration | str | pathlib.Path | None = None,
    adapters: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
    """Turns a model into an artifact, and proves it before anyone can see it.

    The version directory is written beside its place, loaded again in a TF1 session, its
    answers are compared with the Keras model's, and only then is it renamed into place.

    Args:
        source: What `tfkv.export.importers.load` takes: a GGUF path, ``"smollm2"``, a
            keras-nlp model, or a `ModelSource`.
        out_dir: Model directory; the artifact becomes ``out_dir/<next number>``.
        engine: What to compile for; the default engine where left out.
        cache: Cache string, in place of the engine's.
        calibration: Of the same weights, or its file, for a policy that shares its budget out or
            a codec that needs one.
        adapters: Fine-tunings with LoRA that sessions may name, beside the base that has no name:
            name to a keras-nlp model with LoRA weights, a ``.lora.h5`` file of its
            ``backbone.save_lora_weights``, or a `LoraAdapter` or its file.
        progress: Called as the export goes on.

    Returns:
        The version directory.

    Raises:
        ModelSourceError: The source cannot be read; or an adapter cannot, or is of another model.
        ConfigError: Model and engine do not fit together.
        ExportError: The artifact does not answer as the model does; nothing is left.
    """
    report = progress or (lambda stage, done, total: None)
    config = engine or EngineConfig()
    # Refused before a model is read, and written in one way however it was asked for.
    spec = CacheSpec.parse(config.cache if cache is None else cache)
    guesses = str(PromptLookup.parse(config.speculation) or "")
    config = dataclasses.replace(config, cache=str(spec), speculation=guesses)
    report("import", 0, 1)
    model = load(source)
    named = load_adapters(adapters or {}, model, source)
    report("import", 1, 1)
    spec, exceptions = normal_form(spec, model.config.num_layers, config.layer_caches)
    config = dataclasses.replace(config, cache=str(spec), layer_caches=exceptions)
    tables = checked(model, calibration)
    config = fitted(model, config, tables)
    with staged(out_dir) as stage:
        _write(model, config, tables, named, stage, report)
        verify(model, stage, report, tables, named)
        return publish(stage)


def checked(
    model: ModelSource, calibration: Calibration | str | pathlib.Path | None
) -> Calibration | None:
    """A calibration, or the one in a file, that is of this model.

    Raises:
        ConfigError: It is of other weights, or no such file.
    """
    if calibration is None:
        return None
    if not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration)
    calibration.check(fingerprint_of(model.config, model.weights))
    return calibration


def fitted(
    model: ModelSource, engine: EngineConfig, calibration: Calibration | None
) -> EngineConfig:
    """The engine with what its policy has to know of the model: the budgets of heads, where it
    shares them out, and what asks for a repetition, where it has the text repeated. A model
    without a tokenizer is asked by its own text alone.

    Raises:
        ConfigError: A calibration is needed and was not given.
    """
    policy = CacheSpec.parse(engine.cache).policy
    if not isinstance(policy, EvictingPolicy):
        return engine
    if policy.repeats and not engine.repeat and model.tokenizer_json is not None:
        asks = tuple(model_text.encode(model, REPEAT).tolist())
        engine = dataclasses.replace(engine, repeat=asks)
    if engine.head_budgets:
        return engine
    layers, heads = model.config.num_layers, model.config.num_key_value_heads
    caches = layer_caches(engine.cache, layers, heads, (), calibration)
    budgets = tuple(
        one.policy.budgets or (one.policy.budget,) * heads
        for one in caches
        if isinstance(one.policy, EvictingPolicy)
    )
    even = all(own == policy.budget for row in budgets for own in row)
    return engine if even else dataclasses.replace(engine, head_budgets=budgets)


def _write(
    model: ModelSource,
    config: EngineConfig,
    tables: Calibration | None,
    adapters: Mapping[str, LoraAdapter],
    stage: pathlib.Path,
    report: Progress,
) -> None:
    steps = 4
    report("export", 0, steps)
    fingerprint = _fingerprint(model, config, tables)
    engine = Engine(model.config, model.weights, config, fingerprint, tables, adapters)
    stops = model.stop_tokens[:MAX_STOP_TOKENS]
    table = signature_table(config, stops, engine.page_bytes, bool(adapters))
    face = TextFace(model) if config.text else None
    if face is not None:
        table["generate_text"] = text_signature()
    report("export", 1, steps)
    engine.served = build_signatures(engine, table, face)
    tf.saved_model.save(engine, str(stage), signatures=dict(engine.served))
    report("export", 2, steps)
    write_texts(stage, _manifest(model, engine, table), model.tokenizer_json)
    report("export", 3, steps)
    write_warmup(stage / WARMUP_PATH, table, config.batch_sizes)
    report("export", 4, steps)


def _manifest(model: ModelSource, engine: Engine, table: dict) -> Manifest:
    groups = engine.groups
    return Manifest(
        model=model.config,
        engine=engine.engine,
        signatures=table,
        fingerprint=engine.fingerprint,
        bytes_per_token=engine.bytes_per_token,
        bytes_per_session=groups.stored_bytes(model.config) + engine.beside_bytes,
        positions=groups.positions,
        rollback=groups.rollback,
        # A lossy code that rounding tips over moves all that is computed from it.
        chunk_invariant=groups.chunk_invariant
        and all(codec.name == "float32" for codec in groups.codecs),
        stop_tokens=tuple(model.stop_tokens[:MAX_STOP_TOKENS]),
        chat_template=model.chat_template,
        special_tokens=dict(model.special_tokens),
        source=model.description,
        adapters=engine.adapters.fingerprints,
        tfkv_version=__version__,
    )


def _fingerprint(
    model: ModelSource, config: EngineConfig, tables: Calibration | None = None
) -> str:
    """Equal for equal weights of the base, architecture and cache, tables of its codec included."""
    beyond = f"{config.head_budgets or ''}{config.layer_caches or ''}{config.repeat or ''}"
    if config.weights != "float32":
        beyond += config.weights
    kept = f"{model.config.to_dict()}{config.cache}{beyond}"
    digest = hashlib.sha256(kept.encode())
    codec = CacheSpec.parse(config.cache).codec
    if codec.needs_calibration and tables is not None:
        for name, table in sorted(codec.bind(tables, None).tables.items()):
            digest.update(name.encode() + table.data)
    for name in sorted(model.weights):
        digest.update(name.encode())
        digest.update(model.weights[name].data)
    return digest.hexdigest()


@contextlib.contextmanager
def staged(out_dir: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory to write a version to, below a model directory; gone afterwards, unless it was
    published."""
    root = pathlib.Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    stage = pathlib.Path(tempfile.mkdtemp(prefix=".writing-", dir=root))
    try:
        stage.chmod(0o755)  # mkdtemp keeps others out; a server is another user
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_texts(stage: pathlib.Path, manifest: Manifest, tokenizer_json: str | None) -> None:
    """Writes what a version says of itself, and its tokenizer if it has one."""
    (stage / MANIFEST_PATH).parent.mkdir(exist_ok=True)
    (stage / MANIFEST_PATH).write_text(manifest.to_json(), encoding="utf-8")
    if tokenizer_json is not None:
        (stage / TOKENIZER_PATH).write_text(tokenizer_json, encoding="utf-8")


def publish(stage: pathlib.Path) -> pathlib.Path:
    """Renames a finished version into place: a server never sees half of one."""
    root = stage.parent
    for _ in range(100):
        taken = [int(path.name) for path in root.iterdir() if path.name.isdigit()]
        target = root / str(max(taken, default=0) + 1)
        try:
            return stage.rename(target)
        except OSError:
            continue  # another export took the number
    raise ExportError(f"No free version number below {root}: another process keeps taking them.")

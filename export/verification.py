"""Proves a written artifact against the model it was made from."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import loader_impl

from tfkv.calibration import Calibration
from tfkv.config import EngineConfig
from tfkv.errors import ExportError, Status
from tfkv.export.importers import ModelSource
from tfkv.export.lora_adapter import LoraAdapter
from tfkv.export.packed_weights import as_served
from tfkv.manifest import MAX_STOP_TOKENS, Manifest, SignatureSpec

if TYPE_CHECKING:
    from tfkv.generation import Decoder

#: Two logits nearer than this may change places through rounding alone (design: near ties).
NEAR_TIE = 1e-4

#: Most that a float32 logit may differ: rounding through 30 layers, see `path.logit_gap`.
LOGIT_GAP = 1e-3


class LoadedArtifact:
    """An artifact in a TF1 session, as TensorFlow Serving loads it.

    Args:
        version_dir: Directory with ``saved_model.pb``.

    Attributes:
        manifest: What it says of itself.
        engine: What it was compiled for.
    """

    def __init__(self, version_dir: str | pathlib.Path) -> None:
        self.manifest = Manifest.read(version_dir)
        self.engine = self.manifest.engine
        graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=graph)
        with graph.as_default():
            # The loader behind `tf.compat.v1.saved_model.load`, which warns of its age.
            meta = loader_impl.SavedModelLoader(str(version_dir)).load(self._session, ["serve"])
        self._signatures = dict(meta.signature_def)

    def __enter__(self) -> LoadedArtifact:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def call(self, signature: str, **inputs: object) -> dict[str, np.ndarray]:
        """Calls a signature; inputs left out take the contract's defaults.

        Args:
            signature: Its name.
            inputs: Values of the batch, by input name.

        Returns:
            Outputs by name.
        """
        definition = self._signatures[signature]
        spec = self.manifest.signatures[signature]
        feeds = {
            definition.inputs[name].name: value
            for name, value in complete_inputs(spec, inputs).items()
        }
        fetches = {name: tensor.name for name, tensor in definition.outputs.items()}
        return self._session.run(fetches, feeds)


def complete_inputs(spec: SignatureSpec, inputs: dict[str, object]) -> dict[str, np.ndarray]:
    """Arrays of all inputs of a signature, by name; those left out take their defaults."""
    values: dict[str, np.ndarray] = {}
    for name, tensor in spec.inputs.items():
        dtype = object if tensor.dtype == "string" else tensor.dtype
        value = inputs.get(name, [tensor.default])
        values[name] = np.array(value, dtype)
    return values


def verify(
    model: ModelSource,
    version_dir: pathlib.Path,
    report: Callable[[str, int, int], None],
    calibration: Calibration | None = None,
    adapters: Mapping[str, LoraAdapter] | None = None,
) -> None:
    """Compares a written artifact with the Keras model of the same weights; with each adapter, of
    the weights that it is merged into.

    Args:
        model: What was exported.
        version_dir: What was written.
        report: Progress callback.
        calibration: That it was exported with.
        adapters: Likewise, by name.

    Raises:
        ExportError: They differ; it says where first.
    """
    adapters = adapters or {}
    names = ["", *adapters]
    steps = 1 + 2 * len(names)
    report("verify", 0, steps)
    with LoadedArtifact(version_dir) as artifact:
        report("verify", 1, steps)
        engine, said = artifact.engine, []
        room = min(engine.capacity, model.config.context_length)
        for number, name in enumerate(names):
            said.append(_ask(artifact, model.config.vocabulary_size, room, name))
            report("verify", 2 + number, steps)
    bases = model.weights, as_served(model.weights, engine.weights)
    for number, (name, answer) in enumerate(zip(names, said, strict=True)):
        try:
            weights, served = (adapters[name].merged(base) if name else base for base in bases)
            own = dataclasses.replace(model, weights=weights)
            _check(own, served, engine, answer, calibration)
        except ExportError as error:
            raise ExportError(f"Adapter {name!r}: {error}" if name else str(error)) from error
        report("verify", 2 + len(names) + number, steps)


class _Said(NamedTuple):
    """What an artifact says behind a prompt.

    Attributes:
        prompt: int ``[T]``.
        logits: ``[V]`` after it.
        sampled: Greedily, int ``[N]``.
    """

    prompt: np.ndarray
    logits: np.ndarray
    sampled: np.ndarray


def _ask(artifact: LoadedArtifact, vocabulary: int, room: int, adapter: str = "") -> _Said:
    """Has a session of its own, of at most `room` tokens, answer a prompt."""
    engine = artifact.engine
    size = min(24, engine.prefill_tokens, room // 2)
    prompt = np.random.default_rng(0).integers(0, vocabulary, size)
    row = {
        "session_id": [f"verify {adapter}"],
        "adapter": [adapter],
        "tokens": [prompt],
        "length": [size],
        "position": [0],
    }
    logits = artifact.call("decode", **row)
    _expect_ok(logits, "decode")
    count = min(engine.decode_chunk, room - size)
    answer = artifact.call(
        "generate", **row, max_new_tokens=[count], stop_tokens=[[-1] * MAX_STOP_TOKENS]
    )
    _expect_ok(answer, "generate")
    artifact.call("close", session_id=row["session_id"])
    return _Said(prompt, logits["logits"][0], answer["tokens"][0, : answer["count"][0]])


def _check(
    model: ModelSource,
    served: Mapping[str, np.ndarray],
    engine: EngineConfig,
    said: _Said,
    calibration: Calibration | None,
) -> None:
    """Compares what an artifact says with the Keras model of the weights as they are served."""
    from tfkv.causal_lm import CausalLM
    from tfkv.export.kept_tokens import caches_of
    from tfkv.layers.cache_spec import CacheSpec
    from tfkv.layers.codecs import CODECS

    def expect(caches: list[CacheSpec], weights: Mapping[str, np.ndarray] = served) -> np.ndarray:
        reference = CausalLM.from_weights(
            model.config, weights, cache=caches, capacity=engine.capacity
        )
        return _through_cache(reference, said.prompt, said.sampled)

    cache = CacheSpec.parse(engine.cache)
    caches = caches_of(model.config, cache, engine.head_budgets, calibration, engine.layer_caches)
    expected = expect(caches)
    exact = [dataclasses.replace(one, codec=CODECS["float32"]) for one in caches]
    # A code that falls to the other side through rounding moves those of the layers behind it:
    # two right computations with a lossy codec differ by about what the codec costs.
    apart: np.ndarray = np.zeros(len(expected))
    if exact != caches:
        apart += 2 * _furthest(expect(exact), expected)
    if engine.weights == "int8":
        # So are activations rounded, a hundred times finer than weights; real models move by a
        # twentieth of what the weights' rounding moves them.
        apart += _furthest(expect(caches, model.weights), expected) / 4
    _compare(expected, said, apart)


def verify_keras(
    decoder: Decoder,
    version_dir: pathlib.Path,
    positions: int,
    report: Callable[[str, int, int], None],
) -> None:
    """Compares a written artifact with the Keras model that it was made of.

    Args:
        decoder: The model.
        version_dir: What was written.
        positions: Most tokens of a session.
        report: Progress callback.

    Raises:
        ExportError: They differ; it says where first.
    """
    report("verify", 0, 2)
    with LoadedArtifact(version_dir) as artifact:
        said = _ask(artifact, decoder.vocabulary_size, positions)
    report("verify", 1, 2)
    expected = _through_cache(decoder, said.prompt, said.sampled)
    whole = np.concatenate([said.prompt, said.sampled])[np.newaxis].astype(np.int32)
    exact = decoder.logits(decoder.hidden_states(tf.constant(whole))[0])[0].numpy()
    _compare(expected, said, 2 * _furthest(expected, exact))
    report("verify", 2, 2)


def _through_cache(reference: Decoder, prompt: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Logits ``[T, V]`` of the Keras model, read through its own cache.

    Cut where the artifact cuts, so that as much is read back from the cache.
    """
    state = reference.init_state(1)
    pieces = []
    for piece in (prompt[:-1], np.concatenate([prompt[-1:], sampled])):
        if piece.size:
            ids = tf.constant(piece[np.newaxis].astype(np.int32))
            hidden, state = reference.hidden_states(ids, state=state)
            pieces.append(np.asarray(reference.logits(hidden)[0]))
    return np.concatenate(pieces)


def _furthest(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """How far logits are apart at each position, ``[T]``."""
    return np.max(np.abs(one - other), axis=-1)


def _expect_ok(answer: dict[str, np.ndarray], signature: str) -> None:
    status = Status(int(answer["status"][0]))
    if status is not Status.OK:
        raise ExportError(
            f"The written artifact answers {signature!r} with {status.name}, expected OK. "
            "Nothing was left on disk; please report this with the export's arguments."
        )


def _compare(expected: np.ndarray, said: _Said, room: np.ndarray) -> None:
    """Compares with logits of the reference; ``room [T]`` is what a lossy codec may differ by."""
    size, logits = len(said.prompt), said.logits
    gap = float(np.max(np.abs(expected[size - 1] - logits)))
    scale = max(1.0, float(np.max(np.abs(expected[size - 1]))) / 20)
    most = max(LOGIT_GAP * scale, float(room[size - 1]))
    if not gap <= most:
        raise ExportError(
            f"The written artifact's logits differ from the Keras model's by {gap:.2e}, "
            f"expected at most {most:.0e}. Nothing was left on disk."
        )
    for step, token in enumerate(said.sampled):
        row = expected[size - 1 + step]
        best = np.sort(row)[-2:]
        if token != row.argmax():
            if best[1] - best[0] <= max(NEAR_TIE * scale, 2 * room[size - 1 + step]):
                return  # a near tie: both continuations are right
            raise ExportError(
                f"The written artifact sampled token {token} at step {step}, the Keras model "
                f"{row.argmax()}. Nothing was left on disk."
            )

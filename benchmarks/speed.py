"""Decode and prefill rates of several systems on the same weights, taking turns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from benchmarks import machine as limits
from benchmarks import texts
from benchmarks.artifacts import prepare
from benchmarks.keras_nlp_peer import KerasNlpPeer, decode_rate
from benchmarks.registry import Say
from tfkv.causal_lm import CausalLM
from tfkv.serving import Client, ServerProcess

_CALL = 1024  # tokens of a row that one call carries
_STEPS = 32

#: One call of the artifact: signature and rows in, rows out.
Call = Callable[[str, Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]]


class System(Protocol):
    """Something that is timed."""

    name: str

    def measure(self, context: int, rows: int) -> tuple[float, float] | None:
        """Decode and prefill rate in tokens a second over all rows; None = not run here."""


@dataclasses.dataclass
class Run:
    """What the repeats of one case came to; rates in tokens a second over all rows."""

    system: str
    context: int
    rows: int
    decode: list[float] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The run as data, with medians."""
        medians = {
            f"{name}_median": statistics.median(values) if values else None
            for name, values in (("decode", self.decode), ("prefill", self.prefill))
        }
        return {**dataclasses.asdict(self), **medians}


class Artifact:
    """An exported artifact, behind gRPC or in this process.

    Args:
        name: Which of the two.
        call: Calls it.
    """

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self._call = call
        self._serial = itertools.count()

    def measure(self, context: int, rows: int) -> tuple[float, float]:
        """See `System.measure`."""
        serial = next(self._serial)
        names = [f"speed-{self.name}-{serial}-{row}" for row in range(rows)]
        text = texts.real_text()[:context].tolist()
        start = time.perf_counter()
        self._prefill(names, text)
        middle = time.perf_counter()
        # Each call names the position it has reached; the first token was sampled above.
        for done in range(0, _STEPS, 16):
            self._all_ok(
                {"session_id": name, "position": context + 1 + done, "max_new_tokens": 16}
                for name in names
            )
        end = time.perf_counter()
        self._call("close", [{"session_id": name} for name in names])
        return _STEPS * rows / (end - middle), context * rows / (middle - start)

    def _prefill(self, names: Sequence[str], text: list[int]) -> None:
        # One row a call: what a batch prefills is bounded, and rows past that come back.
        for name in names:
            for first in range(0, len(text), _CALL):
                piece = text[first : first + _CALL]
                last = first + _CALL >= len(text)
                self._all_ok(
                    [
                        {
                            "session_id": name,
                            "tokens": piece,
                            "position": first,
                            "max_new_tokens": int(last),
                        }
                    ]
                )

    def _all_ok(self, rows: Any) -> None:
        calls = [{**row, "stop_tokens": [-1] * 8} for row in rows]
        for answer in self._call("generate", calls):
            if answer["status"]:
                raise RuntimeError(f"A row was refused: {answer}.")


class KerasNlp:
    """keras-nlp's ``generate``, compiled with XLA."""

    name = "keras-nlp"

    def __init__(self) -> None:
        self._peer = KerasNlpPeer(texts.model())
        self._compiled: set[tuple[int, int]] = set()

    def measure(self, context: int, rows: int) -> tuple[float, float] | None:
        """See `System.measure`; the prefill rate includes one decode step."""
        heads = texts.model().config.num_query_heads
        if rows * heads * context**2 * 4 > 2e9:
            return None  # the scores of one layer's prefill alone would take gigabytes
        text = texts.real_text()
        if (context, rows) not in self._compiled:
            self._peer.generate([text[:context]] * rows, context + _STEPS)
            self._compiled.add((context, rows))
        seconds = self._peer.decode_seconds(text, context, _STEPS, rows)
        decode = decode_rate([seconds], _STEPS, rows)
        start = time.perf_counter()
        self._peer.generate([text[: context + _STEPS - 1]] * rows, context + _STEPS)
        return decode, (context + _STEPS) * rows / (time.perf_counter() - start)


class NoCache:
    """The whole text anew for each token, as `tfkv.generation.generate_without_cache` does."""

    name = "no-cache"

    def __init__(self) -> None:
        source = texts.model()
        self._model = CausalLM.from_weights(source.config, source.weights)
        self._step = tf.function(self._next, jit_compile=True)
        self._compiled: set[tuple[int, int]] = set()

    def _next(self, text: tf.Tensor) -> tf.Tensor:
        hidden, _ = self._model.hidden_states(text)
        return tf.argmax(self._model.logits(hidden[:, -1]), axis=-1)

    def measure(self, context: int, rows: int) -> tuple[float, float] | None:
        """See `System.measure`; a token costs a prefill."""
        if context * rows > 4096:
            return None
        text = tf.constant(np.tile(texts.real_text()[:context], [rows, 1]))
        if (context, rows) not in self._compiled:
            self._step(text)
            self._compiled.add((context, rows))
        start = time.perf_counter()
        self._step(text).numpy()
        seconds = time.perf_counter() - start
        return rows / seconds, context * rows / seconds


def systems(stack: contextlib.ExitStack, names: Sequence[str], say: Say) -> list[System]:
    """Starts what is asked for; all of it ends with the stack."""
    found: list[System] = []
    if {"grpc", "in-process"} & set(names):
        say("Exporting, unless it has been done ...")
        directory = prepare("wide")
    if "grpc" in names:
        say("Starting the server ...")
        server = stack.enter_context(ServerProcess(directory))
        client = stack.enter_context(Client(server.target, artifact=directory))
        found.append(Artifact("grpc", client.call))
    if "in-process" in names:
        found.append(Artifact("in-process", _in_process(stack, directory)))
    if "keras-nlp" in names:
        found.append(KerasNlp())
    if "no-cache" in names:
        found.append(NoCache())
    return found


def _in_process(stack: contextlib.ExitStack, directory: Any) -> Call:
    from tfkv.export import LoadedArtifact
    from tfkv.manifest import latest_version
    from tfkv.serving import Contract

    artifact = stack.enter_context(LoadedArtifact(latest_version(directory)))
    contract = Contract.of_manifest(artifact.manifest)

    def call(signature: str, rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        answer = artifact.call(signature, **contract.encode(signature, rows))
        return contract.decode(signature, answer, len(rows))

    return call


def compare(
    systems: Sequence[System], cases: Sequence[tuple[int, int]], repeats: int, say: Say
) -> list[Run]:
    """Every case on every system, in turn; the first round of a case warms up."""
    runs: list[Run] = []
    for context, rows in cases:
        case = {system.name: Run(system.name, context, rows) for system in systems}
        for repeat in range(repeats + 1):
            say(f"context {context}, batch {rows}: round {repeat} of {repeats}")
            for system in systems:
                rates = system.measure(context, rows)
                if rates is not None and repeat:
                    case[system.name].decode.append(rates[0])
                    case[system.name].prefill.append(rates[1])
        runs += case.values()
    return runs


def machine() -> dict[str, float]:
    """What bounds these rates on this machine."""
    bandwidth, gemm = limits.read_bandwidth(), limits.gemm_rate()
    weights = sum(array.nbytes for array in texts.model().weights.values())
    return {
        "read_gb_per_s": bandwidth / 1e9,
        "gemm_gflop_per_s": gemm / 1e9,
        "decode_limit_batch_1_short": bandwidth / weights,
    }

"""Figures of the whole path: weights to tokens over gRPC, on SmolLM2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import texts
from benchmarks.artifacts import prepare
from benchmarks.bars import Measurement
from benchmarks.registry import Measured, Say, measures
from benchmarks.resident import import_baseline_mb, resident_mb
from tfkv.config import EngineConfig
from tfkv.serving import Client, ServerProcess, Session

_NEW_TOKENS = 64
_REPEATS = 3

#: The server logs each XLA compilation: see `_compilations`.
_LOG_COMPILATIONS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compiler=1"}


@measures("path.parity_tokens", "path.logit_gap")
def parity(say: Say) -> Measured:
    """Greedy ids and logits through gRPC against keras-nlp's."""
    from benchmarks.keras_nlp_peer import KerasNlpPeer

    prompts = [texts.encode(prompt) for prompt in texts.PROMPTS]
    say("keras-nlp generates")
    peer = KerasNlpPeer(texts.model())
    longest = max(map(len, prompts)) + _NEW_TOKENS
    whole = peer.generate(prompts, longest)
    expected = [
        [int(token) for token in row[: len(prompt) + _NEW_TOKENS]]
        for row, prompt in zip(whole, prompts, strict=True)
    ]
    say("exporting")
    directory = prepare("default")
    agreed, ties, gap = 0, 0, 0.0
    with ServerProcess(directory) as server, Client(server.target, artifact=directory) as client:
        for prompt, text in zip(prompts, expected, strict=True):
            say(f"{len(prompt)} prompt tokens")
            with client.session() as session:
                answer = session.generate(prompt, _NEW_TOKENS, stop_tokens=(), stream=False)
            reference = peer.logits(text, longest)
            same, tie = _agreement(answer.result.tokens, text[len(prompt) :], reference, prompt)
            agreed, ties = agreed + same, ties + tie
            gap = max(gap, _logit_gap(client, text, len(prompt), reference))
    note = f"{ties} of {len(prompts)} prompts ended by a near tie" if ties else ""
    return {
        "path.parity_tokens": Measurement(agreed, note=note),
        "path.logit_gap": gap,
    }


def _agreement(
    given: Sequence[int], expected: Sequence[int], logits: np.ndarray, prompt: Sequence[int]
) -> tuple[int, bool]:
    """Tokens that agree, and whether a near tie ended the comparison: then all count."""
    from tfkv.export.verification import NEAR_TIE

    for step, (token, wanted) in enumerate(zip(given, expected, strict=True)):
        if token != wanted:
            second, first = np.sort(logits[len(prompt) + step - 1])[-2:]
            tie = bool(first - second <= NEAR_TIE)
            return (len(expected) if tie else step), tie
    return len(expected), False


def _logit_gap(client: Client, text: Sequence[int], prompt: int, reference: np.ndarray) -> float:
    """Largest difference of a logit at the ends of the prompt and of the whole text."""
    with client.session() as session:
        first = session.logits(text[:prompt])
        last = session.logits(text[prompt:])
    gaps = [np.abs(first - reference[prompt - 1]), np.abs(last - reference[len(text) - 1])]
    return float(np.max(gaps))


@measures(
    "path.load_seconds",
    "path.resident_mb",
    "path.recompiles_after_warmup",
    "path.call_overhead_ms",
)
def server(say: Say) -> Measured:
    """What it costs to load, to hold and to call the artifact."""
    say("exporting")
    directory = prepare("default")
    baseline = import_baseline_mb()
    say("loading")
    with (
        ServerProcess(directory, _LOG_COMPILATIONS) as process,
        Client(process.target, artifact=directory) as client,
    ):
        resident, compiled = resident_mb(process.pid), _compilations(process.log())
        say("calls of all shapes")
        _varied_traffic(client)
        after = _compilations(process.log())
        weights = sum(array.nbytes for array in texts.model().weights.values()) / 1e6
        pool = client.stats()["bytes_pool"] / 1e6
        grown = resident_mb(process.pid)
        overhead = _call_overhead(client, say)
    parts = f"{weights:.0f} weights, {pool:.0f} pool, {baseline:.0f} imports alone"
    return {
        "path.load_seconds": process.load_seconds,
        "path.resident_mb": Measurement(
            resident,
            {"weights": weights, "pool": pool, "baseline": baseline},
            f"{parts}; {grown:.0f} after calls of all shapes",
        ),
        # No compilation in the log means that the log was not understood.
        "path.recompiles_after_warmup": Measurement(
            after - compiled if compiled else float("nan"), note=f"{compiled} while loading"
        ),
        "path.call_overhead_ms": overhead,
    }


def _compilations(log: str) -> int:
    """XLA compilations that a server with `_LOG_COMPILATIONS` has logged."""
    return log.count("Compilation of XLA executable")


def _varied_traffic(client: Client) -> None:
    """Prompt lengths around every boundary, batches of 1 to 8, every kind of call."""
    text = texts.real_text().tolist()
    for rows in (1, 2, 3, 5, 8):
        _mixed_batch(client, text, rows)
    for length in (1, 63, 64, 65, 127, 500, 1024, 1500):
        with client.session() as session:
            session.generate(
                text[:length], 3 + length % 17, temperature=0.7, top_p=0.9, stream=False
            )
            session.generate(
                text[:5], 20, top_k=5, temperature=1.0, repetition_penalty=1.1, stream=False
            )
            session.logits(text[5:9])
            session.score(text[9 : 9 + min(length, 300)])
            session.truncate(session.position // 2)


def _mixed_batch(client: Client, text: Sequence[int], rows: int) -> None:
    """One call whose rows differ in length and in sampling; its sessions are closed."""
    calls: list[dict[str, Any]] = [
        {
            "session_id": f"mixed-{row}",
            "tokens": text[row * 7 : row * 7 + 1 + (row * 37) % 200],
            "position": 0,
            "max_new_tokens": row % 17,
            "temperature": 0.5 * (row % 3),
        }
        for row in range(rows)
    ]
    for answer in client.call("generate", calls):
        if answer["status"]:
            raise RuntimeError(f"A row of {rows} was refused: {answer}.")
    client.call("close", [{"session_id": call["session_id"]} for call in calls])


def _call_overhead(client: Client, say: Say, context: int = 100, pairs: int = 40) -> Measurement:
    """A Predict call for one token minus the compiled step for the same, in ms."""
    from benchmarks.bare_step import BareStep
    from tfkv.export import Engine

    prompt = texts.real_text()[:context].tolist()
    say("building the bare step")
    source = texts.model()
    bare = BareStep(Engine(source.config, source.weights, EngineConfig()), prompt)
    row = {"session_id": "overhead", "max_new_tokens": 1, "stop_tokens": [-1] * 8}
    position = client.call("generate", [{**row, "tokens": prompt, "position": 0}])[0]["position"]
    call_ms, step_ms = [], []
    say("calls and steps in turn")
    for _ in range(pairs):
        start = time.perf_counter()
        position = client.call("generate", [{**row, "position": position}])[0]["position"]
        middle = time.perf_counter()
        bare.step()
        step_ms.append((time.perf_counter() - middle) * 1e3)
        call_ms.append((middle - start) * 1e3)
    if position != bare.position:
        raise RuntimeError(f"The calls reached {position}, the bare steps {bare.position}.")
    call, step = statistics.median(call_ms), statistics.median(step_ms)
    return Measurement(call - step, note=f"{call:.1f} ms a call, {step:.1f} ms a step")


@measures("path.rate_vs_keras_nlp_100", "path.rate_vs_keras_nlp_4000")
def rates(say: Say) -> Measured:
    """Single-session decode rate of the client beside keras-nlp's, in turn on one machine."""
    from benchmarks.keras_nlp_peer import KerasNlpPeer, decode_rate

    say("exporting")
    directory = prepare("long")
    peer, text = KerasNlpPeer(texts.model()), texts.real_text()
    steps = {100: 64, 4000: 32}
    ours: dict[int, list[float]] = {context: [] for context in steps}
    theirs: dict[int, list[tuple[float, float]]] = {context: [] for context in steps}
    with ServerProcess(directory) as process, Client(process.target, artifact=directory) as client:
        sessions = {context: client.session() for context in steps}
        for context, new in steps.items():
            say(f"context {context}: prefill and compile")
            sessions[context].generate(text[:context].tolist(), 1, stream=False)
            peer.generate([text[:context]], context + new)
        for repeat in range(_REPEATS):
            for context, new in steps.items():
                say(f"context {context}: {repeat + 1} of {_REPEATS}")
                ours[context].append(session_rate(sessions[context], context, new))
                theirs[context].append(peer.decode_seconds(text, context, new))
    return {
        f"path.rate_vs_keras_nlp_{context}": _ratio(
            statistics.median(ours[context]), decode_rate(theirs[context], new)
        )
        for context, new in steps.items()
    }


def session_rate(session: Session, context: int, new: int) -> float:
    """Tokens a second of a session taken back to `context` tokens; prefill not counted."""
    session.truncate(context)
    answer = session.generate((), new + 1, stop_tokens=(), stream=False)
    return answer.result.tokens_per_second


def _ratio(ours: float, theirs: float) -> Measurement:
    return Measurement(ours / theirs, note=f"{ours:.1f} against {theirs:.2f} tokens/s")


@measures("path.int8_kl", "path.int8_top1")
def int8(say: Say) -> Measured:
    """An int8 cache against a float32 one, teacher-forced on real text."""
    from tfkv.export.cache_eval import against_full
    from tfkv.layers.cache_spec import CacheSpec

    source = texts.model()
    say("reading 4 passages through both caches")
    compare = against_full(source, texts.passages(4, 2048))
    found, stored = compare("dense+int8")
    model = source.config
    full = CacheSpec.parse("dense").bytes_per_token(
        model.num_layers, model.num_key_value_heads, model.head_dim
    )
    share = stored / full
    note = f"{found.tokens} tokens; {100 * share:.1f} % of the bytes"
    return {
        "path.int8_kl": Measurement(found.mean_kl, note=note),
        "path.int8_top1": Measurement(found.top1_percent, note=note),
    }


@measures("path.window_mismatch")
def window(say: Say) -> Measured:
    """Tokens of a window cache that a full cache under the same mask would not have given."""
    import tensorflow as tf

    from tfkv.causal_lm import CausalLM
    from tfkv.export import Engine
    from tfkv.export.signatures import build_signatures
    from tfkv.export.verification import NEAR_TIE
    from tfkv.manifest import signature_table

    source, width, new = texts.model(), 128, 16
    config = EngineConfig(cache=f"sliding_window(window={width})", slots=8, decode_chunk=new)
    engine = Engine(source.config, source.weights, config)
    generate = build_signatures(engine, signature_table(config))["generate"]
    reference = CausalLM.from_weights(source.config, source.weights, cache=config.cache)
    lengths = (width - 1, width, width + 1, 2 * width, 5 * width + 3)
    longest = max(lengths) + new

    @tf.function(jit_compile=True)
    def masked(ids: tf.Tensor) -> tf.Tensor:
        return reference(ids)

    wrong = checked = 0
    for length, text in zip(lengths, texts.passages(len(lengths), longest), strict=True):
        say(f"{length} tokens into a window of {width}")
        answer = generate(
            session_id=tf.constant([f"window-{length}"]),
            tokens=tf.constant([text[:length]]),
            length=tf.constant([length]),
            position=tf.constant([0]),
        )
        if answer["status"].numpy()[0] or answer["count"].numpy()[0] != new:
            raise RuntimeError(f"Prompt of {length}: {answer}.")
        tokens = answer["tokens"].numpy()[0]
        ids = np.full([1, longest], -1, np.int32)
        ids[0, : length + new] = [*text[:length], *tokens]
        logits = masked(tf.constant(ids)).numpy()[0, length - 1 : length + new - 1]
        behind = logits.max(axis=-1) - logits[np.arange(new), tokens]
        wrong, checked = wrong + int(np.sum(behind > NEAR_TIE)), checked + new
    return {"path.window_mismatch": Measurement(wrong, note=f"of {checked}, at {lengths}")}


@measures("path.cache_sized_copies")
def copies(say: Say) -> Measured:
    """Copies in the optimised HLO of the whole computation, for each codec and batch size."""
    from benchmarks.bare_step import zero_arguments
    from benchmarks.hlo import large_copies
    from tfkv.export import Engine

    source = texts.model()
    model = source.config
    # No cache has these axes; copies of weights and of logits are another matter.
    others = frozenset({model.vocabulary_size, model.hidden_dim, model.intermediate_dim})
    found, staged = 0, 0
    for cache in ("dense+float32", "dense+int8"):
        config = EngineConfig(cache=cache)
        engine = Engine(model, source.weights, config)
        head = model.num_key_value_heads * model.head_dim
        for rows in (config.batch_sizes[0], config.batch_sizes[-1]):
            say(f"{cache}, batch {rows}")
            arguments = zero_arguments(engine, rows)
            compute: Any = engine.compute
            hlo = compute.experimental_get_compiler_ir(*arguments)(stage="optimized_hlo")
            found += len(large_copies(hlo, rows * config.capacity * head, others))
            fresh = model.num_layers * rows * config.decode_chunk * head
            staged += len(large_copies(hlo, fresh, others))
    note = f"{staged} of a call's fresh tokens over all layers or larger, staging included"
    return {"path.cache_sized_copies": Measurement(found, note=note)}

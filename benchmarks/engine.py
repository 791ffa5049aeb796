"""Figures of the serving engine: pages, prefixes, sessions side by side; on SmolLM2."""

from __future__ import annotations

import contextlib
import itertools
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import texts
from benchmarks.artifacts import ROOT, prepare
from benchmarks.bars import Measurement
from benchmarks.registry import Measured, Say, measures
from tfkv.errors import Status
from tfkv.manifest import latest_version
from tfkv.serving import Client, Contract, ServerProcess

_CHUNK = 16
_STOPS = [-1] * 8
_PROPERTY_TESTS = (
    "tests/export/test_engine_properties.py",
    "tests/path/test_interleavings.py",
)


class Artifact:
    """An artifact in this process, called row by row; every row must be served.

    Args:
        directory: Model directory.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        from tfkv.export import LoadedArtifact

        self._loaded = LoadedArtifact(latest_version(directory))
        self.engine = self._loaded.manifest.engine
        self._contract = Contract.of_manifest(self._loaded.manifest)

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *_: object) -> None:
        self._loaded.__exit__()

    def answer(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        """Answers of one `generate` call, whatever their status."""
        inputs = self._contract.encode("generate", [{"stop_tokens": _STOPS, **r} for r in rows])
        return self._contract.decode("generate", self._loaded.call("generate", **inputs), len(rows))

    def rows(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        """Answers of one `generate` call.

        Raises:
            RuntimeError: A row was refused.
        """
        answers = self.answer(rows)
        if any(answer["status"] for answer in answers):
            raise RuntimeError(f"A row was refused: {answers}.")
        return answers

    def prefill(self, name: str, text: Sequence[int]) -> int:
        """Gives a session a text; the position after its first sampled token."""
        reached, width = 0, self.engine.prefill_tokens
        while True:
            piece = list(text[reached : reached + width])
            last = reached + len(piece) == len(text)
            row = {"session_id": name, "tokens": piece, "position": reached}
            answer = self.rows([{**row, "max_new_tokens": int(last)}])[0]
            reached = int(answer["position"])
            if last and reached > len(text):
                return reached

    def close(self, names: Sequence[str]) -> None:
        """Ends sessions."""
        for name in names:
            self._loaded.call("close", session_id=[name])

    def stats(self) -> dict[str, int]:
        """The artifact's counters."""
        answer = self._loaded.call("stats", session_id=[""])
        return {name: int(value[0]) for name, value in answer.items()}


@measures("engine.property_ops")
def property_ops(say: Say) -> Measured:
    """Operations that the model-based tests ran without a difference."""
    say("model-based tests, tiny and real model: some minutes")
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *_PROPERTY_TESTS]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"engine.property_ops": Measurement(float("nan"), note=done.stdout[-300:])}
        tree = xml.etree.ElementTree.parse(report)
    counts = {"operations": 0, "real_operations": 0}
    for item in tree.iter("property"):
        counts[item.attrib["name"]] += int(item.attrib["value"])
    real = counts["real_operations"]
    value = float(counts["operations"]) if real >= 200 else float("nan")
    return {"engine.property_ops": Measurement(value, note=f"and {real} on the real model")}


@measures("engine.sessions_vs_slots", "engine.shared_prompt_pages")
def memory(say: Say) -> Measured:
    """How many sessions a pool holds that is worth four contiguous ones of full length."""
    say("exporting")
    directory = prepare("many")
    text = texts.real_text()
    with Artifact(directory) as artifact:
        engine = artifact.engine
        pages = artifact.stats()["pages"]
        slots = pages * engine.page_size // engine.capacity
        # Lengths with a mean of an eighth of the most: evenly from nearly none to twice that.
        mean = engine.capacity // 8
        lengths = np.random.default_rng(0).permutation(np.linspace(8, 2 * mean - 8, 64)).astype(int)
        held: list[int] = []
        for index, length in enumerate(lengths):
            say(f"{index} sessions")
            start = index * 601  # no text begins as another
            row = {"session_id": f"many-{index}", "position": 0, "max_new_tokens": 1}
            answer = artifact.answer([{**row, "tokens": text[start : start + length].tolist()}])[0]
            if answer["status"] == Status.FULL:
                break
            held.append(int(length))
    with Artifact(directory) as artifact:
        say("16 sessions with one prompt")
        prompt, own, page = text[:1024], 20, artifact.engine.page_size
        for index in range(16):
            start = 5000 + 100 * index
            artifact.prefill(f"same-{index}", [*prompt, *text[start : start + own]])
        stats = artifact.stats()
    note = f"{len(held)} sessions, {np.mean(held):.0f} tokens each, in the bytes of {slots} slots"
    return {
        "engine.sessions_vs_slots": Measurement(len(held) / slots, note=note),
        "engine.shared_prompt_pages": Measurement(
            stats["pages_used"],
            {"C": page, "private": 16 * math.ceil(own / page)},
            f"{stats['pages_shared']} of them shared",
        ),
    }


@measures("engine.prefix_recomputed")
def prefix(say: Say) -> Measured:
    """Tokens computed for a prompt that another session has had, and a suffix."""
    say("exporting")
    with Artifact(prepare("wide")) as artifact:
        text = texts.real_text().tolist()
        say("2048 tokens, cold and warm")
        artifact.prefill("first", text[:2048])
        before = artifact.stats()["tokens_prefilled"]
        suffix = text[9000:9010]
        artifact.prefill("second", [*text[:2048], *suffix])
        computed = artifact.stats()["tokens_prefilled"] - before
        names = {"C": artifact.engine.page_size, "suffix": len(suffix)}
    return {"engine.prefix_recomputed": Measurement(computed, names)}


@measures("engine.paged_vs_contiguous")
def contiguous(say: Say) -> Measured:
    """Batch-8 decode at mixed lengths, on pages and in contiguous caches of full length."""
    import tensorflow as tf

    from tfkv.causal_lm import CausalLM

    lengths = np.linspace(100, 4000, 8).astype(int)
    few, many = _CHUNK, 5 * _CHUNK
    say("exporting")
    text = texts.real_text().tolist()
    source = texts.model()
    model = CausalLM.from_weights(source.config, source.weights, capacity=4352)
    state = [
        {
            **layer,
            "filled": tf.constant(lengths, tf.int32),
            "reached": tf.constant(lengths, tf.int32),
        }
        for layer in model.init_state(len(lengths))
    ]

    @tf.function(jit_compile=True)
    def decode(token: tf.Tensor, position: tf.Tensor, steps: tf.Tensor, state: Any) -> tf.Tensor:
        def body(step: tf.Tensor, token: tf.Tensor, at: tf.Tensor, state: Any) -> Any:
            hidden, state = model.hidden_states(token[:, None], positions=at[:, None], state=state)
            token = tf.argmax(model.logits(hidden[:, 0]), axis=-1, output_type=tf.int32)
            return step + 1, token, at + 1, state

        loop = (tf.constant(0), token, position, state)
        return tf.while_loop(lambda step, *_: step < steps, body, loop)[1]

    def flat(steps: int) -> float:
        start = time.perf_counter()
        given = tf.fill([len(lengths)], text[0])
        decode(given, tf.constant(lengths, tf.int32), tf.constant(steps), state).numpy()
        return time.perf_counter() - start

    with Artifact(prepare("wide")) as artifact:
        names = [f"mixed-{row}" for row in range(len(lengths))]
        reached = []
        for name, length in zip(names, lengths, strict=True):
            say(f"prefill of {length}")
            offset = int(length)  # no text begins as another: nothing is shared
            reached.append(artifact.prefill(name, text[offset : offset + int(length)]))
        positions = itertools.count(0, _CHUNK)

        def paged() -> float:
            start = time.perf_counter()
            done = next(positions)
            artifact.rows(
                [
                    {"session_id": name, "position": at + done, "max_new_tokens": _CHUNK}
                    for name, at in zip(names, reached, strict=True)
                ]
            )
            return (time.perf_counter() - start) / _CHUNK

        say("compiling the contiguous step")
        flat(few)
        paged()
        ours, theirs = [], []
        for repeat in range(3):
            say(f"round {repeat + 1} of 3")
            # A call copies the caches once: what one step takes is the difference.
            short, long = flat(few), flat(many)
            theirs.append((long - short) / (many - few))
            ours += [paged(), paged()]
    mine, other = statistics.median(ours), statistics.median(theirs)
    note = f"{mine * 1e3:.1f} against {other * 1e3:.1f} ms a step"
    return {"engine.paged_vs_contiguous": Measurement(mine / other, note=note)}


@measures("engine.idle_pool_cost")
def idle_pool(say: Say) -> Measured:
    """A session on the highest pages of a pool full of idle ones, against one alone."""
    say("exporting")
    directory, text = prepare("wide"), texts.real_text().tolist()
    with Artifact(directory) as full, Artifact(directory) as empty:
        pages = full.stats()["pages"]
        wanted = int(0.9 * pages) * full.engine.page_size
        for index in range(full.engine.slots - 1):
            length = min(wanted, full.engine.capacity - 1)
            say(f"idle session {index + 1} of {length} tokens")
            full.prefill(f"idle-{index}", text[index * 300 : index * 300 + length])
            wanted -= length
            if wanted < full.engine.page_size:
                break
        share = full.stats()["pages_used"] / pages
        prompt, times = text[50_000:50_512], {"full": [], "empty": []}
        reached = {"full": full.prefill("active", prompt), "empty": empty.prefill("active", prompt)}
        for repeat in range(13):
            for name, artifact in (("full", full), ("empty", empty)):
                start = time.perf_counter()
                row = {"session_id": "active", "position": reached[name]}
                reached[name] = int(
                    artifact.rows([{**row, "max_new_tokens": _CHUNK}])[0]["position"]
                )
                if repeat:
                    times[name].append(time.perf_counter() - start)
    busy, alone = (statistics.median(times[name]) for name in ("full", "empty"))
    note = (
        f"{100 * share:.0f} % of {pages} pages idle; {busy * 1e3:.0f} against {alone * 1e3:.0f} ms"
    )
    return {"engine.idle_pool_cost": Measurement(busy / alone, note=note)}


@measures("engine.p99_under_prefill")
def fairness(say: Say) -> Measured:
    """The 99th percentile of a 1-token call of 7 sessions while an 8th prefills 4k tokens."""
    say("exporting")
    directory, text = prepare("wide"), texts.real_text().tolist()
    with ServerProcess(directory) as server, Client(server.target, artifact=directory) as client:
        sessions = [client.session() for _ in range(7)]
        for index, session in enumerate(sessions):
            session.generate(text[index * 500 : index * 500 + 100], 1, stop_tokens=(), stream=False)
        say("one budget and one chunk, alone")
        budget = client.contract.prefill_tokens
        prefill = _median_seconds(lambda turn: _prefill_alone(client, text, budget, turn))
        chunk = _median_seconds(lambda _: _decode_together(client, sessions))
        say("4k tokens beside seven sessions")
        done, waits = threading.Event(), []

        def call(session: Any) -> None:
            while not done.is_set():
                start = time.perf_counter()
                session.generate((), 1, stop_tokens=(), stream=False)
                waits.append(time.perf_counter() - start)

        threads = [threading.Thread(target=call, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        start = time.perf_counter()
        with client.session() as long:
            long.generate(text[60_000:64_000], 1, stop_tokens=(), stream=False)
        lasted = time.perf_counter() - start
        done.set()
        for thread in threads:
            thread.join()
    p99 = float(np.percentile(waits, 99))
    bound = prefill + chunk
    note = (
        f"p99 of {len(waits)} calls {p99:.2f} s, a budget {prefill:.2f} s, a chunk {chunk:.2f} s; "
        f"the 4k took {lasted:.1f} s"
    )
    return {"engine.p99_under_prefill": Measurement(p99 / bound, note=note)}


def _median_seconds(run: Callable[[int], None], repeats: int = 3) -> float:
    seconds = []
    for turn in range(repeats + 1):
        start = time.perf_counter()
        run(turn)
        if turn:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _prefill_alone(client: Client, text: Sequence[int], budget: int, turn: int) -> None:
    with client.session() as session:
        session.generate(text[20_000 + turn * 1500 :][:budget], 1, stop_tokens=(), stream=False)


def _decode_together(client: Client, sessions: Sequence[Any]) -> None:
    """One chunk of tokens in each session, at once."""
    with contextlib.ExitStack() as stack:
        for session in sessions:
            thread = threading.Thread(
                target=session.generate,
                args=((), client.contract.decode_chunk),
                kwargs={"stop_tokens": (), "stream": False},
            )
            thread.start()
            stack.callback(thread.join)

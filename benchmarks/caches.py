"""Figures of the cache family: what codecs cost in quality, and in time; on SmolLM2."""

from __future__ import annotations

import statistics
import time

from benchmarks import texts
from benchmarks.artifacts import prepare
from benchmarks.bars import Measurement
from benchmarks.engine import Artifact
from benchmarks.registry import Measured, Say, measures
from tfkv.config import EngineConfig

_PASSAGES, _LENGTH = 4, 2048
_CHUNK = 16
#: Figure to the cache that it is about.
_CODECS = {
    "caches.int8_kl": "int8",
    "caches.k8v4_kl": "k8v4",
    "caches.k4v4_rotated_kl": "k4v4",
    "caches.kivi4_kl": "kivi4",
    "caches.nvfp4_kl": "nvfp4",
}


@measures(*_CODECS)
def kl(say: Say) -> Measured:
    """KL of the next token's distribution from the float32 cache's, teacher-forced."""
    from tfkv.export.cache_eval import against_full

    compare, found = against_full(texts.model(), texts.passages(_PASSAGES, _LENGTH)), {}
    for name, cache in _CODECS.items():
        say(f"{_PASSAGES} passages through {cache}")
        compared, stored = compare(cache)
        note = (
            f"{compared.tokens} tokens; same top token {compared.top1_percent:.2f} %; "
            f"{stored:,.0f} bytes a token at {_LENGTH}"
        )
        found[name] = Measurement(compared.mean_kl, note=note)
    return found


@measures("caches.long_run_tokens")
def long_run(say: Say) -> Measured:
    """Tokens read far beyond the trained context with a finite perplexity, in constant memory."""
    import numpy as np

    from tfkv.evaluation import perplexity, teacher_forced_logits
    from tfkv.export import Engine
    from tfkv.export.engine_reader import EngineReader

    source, piece = texts.model(), 64
    text = texts.real_text()[:20_032]
    counts, notes = [], []
    for cache in ("streaming_llm", "sliding_window(window=1020,sinks=4)"):
        engine = Engine(source.config, source.weights, EngineConfig(cache=cache, slots=1))
        say(f"{len(text)} tokens through {cache}")
        losses = []
        for index, logits in enumerate(teacher_forced_logits(EngineReader(engine), text, piece)):
            follow = text[index * piece + 1 : (index + 1) * piece + 1]
            chosen = logits.numpy()[np.arange(len(follow)), follow].astype(np.float64)
            losses.append(np.logaddexp.reduce(logits.numpy()[: len(follow)], axis=-1) - chosen)
        nll = np.concatenate(losses)[:20_000]
        counts.append(int(np.isfinite(nll).sum()))
        first, last = (perplexity(part) for part in (nll[:4000], nll[-4000:]))
        stored = engine.groups.first.layout.entries
        notes.append(f"{cache}: perplexity {first:.1f}, at the end {last:.1f}; {stored} stored")
    return {"caches.long_run_tokens": Measurement(min(counts), note="; ".join(notes))}


@measures("caches.int8_decode_vs_float_4k")
def int8_decode(say: Say) -> Measured:
    """A whole decode step at a context of 4000 with int8 and with float32 caches, in turns."""
    text = texts.real_text()[:4000].tolist()
    say("exporting")
    with Artifact(prepare("long")) as full, Artifact(prepare("long-int8")) as coded:
        say("prefilling")
        reached = {name: one.prefill("s", text) for name, one in (("f", full), ("i", coded))}
        seconds: dict[str, list[float]] = {"f": [], "i": []}
        for turn in range(11):
            for name, artifact in (("f", full), ("i", coded)):
                start = time.perf_counter()
                row = {"session_id": "s", "position": reached[name], "max_new_tokens": _CHUNK}
                reached[name] = int(artifact.rows([row])[0]["position"])
                if turn:
                    seconds[name].append((time.perf_counter() - start) / _CHUNK)
    plain, small = (1e3 * statistics.median(seconds[name]) for name in ("f", "i"))
    note = f"{small:.1f} against {plain:.1f} ms a step"
    return {"caches.int8_decode_vs_float_4k": Measurement(plain / small, note=note)}

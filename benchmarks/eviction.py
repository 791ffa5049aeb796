"""Figures of policies that evict by score: what is forgotten of a text that was read once."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import texts
from benchmarks.bars import Measurement
from benchmarks.registry import Measured, Say, measures
from tfkv.calibration import Calibration, calibrate
from tfkv.evaluation import ModelReader, compare_logits
from tfkv.tasks import Context

_READ, _LATER, _PIECE = 2048, 512, 64
#: Most tokens of a question with its answer.
_ASKED = 128
#: Texts that are compressed begin here; those of the calibration end before.
_CALIBRATED = 40_000

_KEEP25 = "caches.keep25_vs_sinks_recent"
_NEEDLES = "caches.needles_kept"


@functools.cache
def calibration(tokens: int = _READ) -> Calibration:
    """Of SmolLM2, from passages of so many tokens that no figure is measured on."""
    model = texts.model()
    starts = range(0, _CALIBRATED - tokens, _CALIBRATED // 3)
    read = [texts.real_text()[start : start + tokens] for start in starts]
    return calibrate(model.config, model.weights, read, texts.encode(_repeat()))


def _repeat() -> str:
    from tfkv.prefix_compression import REPEAT

    return REPEAT


class Compressed:
    """A model that reads a text, compresses it once, and reads on.

    Not compiled: with stores for each of 90 heads that takes longer than the reading.

    Args:
        cache: Cache string; the full cache where it keeps everything.
        tokens: Most tokens of a text.
    """

    def __init__(self, cache: str, tokens: int) -> None:
        from tfkv.causal_lm import CausalLM
        from tfkv.layers.per_layer import layer_caches
        from tfkv.prefix_compression import PrefixCompressor

        source = texts.model()
        layers, heads = source.config.num_layers, source.config.num_key_value_heads
        tables = calibration(tokens) if "caps" in cache else None
        self._model = CausalLM.from_weights(
            source.config,
            source.weights,
            cache=layer_caches(cache, layers, heads, (), tables),
            capacity=tokens + _LATER + 640,
        )
        self._reader = ModelReader(self._model, xla=False)
        self._compressor = None
        if cache.startswith("kvzip"):
            self._compressor = PrefixCompressor(self._model, texts.encode(_repeat()), xla=False)

    @property
    def session_bytes(self) -> int:
        """Bytes of what stays of a text, without the room to read it, and to read on."""
        stores = [
            store for block in self._model.blocks for store, _, _ in block.attention.store.parts({})
        ]
        return sum(
            store.policy.budget
            * store.num_key_value_heads
            * store.cache.codec.bytes_per_token(store.head_dim)
            for store in stores
        )

    def after(self, text: np.ndarray) -> Any:
        """The state of a session that has read a text."""
        if self._compressor is not None:
            return self._compressor.compress(text)
        return self._reader.evicted(self._reader.state_after(text, _PIECE))

    def read(self, tokens: np.ndarray, position: int, state: Any) -> np.ndarray:
        """Logits ``[T, V]`` after each of ``tokens [T]``."""
        return self._reader.read_on(state, tokens, position, _PIECE)


def later_kl(caches: dict[str, str], say: Say) -> Iterator[tuple[str, float, int]]:
    """Name, KL of 512 later tokens where a cache keeps what it does of 2048, and bytes of it."""
    text = texts.real_text()[_CALIBRATED:]
    stride = (len(text) - _READ - _LATER) // 4
    passages = [text[first : first + _READ + _LATER] for first in range(0, 4 * stride, stride)]
    full, expected = Compressed("dense", _READ), []
    for index, passage in enumerate(passages):
        say(f"passage {index + 1} of {len(passages)} with the full cache")
        expected.append(full.read(passage[_READ:], _READ, full.after(passage[:_READ])))
    for name, cache in caches.items():
        say(name)
        model = Compressed(cache, _READ)
        gaps = [
            compare_logits(
                full_logits,
                model.read(passage[_READ:], _READ, model.after(passage[:_READ])),
                np.full([_LATER], -1),
            )[0].numpy()
            for passage, full_logits in zip(passages, expected, strict=True)
        ]
        yield name, float(np.mean(gaps)), model.session_bytes


@measures(_KEEP25)
def keep25(say: Say) -> Measured:
    """KL of 512 later tokens where a quarter of 2048 was kept, over that of sinks and newest."""
    common = f"budget={_READ // 4},interval={_LATER},sinks=4"
    found, sizes = {}, set()
    caches = {
        "sinks + recent": f"recent_tokens({common},whole_prompt=True)",
        "random": f"random_eviction({common},whole_prompt=True)",
        "key_diff, shared out": f"key_diff({common},recent=128,whole_prompt=True,caps='kvzip')",
        "kvzip, shared out": f"kvzip({common},caps='kvzip')",
    }
    for name, gap, size in later_kl(caches, say):
        found[name] = gap
        sizes.add(size)
    if len(sizes) != 1:
        raise ValueError(f"bytes differ: {sizes}")
    best = min(found, key=lambda name: found[name])
    note = ", ".join(f"{name} {gap:.4f}" for name, gap in found.items())
    note = f"{note}; {sizes.pop():,} bytes each; best: {best}"
    return {_KEEP25: Measurement(found[best] / found["sinks + recent"], note=note)}


@measures(_NEEDLES)
def needles_kept(say: Say) -> Measured:
    """Facts found after half of the text was evicted, of those that the full cache finds; on the
    pages of an engine."""
    from tfkv.tasks import TASKS, Hay

    first, solved, notes = _CALIBRATED, 0, []
    found: collections.Counter[str] = collections.Counter()
    for length, count in ((1024, 14), (2048, 4), (4096, 1)):
        hay = Hay(texts.real_text()[first : first + length * count], texts.encode)
        contexts = TASKS["needle"].contexts(hay, length, count, depths=8, seed=length)
        first += length * count
        say(f"{count} texts of {length} tokens with the full cache")
        every = [[True] * len(context.questions) for context in contexts]
        right = _answers("dense", length, contexts, every)
        solved += sum(map(sum, right))
        common = f"budget={length // 2},interval=128,whole_prompt=True"
        caches = {
            "sinks + recent": f"recent_tokens({common})",
            "expected_attention, shared out": f"expected_attention({common},caps='kvzip')",
            "kvzip, shared out": f"kvzip({common},caps='kvzip')",
        }
        for name, cache in caches.items():
            say(f"texts of {length} tokens with {name}")
            kept = sum(map(sum, _answers(cache, length, contexts, right)))
            found[name] += kept
            notes.append(f"{name} at {length}: {kept} of {sum(map(sum, right))}")
    best, most = found.most_common(1)[0]
    note = f"{solved} solved by the full cache; best: {best}; " + "; ".join(notes)
    return {_NEEDLES: Measurement(100.0 * most / solved, note=note)}


def _answers(
    cache: str, length: int, contexts: Sequence[Context], wanted: Sequence[list[bool]]
) -> list[list[bool]]:
    """Which of the wanted questions are answered once a context was read and compressed."""
    from tfkv.export.cache_eval import open_reader
    from tfkv.tasks.asking import ask

    tables = calibration(length) if "caps" in cache else None
    reader = open_reader(texts.model(), cache, length + _ASKED, tables)
    both = zip(contexts, wanted, strict=True)
    return [ask(reader, context, asks, aware=False).agnostic for context, asks in both]

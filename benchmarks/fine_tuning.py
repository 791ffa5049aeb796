"""Fine-tuning SmolLM2 with keras-nlp, and what the exported model then answers over gRPC.

The task is that of the first notebook: a date as somebody might write it shall become an ISO
date. The data are drawn here.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import texts
from benchmarks.bars import Measurement
from benchmarks.families import ROOT
from benchmarks.registry import Measured, Say, measures
from tfkv import terminal
from tfkv.config import EngineConfig
from tfkv.export.importers import ModelSource

_FIRST_DAY, _DAYS = datetime.date(1950, 1, 1), 36_500
_FORMS = (
    "{day.day} {day:%B} {day.year}",
    "{day:%B} {day.day}, {day.year}",
    "{day:%A}, {day.day} {day:%b} {day.year}",
    "{day:%b}. {day.day}, {day.year}",
    "{day.day}.{day.month}.{day.year}",
    "in {day.year}, on {day:%B} {day.day}",
)
_BATCH, _ANSWER = 16, 16
_HELD_OUT, _LEARNED = 128, 768
#: Where a learning rate peaks: of the factors of LoRA, and of all weights.
_LORA_RATE, _FULL_RATE = 2e-3, 1e-4


#: Name of a way to fine-tune to the answers of the server after it.
_Said = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt and the answer that is wanted, spaces and all."""

    prompt: str
    answer: str


def examples(count: int) -> list[Example]:
    """Different days, each in a form drawn at random; the same for each call."""
    draw = random.Random(0)
    days = [_FIRST_DAY + datetime.timedelta(n) for n in draw.sample(range(_DAYS), count)]
    return [
        Example(f"Date: {draw.choice(_FORMS).format(day=day)}\nISO:", f" {day.isoformat()}")
        for day in days
    ]


def fine_tuned(source: ModelSource, learned: Sequence[Example], rank: int = 0) -> Any:
    """Trains keras-nlp's model of these weights with plain ``fit``, one epoch.

    Args:
        source: The weights, with tokenizer.
        learned: What it is trained on.
        rank: Of LoRA; 0 trains all weights.

    Returns:
        A ``LlamaCausalLM``.
    """
    import keras
    from keras_nlp.models import LlamaCausalLM

    from tfkv.export.importers.keras_nlp import to_keras_nlp

    keras.utils.set_random_seed(0)
    model = LlamaCausalLM(backbone=to_keras_nlp(source), preprocessor=None)
    if rank:
        model.backbone.enable_lora(rank)
    steps = len(learned) // _BATCH
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=_LORA_RATE if rank else _FULL_RATE, warmup_steps=steps // 10
    )
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    ids, counts = _rows(source, learned)
    inputs = {"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, :-1], bool)}
    model.fit(
        inputs, ids[:, 1:], sample_weight=counts / counts.mean(), batch_size=_BATCH, verbose=0
    )
    return model


def _rows(source: ModelSource, learned: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids ``[B, T]``, and whether what follows ``[B, T - 1]`` is part of an answer."""
    stop = source.stop_tokens[0]
    pairs = [(texts.encode(one.prompt), [*texts.encode(one.answer), stop]) for one in learned]
    ids = np.full([len(pairs), max(len(a) + len(b) for a, b in pairs)], stop, np.int32)
    counts = np.zeros([len(pairs), ids.shape[1] - 1], np.float32)
    for row, (asked, said) in enumerate(pairs):
        ids[row, : len(asked) + len(said)] = [*asked, *said]
        counts[row, len(asked) - 1 : len(asked) + len(said) - 1] = 1
    return ids, counts


def likeliest_answers(model: Any, base: ModelSource, asked: Sequence[Example]) -> list[str]:
    """What keras-nlp's own ``generate`` says, greedily, until the model ends its turn."""
    model.compile(sampler="greedy", jit_compile=False)
    prompts = [texts.encode(one.prompt) for one in asked]
    width = max(map(len, prompts)) + _ANSWER
    ids, mask = np.zeros([2, len(prompts), width], np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    inputs = {"token_ids": ids, "padding_mask": mask.astype(bool)}
    whole = np.asarray(model.generate(inputs, stop_token_ids=None)["token_ids"])
    said = []
    for prompt, row in zip(prompts, whole, strict=True):
        tokens = row[len(prompt) : len(prompt) + _ANSWER].tolist()
        ends = [at for at, token in enumerate(tokens) if token in base.stop_tokens]
        said.append(texts.decode(tokens[: ends[0]] if ends else tokens))
    return said


def as_source(model: Any, base: ModelSource) -> ModelSource:
    """A keras-nlp model's weights, with what keras-nlp does not know of: the base's tokenizer."""
    from tfkv.export.importers.keras_nlp import from_keras_nlp

    return dataclasses.replace(
        from_keras_nlp(model, context_length=base.config.context_length),
        tokenizer_json=base.tokenizer_json,
        special_tokens=base.special_tokens,
        stop_tokens=base.stop_tokens,
    )


def answers(
    source: ModelSource, asked: Sequence[Example], adapters: dict[str, Any] | None = None
) -> list[str]:
    """Exports with an int8 cache, serves, and asks over gRPC, greedily.

    Args:
        source: What is exported.
        asked: Its prompts.
        adapters: Beside it; the one of them answers.
    """
    from tfkv.export import export
    from tfkv.serving import Client, ServerProcess

    engine = EngineConfig(slots=4, capacity=256, prefill_tokens=64, batch_sizes=(1,))
    with tempfile.TemporaryDirectory() as folder:
        directory = pathlib.Path(folder) / "dates"
        export(source, directory, engine, cache="int8", adapters=adapters)
        named = {"adapter": next(iter(adapters))} if adapters else {}
        with (
            ServerProcess(directory) as server,
            Client(server.target, artifact=directory) as client,
        ):
            return [
                client.generate(one.prompt, _ANSWER, stream=False, **named).text for one in asked
            ]


def right_percent(said: Sequence[str], asked: Sequence[Example]) -> float:
    """How many answers are the wanted ones, to the last character."""
    pairs = zip(said, asked, strict=True)
    return 100 * float(np.mean([text == one.answer for text, one in pairs]))


def _unchanged(source: ModelSource, learned: Sequence[Example], asked: Sequence[Example]) -> _Said:
    return {"before": answers(source, asked)}


def _all_weights(
    source: ModelSource, learned: Sequence[Example], asked: Sequence[Example]
) -> _Said:
    model = fine_tuned(source, learned)
    return {"all weights": answers(as_source(model, source), asked)}


def _lora(source: ModelSource, learned: Sequence[Example], asked: Sequence[Example]) -> _Said:
    model = fine_tuned(source, learned, rank=8)
    return {
        "LoRA, merged": answers(as_source(model, source), asked),
        "LoRA, beside the base": answers(source, asked, {"dates": model}),
    }


_WAYS = {"unchanged": _unchanged, "all": _all_weights, "lora": _lora}


@measures("keras.finetune_gain")
def gain(say: Say) -> Measured:
    """Right answers over gRPC after fine-tuning, beyond those before; the worst of three ways."""
    percent: dict[str, float] = {}
    for way in _WAYS:
        say(way)
        # A process each: TensorFlow keeps the memory of models that are gone.
        command = [sys.executable, "-m", "benchmarks.fine_tuning", way]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        percent |= json.loads(done.stdout.splitlines()[-1])
    before = percent.pop("before")
    note = ", ".join(f"{name} {value:.1f} %" for name, value in percent.items())
    note = f"{_HELD_OUT} held-out dates; before {before:.1f} %; {note}"
    return {"keras.finetune_gain": Measurement(min(percent.values()) - before, note=note)}


def main() -> None:
    """Prints the share of right answers of one way, percent by name, as JSON."""
    terminal.load_tensorflow()
    drawn = examples(_HELD_OUT + _LEARNED)
    asked, learned = drawn[:_HELD_OUT], drawn[_HELD_OUT:]
    said = _WAYS[sys.argv[1]](texts.model(), learned, asked)
    print(json.dumps({name: right_percent(one, asked) for name, one in said.items()}))


if __name__ == "__main__":
    main()

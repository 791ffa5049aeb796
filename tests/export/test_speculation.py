"""Speculation changes how long an answer takes, and nothing else: every cache holds what it holds
without it."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import ENGINES, Caller, write
from tiny_model import STOP, text

from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, Finish, Status
from tfkv.export import LoadedArtifact
from tfkv.export.engine_calls import EngineCalls
from tfkv.export.importers import ModelSource

LOOKUP = "prompt_lookup(tokens=4,ngram=2,shortest=1)"

_SLOW = (
    "plain",
    "kivi",
    "layers",
    "h2o",
    "stream",
    "exact",
    "evict",
    "evict_heads",
    "kvzip",
    "int8",
)
#: Engines whose caches must not notice, and layers that have caches of their own.
KINDS = [
    "window",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in _SLOW),
]


@functools.cache
def repeating() -> ModelSource:
    """A model whose next token depends on the last one most, so that its text repeats itself."""
    weak = ("attention_output", "down")
    weights = {
        name: value * np.float32(0.1) if name.endswith(weak) else value
        for name, value in tiny_model.make_weights().items()
    }
    return tiny_model.source(weights=weights)


def engine_of(kind: str) -> EngineConfig:
    if kind == "layers":
        exceptions = ("1=sliding_window(window=20,sinks=3)+int8",)
        return dataclasses.replace(ENGINES["plain"], layer_caches=exceptions, capacity=192)
    least = {"plain": 192, "int8": 192}
    engine = ENGINES[kind]
    return dataclasses.replace(
        engine, capacity=max(engine.capacity, least.get(kind, 0)), batch_sizes=(2, 4)
    )


class Sides:
    """An engine that speculates, and one that does not, called alike."""

    def __init__(self, engine: EngineConfig) -> None:
        plain = EngineCalls(repeating(), engine)
        guessing = EngineCalls(repeating(), dataclasses.replace(engine, speculation=LOOKUP))
        self.calls = (plain, guessing)

    def both(self, signature: str, **inputs: object) -> dict[str, np.ndarray]:
        """The answer, the same on both sides."""
        plain, guessing = (side.call(signature, **inputs) for side in self.calls)
        for name in plain.keys() - {"epoch"}:
            if plain[name].dtype.kind == "f":
                # As far as rows of a batch may differ from what they are alone.
                np.testing.assert_allclose(guessing[name], plain[name], atol=1e-4, err_msg=name)
            else:
                np.testing.assert_array_equal(guessing[name], plain[name], name)
        return guessing

    def generate(self, names, tokens, position, **inputs) -> dict[str, np.ndarray]:
        width = max(map(len, tokens))
        inputs.setdefault("max_new_tokens", [8])
        inputs.setdefault("stop_tokens", [[-1] * 8])
        return self.both(
            "generate",
            session_id=names,
            tokens=np.array([[*row, *[0] * (width - len(row))] for row in tokens], np.int32),
            length=[len(row) for row in tokens],
            position=position,
            **inputs,
        )

    def close(self, names) -> None:
        for side in self.calls:
            side.call("close", session_id=names)
            assert side.call("stats", session_id=["?"])["integrity"] == 0

    def counted(self) -> tuple[int, int]:
        """Tokens that were guessed and accepted so far."""
        stats = self.calls[1].call("stats", session_id=["?"])
        assert self.calls[0].call("stats", session_id=["?"])["tokens_guessed"] == 0
        return int(stats["tokens_guessed"][0]), int(stats["tokens_accepted"][0])


@pytest.fixture(scope="module")
def sides() -> Sides:
    return Sides(engine_of("plain"))


@pytest.mark.parametrize("kind", KINDS)
def test_caches_hold_what_they_hold_without_speculation(kind):
    """transformers #48280: wrong guesses must not reach a ring, a code or a score. Two turns of
    two sessions, long enough that rings wrap, groups fill and policies evict."""
    sides, names = Sides(engine_of(kind)), ["a", "b"]
    prompts, held = [text(75, 1), text(40, 2)], [0, 0]
    for turn in range(2):
        tokens = prompts if not turn else [text(5, 3), text(9, 4)]
        for call in range(4):
            given = tokens if not call else [[], []]
            held = sides.generate(names, given, held)["position"].tolist()
    logits = sides.both("decode", session_id=names, tokens=[[7], [9]], length=[1, 1], position=held)
    assert not logits["status"].any()
    guessed, accepted = sides.counted()
    assert guessed > accepted > 0
    sides.close(names)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": [0.8], "seed": [5, 6]},
        {"temperature": [0.0, 1.3], "top_k": [7], "seed": [1]},
        {"repetition_penalty": [1.2, 1.0]},
        {"temperature": [1.0], "top_p": [0.9], "min_p": [0.01], "repetition_penalty": [1.1]},
    ],
)
def test_same_seed_gives_the_same_tokens_as_without_speculation(sides, sampling):
    before, held = sides.counted(), [0, 0]
    for call in range(4):
        tokens = [text(30, 5), text(12, 6)] if not call else [[], []]
        held = sides.generate(["a", "b"], tokens, held, **sampling)["position"].tolist()
    assert sides.counted()[0] > before[0]
    sides.close(["a", "b"])


def test_call_may_end_anywhere_in_a_run_that_was_accepted(sides):
    for count in range(1, 9):
        prompt = text(30, 1)
        answer = sides.generate(["a"], [prompt], [0], max_new_tokens=[count])
        assert (answer["count"], answer["finish"]) == (count, Finish.LENGTH)
        again = sides.generate(["a"], [[]], [30 + count])
        assert again["status"] == Status.OK
        repeated = sides.generate(["a"], [prompt], [0], max_new_tokens=[count])
        np.testing.assert_array_equal(repeated["tokens"], answer["tokens"])
        sides.close(["a"])


def test_stop_token_ends_a_run_wherever_it_stands(sides):
    whole = sides.generate(["a"], [text(30, 1)], [0])["tokens"][0].tolist()
    sides.close(["a"])
    for token in dict.fromkeys(whole):
        stops = [[token, *[-1] * 7]]
        answer = sides.generate(["a"], [text(30, 1)], [0], stop_tokens=stops)
        assert answer["finish"] == Finish.STOP
        assert answer["tokens"][0, answer["count"][0] - 1] == token
        sides.close(["a"])


def test_full_session_ends_at_its_last_token(sides):
    limit = sides.calls[0].engine.capacity
    answer = sides.generate(["a"], [text(limit - 5, 1)[:128]], [0], max_new_tokens=[0])
    while answer["position"] < limit - 3:
        count = [min(8, limit - 3 - int(answer["position"][0]))]
        answer = sides.generate(["a"], [[]], answer["position"], max_new_tokens=count)
    answer = sides.generate(["a"], [[]], answer["position"], overflow=[1])
    assert (answer["count"], answer["finish"]) == (3, Finish.CAPACITY)
    sides.close(["a"])


def test_rows_that_guess_and_rows_that_do_not_share_a_batch(sides):
    """A loop and a text in which no token occurs twice; one that is refused, one that only
    prefills."""
    prompts = [[5, 6] * 10, list(range(STOP + 1, STOP + 40)), [], [5, 6, 5]]
    answer = sides.generate(
        ["a", "b", "c", "d"], prompts, [0] * 4, max_new_tokens=[8, 8, 8, 0], seed=[1]
    )
    statuses = [Status.OK, Status.OK, Status.EMPTY, Status.OK]
    assert answer["status"].tolist() == statuses
    sides.close(["a", "b", "d"])


def test_history_that_forgets_is_searched_as_far_as_it_goes():
    engine = dataclasses.replace(
        ENGINES["window"], history=128 + 8 + 1, batch_sizes=(1,), prefill_tokens=128
    )
    sides, held = Sides(engine), [0]
    for call in range(24):
        tokens = [text(90, 1)] if not call else [[]]
        held = sides.generate(["a"], tokens, held)["position"].tolist()
    assert held[0] > 2 * 128
    guessed, accepted = sides.counted()
    assert guessed > accepted > 0
    sides.close(["a"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache": "quest(pages=2,page_size=16)"}, "'quest' selects pages for one token at a"),
        ({"speculation": "prompt_lookup(tokens=8)"}, "must be below decode_chunk=8"),
        ({"speculation": "medusa"}, "Unknown speculation 'medusa'"),
    ],
)
def test_what_cannot_speculate_is_refused_when_built(changed, message):
    engine = dataclasses.replace(ENGINES["plain"], **{"speculation": LOOKUP, **changed})
    with pytest.raises(ConfigError, match=message):
        EngineCalls(repeating(), engine)


def test_exported_artifact_says_how_it_speculates_and_does(tmp_path):
    engine = dataclasses.replace(ENGINES["plain"], speculation="prompt_lookup(tokens=3)")
    with LoadedArtifact(write(repeating(), tmp_path, engine)) as artifact:
        said = artifact.manifest.engine.speculation
        assert said == "prompt_lookup(tokens=3,ngram=3,shortest=2)"
        caller = Caller(artifact)
        before = caller.stats()
        assert (before["tokens_guessed"], before["slots_used"]) == (0, 0)
        caller.generate(caller.name(), [5, 6, 7, 8] * 6)
        assert caller.counted(before)["tokens_guessed"] > 0
        caller.close_all()

"""Policies that evict by score, in an artifact: against the Keras model, whose scores are held
to the papers elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tiny_model
from tiny_artifacts import ENGINES, Caller

from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, Finish, Status
from tfkv.export import Engine, replay
from tfkv.export.engine_calls import EngineCalls
from tfkv.export.kept_tokens import caches_of, kept_bytes
from tfkv.layers.cache_spec import CacheSpec
from tfkv.prefix_compression import PrefixCompressor

SLOW = pytest.mark.slow
TEXT = tiny_model.text(400, seed=700)
PIECE = 64


class Reference:
    """Reads as the artifact reads: all but the last token in pieces, the last one alone.

    Args:
        config: Of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        spec = CacheSpec.parse(config.cache)
        caches = caches_of(tiny_model.CONFIG, spec, config.head_budgets)
        self.config = config
        self.model = CausalLM.from_weights(
            tiny_model.CONFIG, tiny_model.make_weights(), cache=caches, capacity=400, slack=PIECE
        )
        self.state = self.model.init_state(1)
        self.filled = 0

    def read(self, end: int) -> None:
        """Fills keys up to `end`."""
        while self.filled < end:
            stop = min(self.filled + PIECE, end)
            self._feed(stop)

    def compress(self, end: int, chunk: int) -> None:
        """Reads and compresses the text up to `end`, as `PrefixCompressor` does."""
        compressor = PrefixCompressor(self.model, self.config.repeat, chunk, xla=False)
        self.state, self.filled = compressor.compress(TEXT[:end]), end

    def last(self) -> np.ndarray:
        """Logits of the next token."""
        return self._feed(self.filled + 1)[-1]

    def _feed(self, stop: int) -> np.ndarray:
        ids = tf.constant([TEXT[self.filled : stop]], tf.int32)
        logits, self.state = self.model(ids, state=self.state)
        self.filled = stop
        return logits[0].numpy()


@pytest.fixture
def evict(caller_of) -> Caller:
    return caller_of("evict")


@pytest.mark.parametrize("engine", ["evict", "h2o", pytest.param("kvzip_on", marks=SLOW)])
def test_a_session_answers_as_the_keras_model_does_while_it_evicts(caller_of, engine: str):
    """Four evictions: before the first, with the first, and after."""
    evict, reference = caller_of(engine), Reference(ENGINES[engine])
    name = evict.name()
    for end in (60, 104, 105, 170, 290, 380):
        start = reference.filled
        given = evict.generate(name, TEXT[start : end - 1], start, count=0)
        assert given["status"] == Status.OK
        answer = evict.decode(name, [TEXT[end - 1]], end - 1)
        reference.read(end - 2)  # the last held token waits for the next call
        reference.read(end - 1)
        expected = reference.last()
        np.testing.assert_allclose(answer["logits"], expected, atol=2e-4, err_msg=str(end))
    assert evict.stats()["pages_used"] <= 11


@pytest.mark.parametrize(
    "engine",
    [
        "evict_whole",
        "evict_heads",
        *(pytest.param(name, marks=SLOW) for name in ("h2o_whole", "h2o_heads", "kvzip")),
    ],
)
def test_a_prompt_is_judged_once_it_was_read(caller_of, engine: str):
    caller, reference = caller_of(engine), Reference(ENGINES[engine])
    name, idle = caller.name(), caller.stats()["pages_used"]
    caller.generate(name, TEXT[:200][:128], count=0)
    caller.generate(name, TEXT[128:200], 128, count=0)
    assert caller.stats()["pages_used"] - idle == 13, "the prompt is there whole"
    answer = caller.decode(name, [TEXT[200]], 200)
    if reference.config.repeat:
        reference.compress(200, chunk=128)
    else:
        reference.read(200)
    # An int8 code of one channel may fall the other way in 4 layers.
    room = 2e-2 if "int8" in ENGINES[engine].cache else 2e-4
    np.testing.assert_allclose(answer["logits"], reference.last(), atol=room)
    assert caller.stats()["pages_used"] - idle == 1, "its pages went back to the pool"
    again = caller.generate(name, TEXT[201:231], 201)
    assert (again["status"], again["count"]) == (Status.OK, 8)


class Calls:
    """A session of an engine in this process.

    Args:
        config: What the engine is made for.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._calls = EngineCalls(tiny_model.source(), config)

    def read(self, start: int, end: int) -> None:
        """Hands over the text from `start` to `end`."""
        for first in range(start, end, 128):
            self._answer("generate", first, min(first + 128, end), max_new_tokens=[0])

    def logits(self, position: int) -> np.ndarray:
        """Logits after the token at `position`."""
        return self._answer("decode", position, position + 1)["logits"][0]

    def _answer(self, signature: str, start: int, end: int, **inputs: object) -> dict:
        sizes = {"length": [end - start], "position": [start]}
        tokens = [TEXT[start:end]]
        answer = self._calls.call(signature, session_id=["s"], tokens=tokens, **sizes, **inputs)
        assert answer["status"].tolist() == [Status.OK]
        return answer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"repeat": ()}, marks=SLOW),
        pytest.param({"cache": ENGINES["kvzip"].cache + "+int8", "xla": True}, marks=SLOW),
        pytest.param({"cache": ENGINES["kvzip"].cache + "+k8v4(recent=0,sinks=0)"}, marks=SLOW),
        pytest.param(
            {
                "cache": "kvzip(budget=40,sinks=2,recent=8,caps='some')",
                "head_budgets": [[16, 64], [40, 40]],
            },
            marks=SLOW,
        ),
    ],
    ids=str,
)
def test_a_prompt_is_judged_by_its_repetition_and_what_follows_by_itself(monkeypatch, changes):
    """Four chunks are repeated, the last of them not whole; then there are two evictions more."""
    monkeypatch.setattr(replay, "CHUNK", 64)
    config = EngineConfig(**{**ENGINES["kvzip"].to_dict(), "batch_sizes": (1,), **changes})
    calls, reference = Calls(config), Reference(config)
    reference.compress(200, chunk=64)
    calls.read(0, 200)
    for end in (200, 261, 322, 383):
        if end > 200:
            calls.read(reference.filled, end)
            reference.read(end)
        answer = calls.logits(end)
        np.testing.assert_allclose(answer, reference.last(), atol=2e-4, err_msg=str(end))


@pytest.mark.parametrize("engine", ["evict", pytest.param("kvzip", marks=SLOW)])
def test_batch_mates_evict_each_for_itself(caller_of, engine: str):
    """What a row answers does not depend on who else evicts."""
    caller = caller_of(engine)
    alone = {}
    for length in (50, 190):
        name = caller.name()
        for first in range(0, length, 100):
            caller.generate(name, TEXT[first : min(first + 100, length)], first, count=0)
        alone[length] = caller.generate(name, [TEXT[length]], length)["tokens"]
        caller.close(name)
    names = [caller.name(), caller.name()]
    for name, length in zip(names, alone, strict=True):
        for first in range(0, length, 100):
            caller.generate(name, TEXT[first : min(first + 100, length)], first, count=0)
    answer = caller.generate(names, [[TEXT[length]] for length in alone], list(alone))
    assert answer["tokens"].tolist() == [tokens.tolist() for tokens in alone.values()]


@pytest.mark.parametrize("engine", ["evict", "h2o"])
def test_a_branch_goes_on_from_what_was_kept(caller_of, engine: str):
    evict = caller_of(engine)
    name, branch = evict.name(), evict.name()
    for first in (0, 100):
        evict.generate(name, TEXT[first : first + 100], first, count=0)
    assert evict.call("fork", name, (), 200, target=[branch])["status"] == Status.OK
    evict.sessions.add(("", branch))
    for session in (name, branch):
        evict.generate(session, TEXT[200:290], 200, count=0)
    answers = [evict.generate(session, [TEXT[290]], 290) for session in (branch, name)]
    assert answers[0]["tokens"].tolist() == answers[1]["tokens"].tolist()
    assert evict.stats()["integrity"] == 0


def test_what_was_evicted_is_not_taken_back_and_a_new_session_knows_nothing_of_it(evict):
    name = evict.name()
    for first in (0, 100):
        evict.generate(name, TEXT[first : first + 100], first, count=0)
    refused = evict.truncate(name, 100)
    assert refused["status"] == Status.NOT_REVERSIBLE
    earliest = int(refused["detail"])
    assert 128 <= earliest <= 199
    assert evict.truncate(name, earliest)["status"] == Status.OK
    assert evict.call("attention", name, (), -1, layer=[0])["status"] == Status.NOT_REVERSIBLE
    assert evict.call("snapshot", name, (), page=[0])["status"] == Status.NOT_REVERSIBLE
    assert evict.truncate(name, 0)["status"] == Status.OK
    fresh = evict.name()
    answers = [evict.decode(session, TEXT[:70], 0) for session in (name, fresh)]
    np.testing.assert_array_equal(answers[0]["logits"], answers[1]["logits"])


def test_a_repeated_call_is_answered_alike_after_an_eviction(evict):
    name = evict.name()
    for first in (0, 100):
        evict.generate(name, TEXT[first : first + 100], first, count=0)
    once = evict.generate(name, [TEXT[200]], 200)
    again = evict.generate(name, [TEXT[200]], 200)
    assert once["tokens"].tolist() == again["tokens"].tolist()
    assert again["finish"] == Finish.LENGTH


def test_bytes_beside_the_pages_are_exact():
    for name in ("evict", "evict_heads", "evict_whole", "h2o", "h2o_heads", "kvzip"):
        config = ENGINES[name]
        engine = Engine(tiny_model.CONFIG, tiny_model.make_weights(), config)
        assert engine.kept.nbytes == (config.slots + 1) * kept_bytes(
            tiny_model.CONFIG, engine.groups.first, config
        )


@pytest.mark.parametrize(
    ("cache", "budgets", "message"),
    [
        ("ada_kv", (), "`tfkv calibrate`"),
        ("key_diff(interval=16)", (), "`interval` must be at least 64"),
        ("key_diff", ((1, 2, 3),), "`head_budgets` must be of"),
    ],
)
def test_what_cannot_work_in_an_artifact_is_refused(cache: str, budgets, message: str):
    config = EngineConfig(cache=cache, page_size=16, head_budgets=budgets)
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_model.CONFIG, tiny_model.make_weights(), config)


def test_a_session_that_forgets_what_it_would_repeat_is_refused():
    config = EngineConfig(**{**ENGINES["kvzip"].to_dict(), "history": 160})
    with pytest.raises(ConfigError, match="`history` must be 0 or at least 336"):
        Engine(tiny_model.CONFIG, tiny_model.make_weights(), config)

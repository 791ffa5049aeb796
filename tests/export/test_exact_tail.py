"""Sessions of codecs that keep their newest tokens exactly: some 64 of them, and the first two."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny_model
from test_snapshot import dump, load
from tiny_artifacts import ENGINES, Caller, feed

from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, Status
from tfkv.export.layer_groups import LayerGroups

#: By engine: its cache, and the one that reads all it can from codes.
CACHES = {
    "exact": (ENGINES["exact"].cache, "k4v4(recent=0,sinks=0)"),
    "kivi": (ENGINES["kivi"].cache, "kivi4(recent=4,sinks=0,group=4)"),
}
TEXT = tiny_model.text(180, seed=500)


@pytest.fixture(params=CACHES)
def engine(request) -> str:
    return request.param


@pytest.fixture
def exact(caller_of, engine: str) -> Caller:
    return caller_of(engine)


@functools.cache
def model(cache: str) -> CausalLM:
    return CausalLM.from_weights(
        tiny_model.CONFIG, tiny_model.make_weights(), cache=cache, capacity=192
    )


@functools.cache
def expected(engine: str, tokens: tuple[int, ...], all_coded: bool = False) -> np.ndarray:
    """Logits after the last token, read through the layers' cache."""
    layers = model(CACHES[engine][all_coded])
    logits, _ = layers(np.array([tokens], np.int32), state=layers.init_state(1))
    return np.asarray(logits)[0, -1]


def noise(engine: str, tokens: tuple[int, ...]) -> float:
    """What it moves the logits by to read everything from codes."""
    coded = expected(engine, tokens, all_coded=True)
    return float(np.abs(coded - expected(engine, tokens)).max())


def last(caller: Caller, name: str, token: int, position: int, **inputs: object) -> np.ndarray:
    answer = caller.decode(name, [token], position, **inputs)
    assert answer["status"] == Status.OK
    return answer["logits"]


@pytest.mark.parametrize(
    ("length", "cut"),
    [
        *((3, 7), (63, 64), (64, 7), (65, 64), (66, 128), (67, 7), (68, 64), (69, 128)),
        *((130, 7), (130, 64), (180, 64), (180, 128)),
    ],
)
def test_logits_are_those_of_the_layers(exact, engine, length, cut):
    name = exact.name()
    own = {"tenant": [name]}  # whose prompts are shared with nobody
    feed(exact, name, TEXT[: length - 1], cut, **own)
    logits = last(exact, name, TEXT[length - 1], length - 1, **own)
    wanted = expected(engine, tuple(TEXT[:length]))
    # A code that falls the other way moves everything a little: a fifth of what all codes do.
    room = 1e-4 + (0.2 * noise(engine, tuple(TEXT[:length])) if length > 64 else 0)
    np.testing.assert_allclose(logits, wanted, atol=room)


def test_a_slot_keeps_nothing_for_its_next_session(exact):
    first, second = exact.name(), exact.name()
    feed(exact, first, TEXT[:150], 64)
    alone = tiny_model.text(90, seed=501)
    fresh = exact.name()
    feed(exact, fresh, alone[:-1], 64)
    wanted = last(exact, fresh, alone[-1], 89)
    exact.close(first)
    exact.close(fresh)
    feed(exact, second, alone[:-1], 64, tenant=["other"])  # whose prefixes are not shared
    logits = last(exact, second, alone[-1], 89, tenant=["other"])
    np.testing.assert_allclose(logits, wanted, atol=1e-6)


def test_tokens_taken_back_are_not_read(exact, engine):
    name = exact.name()
    other = tiny_model.text(60, seed=502)
    feed(exact, name, [*TEXT[:100], *other], 64)
    exact.truncate(name, 100)
    exact.generate(name, TEXT[100:130], 100, count=0)
    logits = last(exact, name, TEXT[130], 130)
    tokens = tuple(TEXT[:131])
    np.testing.assert_allclose(logits, expected(engine, tokens), atol=2 * noise(engine, tokens))


@pytest.mark.parametrize("way", ["fork", "prefix", "snapshot"])
def test_a_session_made_from_pages_reads_their_codes(exact, engine, way):
    root, branch = exact.name(), exact.name()
    feed(exact, root, TEXT[:128], 64)
    if way == "fork":
        exact.sessions.add(("", branch))
        assert exact.call("fork", root, (), -1, target=[branch])["position"] == 128
    elif way == "snapshot":
        load(exact, branch, dump(exact, root))
    else:
        before = exact.stats()
        feed(exact, branch, TEXT[:128], 128)
        assert exact.counted(before)["tokens_reused"] >= 112
    exact.generate(branch, TEXT[128:160], 128, count=0)
    tokens = tuple(TEXT[:161])
    logits = last(exact, branch, TEXT[160], 160)
    np.testing.assert_allclose(logits, expected(engine, tokens), atol=2 * noise(engine, tokens))


def test_pictures_show_what_is_read_exactly(exact):
    name = exact.name()
    tokens = TEXT[:40]
    feed(exact, name, tokens, 64, tenant=[name])
    answer = exact.call("attention", name, (), -1, layer=[1], tenant=[name])
    wanted = tiny_model.attention_weights(tokens, 1)[:, -1]
    held = answer["positions"] >= 0
    np.testing.assert_allclose(answer["weights"][:, held], wanted, atol=1e-4)


def test_a_group_begun_before_a_fork_is_filled_by_each_branch_alone(exact, engine):
    """A branch has no exact numbers of what it began with: it goes on from their codes."""
    root, branch = exact.name(), exact.name()
    feed(exact, root, TEXT[:90], 64, tenant=[root])
    exact.sessions.add((root, branch))
    forked = exact.call("fork", root, (), -1, target=[branch], tenant=[root])
    assert forked["position"] == 90
    other = tiny_model.text(90, seed=503)
    for name, more in ((branch, other), (root, TEXT[90:180])):
        exact.generate(name, more[:-1], 90, count=0, tenant=[root])
    for name, more, room in ((branch, other, 2.0), (root, TEXT[90:180], 0.2)):
        tokens = (*TEXT[:90], *more)
        logits = last(exact, name, more[-1], 179, tenant=[root])
        np.testing.assert_allclose(
            logits, expected(engine, tokens), atol=1e-4 + room * noise(engine, tokens)
        )


@pytest.mark.parametrize(
    ("cache", "page", "match"),
    [
        ("kivi4(recent=64)", 64, r"at least 95.*keeps 64"),
        ("kivi4", 16, r"multiple of the 32 tokens"),
    ],
)
def test_groups_that_do_not_fit_pages_or_chunks_are_refused(cache: str, page: int, match: str):
    with pytest.raises(ConfigError, match=match):
        LayerGroups.of(tiny_model.CONFIG, EngineConfig(cache=cache, page_size=page), 64)


def test_fewer_exact_tokens_than_a_piece_are_refused():
    engine = EngineConfig(cache="k4v4(recent=32)", page_size=16)
    with pytest.raises(ConfigError, match=r"at least 64.*keeps 32"):
        LayerGroups.of(tiny_model.CONFIG, engine, 64)

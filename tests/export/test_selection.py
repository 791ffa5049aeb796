"""A policy that selects pages, in an artifact: against the Keras model, whose selection is held to
the paper elsewhere."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tiny_model
from test_snapshot import dump, load
from tiny_artifacts import ENGINES, PLAIN, Caller, feed

from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, Status
from tfkv.evaluation import read_on
from tfkv.export import Engine, plan_memory
from tfkv.export.engine_reader import EngineReader
from tfkv.export.layer_groups import LayerGroups

TEXT = tiny_model.text(190, seed=600)
CONFIG = tiny_model.CONFIG
#: A code that falls the other way moves everything a little.
ROOM = {"quest": 2e-4, "quest_exact": 0.02}


@functools.cache
def model(cache: str) -> CausalLM:
    return CausalLM.from_weights(CONFIG, tiny_model.make_weights(), cache=cache, capacity=192)


def expected(engine: str, tokens: list[int], prompt: int) -> np.ndarray:
    """Logits after each token from `prompt` − 1 on, of a Keras model that reads tokens before
    that as a prompt, and the others alone."""
    layers = model(ENGINES[engine].cache)
    state, found = layers.init_state(1), []
    for start in range(0, prompt - 1, 64):
        piece = tokens[start : min(start + 64, prompt - 1)]
        # One token is a prompt here, too.
        ids = tf.constant([[*piece, -1]], tf.int32)
        _, state = layers(ids, state=state)
    for token in tokens[prompt - 1 :]:
        logits, state = layers(tf.constant([[token]], tf.int32), state=state)
        found.append(logits[0, 0].numpy())
    return np.stack(found)


@pytest.fixture
def quest(caller_of) -> Caller:
    return caller_of("quest")


@pytest.mark.parametrize("engine", ["quest", "quest_exact"])
@pytest.mark.parametrize("length", [2, 30, 66, 150])
def test_a_token_reads_the_pages_that_the_layer_selects(caller_of, engine, length):
    caller = caller_of(engine)
    name = caller.name()
    feed(caller, name, TEXT[:length], 64, tenant=[name])
    tokens, answers = list(TEXT[:length]), []
    for _ in range(3):  # five tokens a call: pages fill up in the middle of some
        answer = caller.generate(name, (), len(tokens), count=5, tenant=[name])
        answers += answer["tokens"][:5].tolist()
        tokens = TEXT[:length] + answers
    logits = expected(engine, tokens, length)
    assert answers == logits[:-1].argmax(-1).tolist()
    repeated = caller.decode(name, (), len(tokens), tenant=[name])
    np.testing.assert_allclose(repeated["logits"], logits[-1], atol=ROOM[engine])


def test_selection_is_noticed():
    """The rooms above are less than what it changes to read everything."""
    whole = np.stack(list(tiny_model.logits(TEXT[:150])))[-1]
    for engine, room in ROOM.items():
        assert np.abs(expected(engine, TEXT[:150], 150)[0] - whole).max() > 20 * room


def test_rows_of_a_batch_select_apart(quest):
    lengths = (150, 20, 90)
    names = [quest.name() for _ in lengths]
    for name, length in zip(names, lengths, strict=True):
        feed(quest, name, TEXT[: length - 1], 64, tenant=[name])
    rows = [[TEXT[length - 1]] for length in lengths]
    positions = [length - 1 for length in lengths]
    answer = quest.decode(names, rows, positions, tenant=names)
    for row, length in enumerate(lengths):
        wanted = expected("quest", TEXT[:length], length)[0]
        np.testing.assert_allclose(answer["logits"][row], wanted, atol=ROOM["quest"])


@pytest.mark.parametrize("way", ["fork", "prefix", "snapshot", "truncate"])
def test_bounds_go_along_with_their_pages(quest, way):
    """Whatever a session is made from, it goes on as the one that read the tokens itself; where it
    goes on in the middle of a page, nothing is left of what lay there."""
    root, branch, at = quest.name(), quest.name(), 139
    own = {"tenant": [root]}
    feed(quest, root, TEXT[:150], 64, **own)
    if way == "fork":
        quest.sessions.add((root, branch))
        assert quest.call("fork", root, (), at, target=[branch], **own)["position"] == at
        quest.generate(root, tiny_model.text(9, seed=601), 150, count=0, **own)
    elif way == "snapshot":
        pieces = dump(quest, root, **own)
        quest.close(root, **own)
        other = quest.name()
        feed(quest, other, tiny_model.text(150, seed=602), 64, tenant=[other])
        load(quest, branch, pieces, **own)
        quest.truncate(branch, at, **own)
    elif way == "prefix":
        before = quest.stats()
        feed(quest, branch, TEXT[:at], 128, **own)
        assert quest.counted(before)["tokens_reused"] >= 112
    else:
        branch = root
        quest.generate(root, tiny_model.text(30, seed=603), 150, count=8, **own)
        quest.truncate(root, at, **own)
    tokens = TEXT[:at] + tiny_model.text(30, seed=604)
    quest.generate(branch, tokens[at:-1], at, count=0, **own)
    answer = quest.decode(branch, [tokens[-1]], len(tokens) - 1, **own)
    assert answer["status"] == Status.OK
    wanted = expected("quest", tokens, len(tokens))[0]
    np.testing.assert_allclose(answer["logits"], wanted, atol=ROOM["quest"])


def test_pages_of_sampled_tokens_are_not_found_by_prompts(quest):
    """They have other keys than a prompt's; what was read as a prompt is found."""
    name = quest.name()
    prompt = tiny_model.text(40, seed=605)
    tokens, own = list(prompt), {"tenant": [name]}
    for start in range(40, 96, 8):
        given = prompt if start == 40 else ()
        answer = quest.generate(name, given, 0 if start == 40 else start, **own)
        tokens += answer["tokens"].tolist()
    before, again = quest.stats(), quest.name()
    feed(quest, again, tokens[:-1], 128, **own)
    assert quest.counted(before)["tokens_reused"] == 32
    answer = quest.decode(again, [tokens[-1]], len(tokens) - 1, **own)
    wanted = expected("quest", tokens, len(tokens))[0]
    np.testing.assert_allclose(answer["logits"], wanted, atol=ROOM["quest"])


def test_a_picture_shows_the_pages_that_are_read(quest):
    name = quest.name()
    feed(quest, name, TEXT[:150], 64, tenant=[name])
    rows = {"layer": [0, 1], "tenant": [name, name]}
    answer = quest.call("attention", [name] * 2, [()] * 2, -1, **rows)
    held = answer["positions"][0] >= 0
    assert (answer["weights"][0][:, held] > 0).all()
    np.testing.assert_allclose(answer["weights"].sum(-1), 1, atol=1e-5)
    for head in answer["weights"][1]:
        read = {position // 16 for position in answer["positions"][1][head > 0]}
        # Token 149: the first, one that is selected, page 8, and page 9, its own.
        assert len(read) == 4
        assert {0, 8, 9} < read


def test_pages_for_everything_read_everything():
    """On SavedModel's functions, by the definition of attention."""
    config = dataclasses.replace(PLAIN, capacity=192, cache="quest(pages=12,dense_layers=0)")
    reader = EngineReader(Engine(CONFIG, tiny_model.make_weights(), config))
    read_on(reader, TEXT[:150], 0, prompt=True)
    found = np.stack([reader.read(np.array([TEXT[p]]), p)[0] for p in range(150, 160)])
    np.testing.assert_allclose(found, tiny_model.logits(TEXT[:160])[150:], atol=1e-3)


def test_a_session_that_slides_selects_among_the_pages_it_still_sees():
    config = dataclasses.replace(PLAIN, capacity=96, cache="quest(pages=12,dense_layers=0)")
    reader = EngineReader(Engine(CONFIG, tiny_model.make_weights(), config))
    read_on(reader, TEXT[:128], 0, prompt=True)
    found = np.stack([reader.read(np.array([TEXT[p]]), p)[0] for p in range(128, 160)])
    sees = tiny_model.sliding_pages(96, 16)
    np.testing.assert_allclose(found, tiny_model.logits(TEXT[:160], sees)[128:], atol=1e-3)


@pytest.mark.parametrize(
    "codec", ["float32", "int8", "k4v4(recent=64)", "kivi4(recent=79,group=16)"]
)
def test_a_plan_has_the_bytes_of_an_engine(codec):
    config = EngineConfig(
        **{**ENGINES["quest"].to_dict(), "cache": f"quest(dense_layers=1)+{codec}"}
    )
    built = Engine(CONFIG, tiny_model.make_weights(), config)
    found = plan_memory(CONFIG, config, 192, memory=10**9)
    assert found.page_bytes == built.pools.page_bytes
    assert found.pool_bytes(4) == built.pools.nbytes
    assert found.token_bytes == built.bytes_per_token
    dense = plan_memory(CONFIG, dataclasses.replace(config, cache=codec), 192, memory=10**9)
    # The greatest and the least of 8 channels, in two heads of one layer, in float16.
    assert found.page_bytes - dense.page_bytes == 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("cache", "changes", "match"),
    [
        ("quest(page_size=32)", {}, r"quest\(page_size=16\), or --page-size 32"),
        ("quest(recent=1)", {}, r"`recent` pages of 'quest'.*must hold the 8 tokens"),
        ("quest(page_size=64)", {"page_size": 64}, r"must divide 4 × 8"),
        ("quest+kivi4(recent=95,group=32)", {}, r"a multiple of the 32 tokens"),
    ],
)
def test_what_an_artifact_cannot_select_is_refused(cache, changes, match):
    config = EngineConfig(**{**PLAIN.to_dict(), "capacity": 192, "cache": cache, **changes})
    with pytest.raises(ConfigError, match=match):
        LayerGroups.of(CONFIG, config, 64)

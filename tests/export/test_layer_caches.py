"""Artifacts whose layers differ in their codec: against Keras models with the same exceptions."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
import tiny_model
from test_snapshot import dump, load
from tiny_artifacts import PLAIN, Caller, feed, loaded_when_asked, write

from tfkv.causal_lm import CausalLM
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError, Status
from tfkv.export import Engine, LoadedArtifact, export, plan_memory
from tfkv.export.layer_groups import LayerGroups
from tfkv.layers import layer_caches

CONFIG = dataclasses.replace(tiny_model.CONFIG, num_layers=5)
WEIGHTS = tiny_model.make_weights(CONFIG)
SOURCE = tiny_model.source(config=CONFIG, weights=WEIGHTS)
TEXT = tiny_model.text(180, seed=900)


def engine(cache: str, *exceptions: str, **changes: object) -> EngineConfig:
    fields = {**PLAIN.to_dict(), "capacity": 192, "slots": 3, **changes}
    return EngineConfig(**{**fields, "cache": cache, "layer_caches": exceptions})


#: Three codecs in four runs of layers: each keeps another number of tokens exactly, one none.
RINGS = engine("k4v4(recent=64,sinks=2)", "0=int8", "3=int8", "4=kivi4(recent=67,sinks=3,group=4)")
#: The same with no exact tokens, and a codec of as few bits in place of the one that needs some.
CODED = engine("k4v4(recent=0,sinks=0)", "0,3=int8")
#: No codec that keeps tokens exactly.
CODES = engine("int8", "1=float32")
#: A ring of pages, and sinks that are looked at from elsewhere.
STREAM = engine("streaming_llm(window=61,sinks=3)+int8", "0,4=float32")
ENGINES = {"rings": RINGS, "codes": CODES, "stream": STREAM}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Iterator[dict[str, LoadedArtifact]]:
    """By name of `ENGINES`, exported when first asked for."""

    def written(name: str) -> pathlib.Path:
        return write(SOURCE, tmp_path_factory.mktemp(name), ENGINES[name])

    with loaded_when_asked(written) as loaded:
        yield loaded


@pytest.fixture
def caller(artifacts, request) -> Iterator[Caller]:
    made = Caller(artifacts[request.param])
    yield made
    sound = made.stats()["integrity"]
    made.close_all()
    assert sound == 0


each = pytest.mark.parametrize(
    "caller",
    ["rings", "codes", pytest.param("stream", marks=pytest.mark.slow)],
    indirect=True,
)
with_rings = pytest.mark.parametrize("caller", ["rings"], indirect=True)
without_rings = pytest.mark.parametrize("caller", ["codes"], indirect=True)


@functools.cache
def model(config: EngineConfig) -> CausalLM:
    caches = layer_caches(
        config.cache, CONFIG.num_layers, CONFIG.num_key_value_heads, config.layer_caches
    )
    return CausalLM.from_weights(CONFIG, WEIGHTS, cache=caches, capacity=192)


@functools.cache
def expected(config: EngineConfig, tokens: tuple[int, ...]) -> np.ndarray:
    """Logits after the last token, of a Keras model whose layers have these caches."""
    layers, state = model(config), model(config).init_state(1)
    for start in range(0, len(tokens), 64):
        logits, state = layers(np.array([tokens[start : start + 64]], np.int32), state=state)
    return np.asarray(logits)[0, -1]


def noise(tokens: tuple[int, ...]) -> float:
    """What it moves the logits of `RINGS` by to read everything from codes."""
    return float(np.abs(expected(CODED, tokens) - expected(RINGS, tokens)).max())


def last(caller: Caller, name: str, token: int, position: int, **inputs: object) -> np.ndarray:
    answer = caller.decode(name, [token], position, **inputs)
    assert answer["status"] == Status.OK
    return answer["logits"]


@each
@pytest.mark.parametrize(("length", "cut"), [(3, 64), (66, 7), (130, 64), (180, 128)])
def test_logits_are_those_of_the_layers(caller, request, length, cut):
    name = caller.name()
    own = {"tenant": [name]}  # whose prompts are shared with nobody
    feed(caller, name, TEXT[: length - 1], cut, **own)
    logits = last(caller, name, TEXT[length - 1], length - 1, **own)
    tokens, which = tuple(TEXT[:length]), request.node.callspec.params["caller"]
    # A code that falls the other way moves everything a little.
    room = 0.2 * noise(tokens) if which == "rings" and length > 64 else 0.02
    np.testing.assert_allclose(logits, expected(ENGINES[which], tokens), atol=1e-4 + room)


def test_another_layer_would_be_noticed():
    """The room that the test above gives is less than what one layer's codec makes."""
    tokens = tuple(TEXT[:130])
    moved = dataclasses.replace(RINGS, layer_caches=("1,3=int8", RINGS.layer_caches[-1]))
    gap = np.abs(expected(moved, tokens) - expected(RINGS, tokens)).max()
    assert gap > 0.2 * noise(tokens)


@each
def test_sampled_tokens_are_read_back(caller, request):
    config = ENGINES[request.node.callspec.params["caller"]]
    name = caller.name()
    tokens = list(TEXT[:90])
    answer = caller.generate(name, tokens, 0, count=8)
    tokens += answer["tokens"].tolist()
    logits = caller.decode(name, (), len(tokens))["logits"]
    room = 1e-4 + (2 * noise(tuple(tokens)) if config is RINGS else 0.02)
    np.testing.assert_allclose(logits, expected(config, tuple(tokens)), atol=room)


@without_rings
@pytest.mark.parametrize("way", ["fork", "prefix", "snapshot", "truncate"])
def test_pages_of_all_codecs_go_along(caller, way):
    """Whatever a session is made from, it goes on as the one that read the tokens itself."""
    root, branch = caller.name(), caller.name()
    feed(caller, root, TEXT[:110], 64)
    wanted = last(caller, root, TEXT[110], 110)
    if way == "fork":
        caller.sessions.add(("", branch))
        forked = caller.call("fork", root, (), 110, target=[branch])
        assert forked["position"] == 110
        # Both go on from a page that only one of them may keep.
        caller.generate(root, tiny_model.text(9, seed=901), 111, count=0)
    elif way == "snapshot":
        pieces = dump(caller, root)
        caller.close(root)
        # What lay on those pages is overwritten before they come back.
        other = caller.name()
        feed(caller, other, tiny_model.text(150, seed=902), 64, tenant=[other])
        load(caller, branch, pieces)
        caller.truncate(branch, 110)
    elif way == "prefix":
        before = caller.stats()
        feed(caller, branch, TEXT[:110], 110)
        assert caller.counted(before)["tokens_reused"] >= 96
    else:
        branch = root
        caller.generate(root, tiny_model.text(30, seed=903), 111, count=0)
        caller.truncate(root, 110)
    np.testing.assert_allclose(last(caller, branch, TEXT[110], 110), wanted, atol=1e-3)


@with_rings
@pytest.mark.parametrize("way", ["fork", "prefix", "snapshot", "truncate"])
def test_without_exact_tokens_each_layer_reads_its_codes(caller, way):
    root, branch = caller.name(), caller.name()
    feed(caller, root, TEXT[:128], 64)
    if way == "fork":
        caller.sessions.add(("", branch))
        assert caller.call("fork", root, (), -1, target=[branch])["position"] == 128
    elif way == "snapshot":
        load(caller, branch, dump(caller, root))
    elif way == "prefix":
        before = caller.stats()
        feed(caller, branch, TEXT[:128], 128)
        assert caller.counted(before)["tokens_reused"] >= 112
    else:
        branch = root
        caller.generate(root, tiny_model.text(50, seed=904), 128, count=0)
        caller.truncate(root, 128)
    caller.generate(branch, TEXT[128:160], 128, count=0)
    tokens = tuple(TEXT[:161])
    logits = last(caller, branch, TEXT[160], 160)
    np.testing.assert_allclose(logits, expected(RINGS, tokens), atol=2 * noise(tokens))


@with_rings
def test_a_slot_keeps_nothing_for_its_next_session(caller):
    first, second, fresh = caller.name(), caller.name(), caller.name()
    feed(caller, first, TEXT[:150], 64)
    alone = tiny_model.text(90, seed=905)
    feed(caller, fresh, alone[:-1], 64)
    wanted = last(caller, fresh, alone[-1], 89)
    caller.close(first)
    caller.close(fresh)
    feed(caller, second, alone[:-1], 64, tenant=["other"])  # whose prefixes are not shared
    logits = last(caller, second, alone[-1], 89, tenant=["other"])
    np.testing.assert_allclose(logits, wanted, atol=1e-6)


@without_rings
def test_a_snapshot_has_the_bytes_of_all_layers(caller):
    name = caller.name()
    feed(caller, name, TEXT[:40], 64)
    heads, size = CONFIG.num_key_value_heads, PLAIN.page_size
    # Heads of 8: four layers of int8 with a scale and a zero of two bytes, one of float32; keys
    # and values.
    token = heads * 2 * (4 * (8 + 4) + 8 * 4)
    assert caller.artifact.manifest.bytes_per_token == token
    assert [len(piece["page_bytes"]) for piece in dump(caller, name)] == [size * token] * 3


@each
def test_pictures_are_of_each_layer(caller):
    name = caller.name()
    tokens = TEXT[:40]
    feed(caller, name, tokens, 64, tenant=[name])
    layers = range(CONFIG.num_layers)
    rows = {"layer": list(layers), "tenant": [name] * len(layers)}
    answer = caller.call("attention", [name] * len(layers), [()] * len(layers), -1, **rows)
    wanted: list[np.ndarray] = []
    tiny_model.logits(tokens, config=CONFIG, weights=WEIGHTS, watch=wanted.append)
    for layer in layers:
        held = answer["positions"][layer] >= 0
        np.testing.assert_allclose(
            answer["weights"][layer][:, held], wanted[layer][:, -1], atol=0.06, err_msg=str(layer)
        )


@pytest.mark.parametrize("config", [RINGS, CODES, engine("int8", "0-4=float32")])
def test_a_plan_has_the_bytes_of_an_engine(config):
    built = Engine(CONFIG, WEIGHTS, config)
    found = plan_memory(CONFIG, config, 192, memory=10**9)
    assert found.page_bytes == built.pools.page_bytes
    assert found.pool_bytes(3) == built.pools.nbytes
    assert found.token_bytes == built.bytes_per_token
    assert found.beside_bytes == built.beside_bytes


def test_layers_that_are_all_alike_are_one_pool_and_one_loop():
    built = Engine(CONFIG, WEIGHTS, engine("k4v4(recent=64)", "0-2=int8", "3,4=int8"))
    assert [(run.first, run.end) for run in built.pools.runs] == [(0, 5)]
    assert [pool.codec.name for pool in built.pools.pools] == ["int8"]
    assert built.tail.nbytes == 0


def test_a_manifest_has_exceptions_in_one_form(artifacts):
    manifest = artifacts["rings"].manifest
    assert manifest.engine.cache == "dense+k4v4(recent=64,sinks=2)"
    assert manifest.engine.layer_caches == (
        "0,3=int8",
        "4=kivi4(recent=67,sinks=3,group=4)",
    )


@pytest.mark.parametrize(
    ("cache", "exception", "match"),
    [
        ("snapkv(budget=128)", "1=int8", r"'snapkv' moves what it keeps.*Keras model"),
        ("low_rank", "1=int8", r"'low_rank' has tables of all layers.*Keras model"),
        ("int8", "1=low_rank", r"'low_rank' has tables of all layers.*Keras model"),
        ("int8", "5=float32", r"has layers 0 to 4"),
        ("int8", "float32", r"Expected layers=cache"),
        ("int8", "1=k4v4(recent=8)", r"at least 64.*1=k4v4\(recent=8\).*keeps 8"),
    ],
)
def test_layers_that_cannot_differ_so_are_refused(tmp_path, cache, exception, match):
    with pytest.raises(ConfigError, match=match):
        LayerGroups.of(CONFIG, engine(cache, exception), 64)
    with pytest.raises(ConfigError, match=match):
        export(SOURCE, tmp_path, engine(cache, exception))
    assert list(tmp_path.iterdir()) == []


def test_a_string_is_not_several_exceptions():
    with pytest.raises(ConfigError, match=r"`layer_caches` must be several strings"):
        EngineConfig(layer_caches="0=int8")  # type: ignore[arg-type]

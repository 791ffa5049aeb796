"""Artifacts whose layers keep different tokens: windows of several widths, and all of them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import tiny_model
from test_snapshot import dump, load, restore, snapshot
from tiny_artifacts import PLAIN, Caller, feed, loaded_when_asked
from tiny_model import everything, log_softmax, sliding_pages, window

from tfkv.architecture import Attention
from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import ConfigError, Status
from tfkv.export import Engine, LoadedArtifact, export, plan_memory
from tfkv.export.engine import pool_pages
from tfkv.export.engine_reader import EngineReader
from tfkv.export.layer_groups import LayerGroups
from tfkv.layers import layer_caches

CONFIG = dataclasses.replace(tiny_model.CONFIG, num_layers=4)
WEIGHTS = tiny_model.make_weights(CONFIG)
SOURCE = tiny_model.source(config=CONFIG, weights=WEIGHTS)
TEXT = tiny_model.text(400, seed=700)
WIDE, NARROW = window(40, 2), window(16, 0)
SEES = (WIDE, everything, NARROW, NARROW)
#: Entries of the groups: a page of sinks and 40 + 64 tokens; 192; 16 + 64.
RINGS = (128, 192, 80)
MIX = EngineConfig(
    **{
        **PLAIN.to_dict(),
        "capacity": 192,
        "slots": 4,
        "layer_caches": (
            "0=sliding_window(window=40,sinks=2)",
            "2-3=sliding_window(window=16)",
        ),
    }
)


def changed(**changes: object) -> EngineConfig:
    return EngineConfig(**{**MIX.to_dict(), **changes})


#: Codecs that keep tokens exactly, and none, on four kinds of pages; every layer bounded.
CODES = changed(
    cache="sliding_window(window=100)+int8",
    layer_caches=(
        "0=sliding_window(window=40,sinks=2)+k4v4(recent=72,sinks=2)",
        "2=sliding_window(window=16)+kivi4(recent=75,sinks=3,group=4)",
        "3=streaming_llm(window=62,sinks=2)+int8",
    ),
)
ENGINES = {"mix": MIX, "compiled": changed(xla=True, batch_sizes=(4,))}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Iterator[dict[str, LoadedArtifact]]:
    """By name of `ENGINES`, exported when first asked for."""

    def written(name: str) -> pathlib.Path:
        return export(SOURCE, tmp_path_factory.mktemp(name), ENGINES[name])

    with loaded_when_asked(written) as loaded:
        yield loaded


@pytest.fixture
def caller(artifacts, request) -> Iterator[Caller]:
    made = Caller(artifacts[getattr(request, "param", "mix")])
    yield made
    sound = made.stats()["integrity"]
    made.close_all()
    stats = made.stats()
    assert (sound, stats["integrity"], stats["slots_used"], stats["pages_used"]) == (0, 0, 0, 0)


each = pytest.mark.parametrize(
    "caller", ["mix", pytest.param("compiled", marks=pytest.mark.slow)], indirect=True
)


@functools.lru_cache(maxsize=512)
def oracle(tokens: tuple[int, ...], sees: tuple = SEES) -> np.ndarray:
    """Logits ``[T, V]`` of a whole conversation, in NumPy."""
    return tiny_model.logits(tokens, sees, config=CONFIG, weights=WEIGHTS)


def of_keras(config: EngineConfig, tokens: Sequence[int]) -> np.ndarray:
    """Logits ``[T, V]`` of a Keras model whose layers have these caches."""
    heads = CONFIG.num_key_value_heads
    caches = layer_caches(config.cache, CONFIG.num_layers, heads, config.layer_caches)
    model = CausalLM.from_weights(CONFIG, WEIGHTS, cache=caches, capacity=192)
    state, pieces = model.init_state(1), []
    for start in range(0, len(tokens), 64):
        piece = np.array([tokens[start : start + 64]], np.int32)
        logits, state = model(piece, state=state)
        pieces.append(np.asarray(logits[0]))
    return np.concatenate(pieces)


def last(caller: Caller, name: str, token: int, position: int, **inputs: object) -> np.ndarray:
    answer = caller.decode(name, [token], position, **inputs)
    assert answer["status"] == Status.OK, (Status(int(answer["status"])), answer["detail"])
    return answer["logits"]


#: Around each window, twice it, and the end of each ring.
EDGES = sorted({n + d for n in (16, 32, 40, 80, 128) for d in (-1, 0, 1)} | {1, 2, 160, 191, 192})


@each
@pytest.mark.parametrize("cut", [7, 64, 128])
def test_logits_at_every_edge_are_those_of_the_layers_windows(caller, cut):
    name = caller.name()
    own, wanted, held = {"tenant": [name]}, oracle(tuple(TEXT[:192])), 0
    for edge in EDGES:
        for start in range(held, edge - 1, cut):
            stop = min(start + cut, edge - 1)
            caller.generate(name, TEXT[start:stop], start, count=0, **own)
        logits = last(caller, name, TEXT[edge - 1], edge - 1, **own)
        np.testing.assert_allclose(logits, wanted[edge - 1], atol=2e-3, err_msg=str(edge))
        held = edge


def test_the_keras_model_with_the_same_caches_agrees():
    np.testing.assert_allclose(of_keras(MIX, TEXT[:192]), oracle(tuple(TEXT[:192])), atol=2e-3)


@each
def test_long_decoding_past_all_windows_samples_what_the_keras_model_would(caller):
    name, tokens = caller.name(), list(TEXT[:11])
    answer = caller.generate(name, tokens, 0, count=8)
    while True:
        tokens += answer["tokens"][: answer["count"]].tolist()
        if len(tokens) > 184:
            break
        answer = caller.generate(name, (), len(tokens), count=8)
        assert answer["status"] == Status.OK
    said = log_softmax(of_keras(MIX, tokens))[10:-1]
    chosen = np.take_along_axis(said, np.array(tokens[11:])[:, np.newaxis], axis=1)[:, 0]
    assert (chosen > said.max(axis=1) - 1e-3).all()
    scored = caller.score(name, (), len(tokens))
    assert scored["status"] == Status.OK


def feed_on(caller: Caller, name: str, tokens: Sequence[int], start: int, end: int) -> None:
    """Hands tokens over in pieces of 64, nothing sampled."""
    for at in range(start, end, 64):
        answer = caller.generate(name, tokens[at : min(at + 64, end)], at, count=0)
        assert answer["status"] == Status.OK


@each
def test_a_session_that_slides_drops_pages_only_where_everything_was_kept(caller):
    name, held = caller.name(), 0
    sees = (WIDE, sliding_pages(192, 16), NARROW, NARROW)
    wanted = oracle(tuple(TEXT[:300]), sees)
    for edge in (192, 193, 208, 209, 300):
        for at in range(held, edge - 1, 64):
            piece = TEXT[at : min(at + 64, edge - 1)]
            caller.generate(name, piece, at, count=0, overflow=2)
        logits = last(caller, name, TEXT[edge - 1], edge - 1, overflow=2)
        np.testing.assert_allclose(logits, wanted[edge - 1], atol=2e-3, err_msg=str(edge))
        held = edge


def test_a_session_that_does_not_slide_is_as_long_as_its_dense_layers(caller):
    name = caller.name()
    feed(caller, name, TEXT[:192], 64)
    answer = caller.generate(name, [TEXT[192]], 192, count=0)
    assert (answer["status"], answer["detail"]) == (Status.OVERFLOW, 192)


@each
def test_rows_of_a_batch_answer_as_if_alone(caller):
    lengths = (9, 70, 120, 185)
    names = [caller.name() for _ in lengths]
    texts = [tiny_model.text(200, seed=710 + row)[:n] for row, n in enumerate(lengths)]
    for name, text in zip(names, texts, strict=True):
        feed(caller, name, text[:-1], 64)
    ends = [len(text) - 1 for text in texts]
    answer = caller.generate(names, [text[-1:] for text in texts], ends, count=6)
    for row, text in enumerate(texts):
        tokens = (*text, *answer["tokens"][row].tolist())[: len(text) + 6]
        said = log_softmax(oracle(tokens))[len(text) - 1 : -1]
        chosen = [line[token] for line, token in zip(said, tokens[len(text) :], strict=True)]
        np.testing.assert_allclose(answer["logprobs"][row][:6], chosen, atol=2e-3)


@each
@pytest.mark.parametrize("way", ["fork", "fork back", "prefix", "snapshot", "truncate"])
def test_pages_of_all_groups_go_along(caller, way):
    """Whatever a session is made from, it goes on as the one that read the tokens itself."""
    root, branch, at = caller.name(), caller.name(), 70
    feed(caller, root, TEXT[:at], 64)
    if way == "fork":
        caller.sessions.add(("", branch))
        assert caller.call("fork", root, (), at, target=[branch])["position"] == at
        # Both go on round the rings from pages that only one of them may keep.
        feed_other(caller, root, at, 90)
    elif way == "fork back":
        feed_other(caller, root, at, 30)
        at = 66
        caller.sessions.add(("", branch))
        answer = caller.call("fork", root, (), at, target=[branch])
        assert (answer["status"], answer["position"]) == (Status.OK, at)
    elif way == "snapshot":
        pieces = dump(caller, root)
        caller.close(root)
        other = caller.name()
        feed(caller, other, tiny_model.text(180, seed=702), 64, tenant=[other])
        load(caller, branch, pieces)
    elif way == "prefix":
        before = caller.stats()
        feed(caller, branch, TEXT[:at], 70)
        assert caller.counted(before)["tokens_reused"] == 64
    else:
        branch, at = root, 66
        feed_other(caller, root, 70, 30)
        assert caller.truncate(root, at)["status"] == Status.OK
    for edge in (at + 1, 100, 185):
        feed_on(caller, branch, TEXT, at, edge - 1)
        logits = last(caller, branch, TEXT[edge - 1], edge - 1)
        np.testing.assert_allclose(logits, oracle(tuple(TEXT[:edge]))[-1], atol=2e-3)
        at = edge


def feed_other(caller: Caller, name: str, start: int, count: int) -> None:
    answer = caller.generate(name, tiny_model.text(count, seed=701), start, count=0)
    assert answer["status"] == Status.OK


def test_prompts_are_shared_as_far_as_the_shortest_ring(caller):
    """Further on a narrow window no longer holds what a new session would have to see."""
    first, second, prompt = caller.name(), caller.name(), tiny_model.text(150, seed=703)
    feed(caller, first, prompt[:81], 81)
    feed_on(caller, first, prompt, 81, 150)
    before = caller.stats()
    feed(caller, second, prompt, 128)
    assert caller.counted(before)["tokens_reused"] == 80
    logits = last(caller, second, TEXT[0], 150)
    np.testing.assert_allclose(logits, oracle((*prompt, TEXT[0]))[-1], atol=2e-3)


def test_a_session_goes_back_as_far_as_its_narrowest_ring(caller):
    name = caller.name()
    feed(caller, name, TEXT[:150], 64)
    # 70 of the narrow layers' 150 are overwritten: a query sees the 15 before it.
    refused = caller.truncate(name, 85)
    assert (refused["status"], refused["detail"]) == (Status.NOT_REVERSIBLE, 86)
    assert caller.truncate(name, 86)["position"] == 86
    logits = last(caller, name, TEXT[86], 86)
    np.testing.assert_allclose(logits, oracle(tuple(TEXT[:87]))[-1], atol=2e-3)
    refused = caller.call("fork", name, (), 80, target=["never"])
    assert (refused["status"], refused["detail"]) == (Status.NOT_REVERSIBLE, 86)
    assert caller.truncate(name, 0)["status"] == Status.OK
    np.testing.assert_allclose(last(caller, name, TEXT[5], 0), oracle((TEXT[5],))[-1], atol=2e-3)


def test_a_session_that_went_round_a_ring_cannot_be_copied(caller):
    name, other = caller.name(), caller.name()
    feed(caller, name, TEXT[:80], 64)
    pieces = dump(caller, name)
    assert len(pieces) == 5
    feed_on(caller, name, TEXT, 80, 81)
    answer = snapshot(caller, name, 0)
    assert (answer["status"], answer["detail"]) == (Status.NOT_REVERSIBLE, 80)
    answer = restore(caller, other, {**pieces[0], "held": 81, "filled": 80})
    assert (answer["status"], answer["detail"]) == (Status.OVERFLOW, 80)


def test_pictures_are_of_each_layers_own_tokens(caller):
    name, count = caller.name(), 170
    own = {"tenant": [name]}
    feed(caller, name, TEXT[:count], 64, **own)
    layers = range(CONFIG.num_layers)
    rows = {"layer": list(layers), "tenant": [name] * len(layers)}
    answer = caller.call("attention", [name] * len(layers), [()] * len(layers), -1, **rows)
    wanted: list[np.ndarray] = []
    tiny_model.logits(TEXT[:count], SEES, config=CONFIG, weights=WEIGHTS, watch=wanted.append)
    for layer, entries in zip(layers, (128, 192, 80, 80), strict=True):
        positions = answer["positions"][layer]
        held = positions >= 0
        assert held.sum() == min(entries, count) and not held[entries:].any()
        shown = np.zeros([CONFIG.num_query_heads, count])
        shown[:, positions[held]] = answer["weights"][layer][:, held]
        np.testing.assert_allclose(shown, wanted[layer][:, -1], atol=1e-4, err_msg=str(layer))


def test_counts_are_of_all_groups(caller):
    before = caller.stats()
    assert (before["pages"], before["pages_used"]) == (4 * (8 + 12 + 5), 0)
    name = caller.name()
    feed(caller, name, TEXT[:170], 64)
    stats = caller.stats()
    token = CONFIG.num_key_value_heads * 2 * 8 * 4  # of one layer
    assert stats["pages_used"] == 8 + 11 + 5
    assert stats["bytes_used"] == 16 * token * (8 + 11 + 2 * 5)
    assert stats["bytes_pool"] == 16 * token * (33 + 49 + 2 * 21)
    # All in layers that keep everything would be 11 pages of four layers.
    assert stats["bytes_used"] < 0.7 * 16 * token * 4 * 11
    caller.decode(name, (), -1, ttl_ms=1)
    time.sleep(0.003)
    caller.close(caller.name())
    assert caller.stats()["pages_used"] == 0


def test_a_row_that_lacks_a_page_in_one_group_takes_none_in_the_others(tmp_path):
    # Room for one session with all there may be; two of 60 tokens want eight of six pages in the
    # narrow layers, and have them in the others.
    token = CONFIG.num_key_value_heads * 2 * 8 * 4
    config = changed(slots=3, pool_bytes=16 * token * (1 * 9 + 1 * 13 + 2 * 7))
    assert pool_pages(CONFIG, config) == (9, 13, 7)
    with LoadedArtifact(export(SOURCE, tmp_path, config)) as artifact:
        caller = Caller(artifact)
        first, second = caller.name(), caller.name()
        feed(caller, first, TEXT[:60], 64)
        other = tiny_model.text(60, seed=704)
        refused = caller.generate(second, other, 0, count=0, tenant=["other"])
        assert refused["status"] == Status.FULL
        stats = caller.stats()
        assert (stats["pages_used"], stats["integrity"]) == (12, 0)
        logits = last(caller, first, TEXT[60], 60)
        np.testing.assert_allclose(logits, oracle(tuple(TEXT[:61]))[-1], atol=2e-3)
        caller.close(first)
        feed(caller, second, other, 64, tenant=["other"])
        caller.close_all()
        assert (caller.stats()["pages_used"], caller.stats()["integrity"]) == (0, 0)


def read(config: EngineConfig, tokens: Sequence[int], model: DecoderConfig = CONFIG) -> np.ndarray:
    """Logits ``[T, V]`` of an engine's pages, compiled, as `tfkv eval` reads."""
    reader, pieces = EngineReader(Engine(model, WEIGHTS, config)), []
    for start in range(0, len(tokens), 64):
        piece = np.array(tokens[start : start + 64], np.int32)
        pieces.append(reader.read(piece, start).numpy())
    return np.concatenate(pieces)


def test_pages_that_are_read_for_measurements_are_the_same():
    np.testing.assert_allclose(read(MIX, TEXT[:192]), oracle(tuple(TEXT[:192])), atol=2e-3)


def test_layers_that_were_trained_with_a_window_lose_nothing_by_storing_no_more():
    trained = Attention(windows=(40, 0, 16, 16))
    model = dataclasses.replace(CONFIG, attention=trained)
    windows = ("0=sliding_window(window=40)", "2-3=sliding_window(window=16)")
    stored = read(changed(layer_caches=windows), TEXT[:192], model)
    everything_stored = read(changed(layer_caches=()), TEXT[:192], model)
    np.testing.assert_allclose(stored, everything_stored, atol=1e-4)


def test_codecs_and_policies_mix():
    """Far past every ring: no layer keeps everything. One looks at its sinks from elsewhere."""
    tokens = TEXT[:320]
    wanted = of_keras(CODES, tokens)
    plain = changed(
        cache="sliding_window(window=100)",
        layer_caches=(
            "0=sliding_window(window=40,sinks=2)",
            "2=sliding_window(window=16)",
            "3=streaming_llm(window=62,sinks=2)",
        ),
    )
    # A code that falls the other way moves everything a little: less than the codecs do.
    room = 0.3 * np.abs(wanted - of_keras(plain, tokens)).max()
    np.testing.assert_allclose(read(CODES, tokens), wanted, atol=1e-3 + room)


class Walk:
    """Random operations on sessions that often begin alike, against NumPy.

    Args:
        caller: Of an artifact with `MIX`.
        seed: Of the choices.
    """

    def __init__(self, caller: Caller, seed: int) -> None:
        self.caller = caller
        self.random = np.random.default_rng(seed)
        self.held: dict[str, list[int]] = {}
        self.reached: dict[str, int] = {}
        self.names = [caller.name() for _ in range(6)]
        self.texts = [tiny_model.text(190, seed=720 + n) for n in range(2)]
        self.done: dict[str, int] = {}

    def run(self, operations: int) -> None:
        for _ in range(operations):
            what = self.random.choice(
                ["generate", "generate", "generate", "fork", "truncate", "copy", "end"]
            )
            getattr(self, what)(str(self.random.choice(self.names)))
            stats = self.caller.stats()
            assert stats["integrity"] == 0, (what, self.held.keys())
            if not self.held:
                assert stats["pages_used"] == 0

    def _earliest(self, name: str) -> int:
        """Least tokens that a session goes back to, but for none."""
        rings = ((112, 128, 39), (80, 80, 15))
        reached = self.reached[name]
        lost = [reached - ring + behind for ring, most, behind in rings if reached > most]
        return max([*lost, 0]) + 1

    def _count(self, what: str, answer: dict, expected: Status) -> bool:
        """Whether an operation went well, which must be as expected unless there was no room."""
        status = Status(int(answer["status"]))
        assert status in (expected, Status.FULL), (what, status, answer["detail"])
        self.done[f"{what} {status.name}"] = self.done.get(f"{what} {status.name}", 0) + 1
        return status == Status.OK

    def generate(self, name: str) -> None:
        tokens = self.held.get(name, [])
        text = self.texts[self.random.integers(2)]
        new = text[len(tokens) : len(tokens) + int(self.random.integers(1, 60))]
        new = new or [int(self.random.integers(3, 90))]
        count = int(self.random.integers(0, 9))
        position = len(tokens)
        if self.random.random() < 0.2:
            new, position = [*tokens, *new], 0
        end = position + len(new)
        wrong = Status.OVERFLOW if end + count > 192 else Status.OK
        if position == 0 and len(new) > 128:
            return
        answer = self.caller.generate(name, new, position, count=count)
        if not self._count("generate", answer, wrong):
            if wrong == Status.OK and not tokens:
                self.end(name)
            return
        said = [*tokens, *new] if position else list(new)
        made = answer["tokens"][: answer["count"]].tolist()
        assert len(made) == count
        said += made
        if made:
            rows = log_softmax(oracle(tuple(said)))[end - 1 : -1]
            chosen = np.take_along_axis(rows, np.array(made)[:, np.newaxis], axis=1)[:, 0]
            np.testing.assert_allclose(answer["logprobs"][:count], chosen, atol=2e-3)
        self.held[name] = said
        self.reached[name] = max(self.reached.get(name, 0), len(said))

    def fork(self, name: str) -> None:
        target = str(self.random.choice(self.names))
        if not self.held.get(name) or target in self.held:
            return
        held = self.held[name]
        at = int(self.random.integers(max(1, len(held) - 60), len(held) + 1))
        lost = at < self._earliest(name)
        answer = self.caller.call("fork", name, (), at, target=[target])
        self.caller.sessions.add(("", target))
        if self._count("fork", answer, Status.NOT_REVERSIBLE if lost else Status.OK):
            self.held[target], self.reached[target] = held[:at], self.reached[name]
        elif lost and answer["status"] == Status.NOT_REVERSIBLE:
            assert answer["detail"] == self._earliest(name)

    def truncate(self, name: str) -> None:
        if name not in self.held:
            return
        held = self.held[name]
        at = int(self.random.integers(max(0, len(held) - 80), len(held) + 1))
        at = self.random.choice([at, at // 16 * 16, 0], p=[0.45, 0.45, 0.1])
        lost = 0 < at < self._earliest(name)
        answer = self.caller.truncate(name, at)
        if self._count("truncate", answer, Status.NOT_REVERSIBLE if lost else Status.OK):
            self.held[name] = held[:at]
            self.reached[name] = self.reached[name] if at else 0
        else:
            assert answer["detail"] == self._earliest(name)

    def copy(self, name: str) -> None:
        target = str(self.random.choice(self.names))
        if not self.held.get(name) or target in self.held or len(self.held) >= 4:
            return
        if self.reached[name] > 80:
            answer = snapshot(self.caller, name, 0)
            assert self._count("snapshot", answer, Status.NOT_REVERSIBLE) is False
            return
        for piece in dump(self.caller, name):
            answer = restore(self.caller, target, piece)
            if not self._count("restore", answer, Status.OK):
                self.caller.close(target)
                return
        self.held[target] = list(self.held[name])
        self.reached[target] = len(self.held[name])

    def end(self, name: str) -> None:
        there = self.held.pop(name, None)
        self.reached.pop(name, None)
        if there and self.random.random() < 0.5:
            self.caller.decode(name, (), -1, ttl_ms=1)
            time.sleep(0.003)
        self.caller.close(name)


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_leave_every_group_sound(caller, seed):
    walk = Walk(caller, seed)
    walk.run(120)
    assert walk.done["generate OK"] > 20


@pytest.mark.slow
def test_many_random_operations_leave_every_group_sound(caller):
    walk = Walk(caller, 99)
    walk.run(2000)
    for what in ("generate OK", "generate FULL", "truncate OK"):
        assert walk.done[what] > 100, walk.done


@pytest.mark.parametrize("config", [MIX, CODES])
def test_a_plan_has_the_bytes_of_an_engine(config):
    built = Engine(CONFIG, WEIGHTS, config)
    most = 192 if config is MIX else CONFIG.context_length
    found = plan_memory(CONFIG, config, most, memory=10**9)
    assert found.page_bytes == built.pools.page_bytes
    assert found.pool_bytes(4) == built.pools.nbytes
    assert found.token_bytes == built.bytes_per_token
    assert found.beside_bytes == built.beside_bytes


@pytest.mark.parametrize("context", [20, 64, 80, 100, 150, 192])
def test_a_pool_that_was_planned_has_the_pages_of_all_sessions(context):
    sessions = 30
    found = plan_memory(CONFIG, MIX, context, memory=10**9)
    config = changed(slots=sessions, pool_bytes=found.pool_bytes(sessions))
    pages = pool_pages(CONFIG, config)
    needed = [sessions * min(-(-context // 16), ring // 16) + 1 for ring in RINGS]
    assert list(pages) == needed


def test_windows_of_layers_save_what_they_do_not_show():
    token = CONFIG.num_key_value_heads * 2 * 8 * 4
    mixed = plan_memory(CONFIG, MIX, 192, memory=10**9)
    dense = plan_memory(CONFIG, changed(layer_caches=()), 192, memory=10**9)
    assert mixed.cache_bytes == token * (128 + 192 + 2 * 80)
    assert dense.cache_bytes == token * 4 * 192


def test_a_manifest_says_what_all_groups_can_do(artifacts):
    manifest = artifacts["mix"].manifest
    token = CONFIG.num_key_value_heads * 2 * 8 * 4
    assert manifest.bytes_per_token == 4 * token
    assert manifest.bytes_per_session == token * (128 + 192 + 2 * 80)
    assert (manifest.rollback, manifest.positions) == (64, 512)


def test_layers_with_the_same_policy_are_one_group():
    groups = LayerGroups.of(CONFIG, changed(layer_caches=("1=int8", "3=k8v4")), 64)
    assert [group.layers for group in groups.groups] == [(0, 1, 2, 3)]
    assert [group.layers for group in LayerGroups.of(CONFIG, MIX, 64).groups] == [
        (0,),
        (1,),
        (2, 3),
    ]


def test_a_calibrated_codec_serves_several_windows():
    calibration = tiny_model.calibration()
    two = dataclasses.replace(tiny_model.CONFIG)
    config = changed(cache="low_rank(rank=6)", layer_caches=("1=sliding_window(window=16)",))
    built = Engine(two, tiny_model.WEIGHTS, config, calibration=calibration)
    assert [pool.layers for pool in built.pools.pools] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("cache", "exception", "match"),
    [
        ("dense", "1=snapkv(budget=64)", r"'snapkv' evicts by score.*may mix 'dense', 'sliding"),
        ("snapkv(budget=64)", "1=dense", r"'snapkv' evicts by score.*A Keras model takes it"),
        ("dense", "1=quest(page_size=16)", r"'quest' selects pages.*in all layers or in none"),
    ],
)
def test_policies_that_cannot_be_mixed_are_refused_by_name(tmp_path, cache, exception, match):
    config = changed(cache=cache, layer_caches=(exception,))
    with pytest.raises(ConfigError, match=match):
        LayerGroups.of(CONFIG, config, 64)
    with pytest.raises(ConfigError, match=match):
        export(SOURCE, tmp_path, config)
    assert list(tmp_path.iterdir()) == []

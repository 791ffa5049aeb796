from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator

import numpy as np
import pytest
from own_models import VOCABULARY, decoder, naive, trained, translator
from tiny_artifacts import PLAIN, Caller
from tiny_model import CONFIG

from tfkv.architecture import Attention
from tfkv.cached_model import CachedModel
from tfkv.causal_lm import CausalLM
from tfkv.errors import INPUT_NUMBERS, ConfigError, ExportError, Finish, RowError, Status
from tfkv.export import LoadedArtifact, export_keras
from tfkv.export.slot_advance import SlotAdvance
from tfkv.generation import generate
from tfkv.layers.keras_api import keras
from tfkv.manifest import Manifest
from tfkv.serving import Client
from tfkv.serving.server import Server

ENGINE = dataclasses.replace(PLAIN, slots=3, prefill_tokens=32, batch_sizes=(1, 2))
PROMPT = [4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return trained(decoder())


@pytest.fixture(scope="module")
def artifact_dir(model: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return export_keras(model, tmp_path_factory.mktemp("own"), ENGINE, stop_tokens=[0])


@pytest.fixture(scope="module")
def artifact(artifact_dir: pathlib.Path) -> Iterator[LoadedArtifact]:
    with LoadedArtifact(artifact_dir) as artifact:
        yield artifact


@pytest.fixture
def caller(artifact: LoadedArtifact) -> Iterator[Caller]:
    caller = Caller(artifact)
    yield caller
    caller.close_all()
    assert caller.stats()["integrity"] == 0
    assert caller.stats()["slots_used"] == 0


def test_says_what_the_model_says_and_says_it_again(model: keras.Model, caller: Caller):
    expected = naive(model, [PROMPT], 20)[0]
    session, said = caller.name(), []
    tokens, position = PROMPT, 0
    while len(said) < 20:
        for _ in range(2):  # a repeated call is answered from history
            answer = caller.generate(session, tokens, position, count=min(8, 20 - len(said)))
            assert answer["status"] == Status.OK
        said += answer["tokens"][: answer["count"]].tolist()
        tokens, position = said[-1:], int(answer["position"]) - 1
    assert said == expected
    logits = caller.decode(session, (), position=len(PROMPT) + 20)["logits"]
    np.testing.assert_allclose(
        logits, np.asarray(model(np.array([PROMPT + said], np.int32)))[0, -1], atol=1e-4
    )


def test_sessions_in_one_batch_and_in_turns_do_not_meet(model: keras.Model, caller: Caller):
    prompts = [PROMPT, [1, 2, 3]]
    expected = naive(model, prompts, 12)
    sessions = [caller.name(), caller.name()]
    first = caller.generate(sessions, prompts, 0, count=4)
    said = [row[:4].tolist() for row in first["tokens"]]
    for turn in range(2):  # one by one, cut in the middle of a text
        for row, session in enumerate(sessions):
            at = len(prompts[row]) + len(said[row])
            answer = caller.generate(session, said[row][-1:], at - 1, count=4)
            said[row] += answer["tokens"][:4].tolist()
            assert answer["position"] == at + 4, turn
    assert said == expected


def test_a_prompt_in_pieces_is_the_prompt(model: keras.Model, caller: Caller):
    session, text = caller.name(), (np.arange(30) * 7 % VOCABULARY).tolist()
    for start in (0, 11, 12):
        piece = text[start : {0: 11, 11: 12, 12: 30}[start]]
        assert caller.generate(session, piece, start, count=0)["position"] == start + len(piece)
    answer = caller.generate(session, (), 30, count=5)
    assert answer["tokens"][:5].tolist() == naive(model, [text], 5)[0]


def test_calls_that_do_not_continue_a_session_change_nothing(model: keras.Model, caller: Caller):
    session = caller.name()
    first = caller.generate(session, PROMPT, 0, count=3)
    refusals = {
        Status.UNKNOWN: caller.generate(caller.name(), [5], 4),
        Status.GAP: caller.generate(session, [5], 40),
        Status.CONFLICT: caller.generate(session, [PROMPT[0], 1], 0),
        Status.INVALID: caller.generate(session, [VOCABULARY], 12),
        Status.OVERFLOW: caller.generate(session, [5] * 30, 12, count=8),
    }
    assert [int(answer["status"]) for answer in refusals.values()] == [int(s) for s in refusals]
    assert refusals[Status.GAP]["detail"] == 12
    assert refusals[Status.CONFLICT]["detail"] == 1
    assert refusals[Status.INVALID]["detail"] == INPUT_NUMBERS["tokens"]
    assert refusals[Status.OVERFLOW]["detail"] == 48
    answer = caller.generate(session, first["tokens"][2:3].tolist(), 11, count=4)
    assert answer["tokens"][:4].tolist() == naive(model, [PROMPT], 7)[0][3:]


def test_a_full_session_ends_with_capacity(caller: Caller):
    session = caller.name()
    caller.generate(session, [5] * 32, 0, count=0)
    answer = caller.generate(session, [5] * 12, 32, count=8, overflow=1)
    assert (answer["count"], answer["finish"]) == (4, Finish.CAPACITY)


def test_slots_are_full_until_a_session_ends_or_expires(caller: Caller):
    names = [caller.name() for _ in range(4)]
    for name in names[:3]:
        assert caller.generate(name, [5], 0, count=1, ttl_ms=60_000)["status"] == Status.OK
    answer = caller.generate(names[3], [5], 0, count=1)
    assert answer["status"] == Status.FULL
    assert 0 < answer["detail"] <= 60_000
    caller.close(names[0])
    assert caller.generate(names[3], [5], 0, count=1, ttl_ms=1)["status"] == Status.OK
    time.sleep(0.01)
    assert caller.generate(names[3], (), 1, count=1)["status"] == Status.UNKNOWN


def test_a_slot_forgets_whose_it_was(model: keras.Model, caller: Caller):
    names = [caller.name() for _ in range(3)]
    for name in names:
        caller.generate(name, [7] * 20, 0, count=2)
        caller.close(name)
    answer = caller.generate(caller.name(), [3], 0, count=6)
    assert answer["tokens"][:6].tolist() == naive(model, [[3]], 6)[0]


def test_takes_tokens_back_as_far_as_its_windows_allow(model: keras.Model, caller: Caller):
    session = caller.name()
    answer = caller.generate(session, PROMPT, 0, count=8)
    assert caller.truncate(session, 11)["status"] == Status.OK
    again = caller.generate(session, [1, 2], 11, count=4)
    text = [*PROMPT, *answer["tokens"][:2].tolist(), 1, 2]
    assert again["tokens"][:4].tolist() == naive(model, [text], 4)[0]
    caller.generate(session, [3] * 20, 17, count=0)
    refused = caller.truncate(session, 4)
    assert refused["status"] == Status.NOT_REVERSIBLE
    assert caller.truncate(session, int(refused["detail"]))["status"] == Status.OK
    assert caller.truncate(session, 0)["status"] == Status.OK


def test_a_branch_goes_its_own_way(model: keras.Model, caller: Caller):
    session, branch = caller.name(), caller.name()
    said = caller.generate(session, PROMPT, 0, count=4)["tokens"][:4].tolist()
    caller.sessions.add(("", branch))
    answer = caller.call("fork", session, (), 10, target=branch)
    assert (answer["status"], answer["position"]) == (Status.OK, 10)
    other = caller.generate(branch, [1, 2], 10, count=3)
    expected = naive(model, [[*PROMPT, said[0], 1, 2], [*PROMPT, *said]], 3)
    assert other["tokens"][:3].tolist() == expected[0]
    own = caller.generate(session, said[-1:], 12, count=3)
    assert own["tokens"][:3].tolist() == expected[1]


def test_counts_what_it_did(caller: Caller):
    before = caller.stats()
    session = caller.name()
    caller.generate(session, PROMPT, 0, count=3)
    counted = caller.counted(before)
    assert counted == {
        "calls": 1,
        "rows": 1,
        "sessions_opened": 1,
        "tokens_prefilled": len(PROMPT) - 1,
        "tokens_decoded": 3,
    }
    stats, manifest = caller.stats(), caller.artifact.manifest
    assert stats["bytes_used"] == manifest.bytes_per_session
    assert stats["bytes_pool"] == 4 * manifest.bytes_per_session
    assert (stats["pages"], stats["pages_used"], stats["pages_free"]) == (3, 1, 2)


def test_the_manifest_says_what_it_has(artifact_dir: pathlib.Path, model: keras.Model):
    manifest = Manifest.read(artifact_dir)
    assert manifest.model is None
    assert set(manifest.signatures) == {"generate", "decode", "truncate", "fork", "close", "stats"}
    assert manifest.engine.cache == "dense+float32"
    assert manifest.engine.layer_caches == ("1=sliding_window(window=5,sinks=1)+float32",)
    assert (manifest.positions, manifest.rollback) == (48, 16)
    assert manifest.bytes_per_session == CachedModel(model).bytes_per_session()


def test_the_client_speaks_with_it_over_grpc(model: keras.Model, artifact_dir: pathlib.Path):
    expected = naive(model, [PROMPT, [1, 2, 3]], 20)
    with (
        Server(artifact_dir.parent, port=0, rest_port=None, poll_seconds=0) as server,
        Client(server.target, artifact=artifact_dir, timeout=60) as client,
        client.session() as first,
        client.session() as second,
    ):
        for _ in range(2):  # in turns
            for session, prompt in ((first, PROMPT), (second, [1, 2, 3])):
                given = () if session.tokens else prompt
                session.generate(given, 10, stop_tokens=[], stream=False)
        assert first.tokens[9:] == expected[0]
        assert second.tokens[3:] == expected[1]
        with pytest.raises(RowError, match="OVERFLOW"):
            first.generate([1] * 15, 10, stop_tokens=[], stream=False)
        assert client.stats()["slots_used"] == 2


@pytest.mark.slow
def test_layers_that_share_keys_are_served_and_stored_once(tmp_path: pathlib.Path):
    keras.utils.set_random_seed(1)
    shared = Attention(share_kv_with=(-1, 0))
    config = dataclasses.replace(CONFIG, attention=shared, context_length=64)
    model = CausalLM(config)
    model.assign_weights({name: w * 3 for name, w in model.export_weights().items()})
    engine = dataclasses.replace(ENGINE, batch_sizes=(1,), xla=True)
    path = export_keras(model, tmp_path, engine)
    manifest = Manifest.read(path)
    assert manifest.model == config
    alone = CausalLM(dataclasses.replace(config, attention=Attention()))
    assert 2 * manifest.bytes_per_session == alone.bytes_per_session()
    with LoadedArtifact(path) as artifact:
        answer = Caller(artifact).generate("a", PROMPT, 0, count=8)
    assert answer["tokens"].tolist() == generate(model, [PROMPT], 8)[0]


def test_refuses_what_cannot_be_served(tmp_path: pathlib.Path):
    with pytest.raises(ConfigError, match="`tfkv.export.export`"):
        export_keras(decoder(["snapkv(budget=64)"]), tmp_path, context_length=64)
    with pytest.raises(ConfigError, match="slack=16, say"):
        export_keras(decoder(slack=0), tmp_path)
    with pytest.raises(ConfigError, match="`context_length` must say how long"):
        export_keras(decoder(["sliding_window(window=4)"]), tmp_path)
    guessing = dataclasses.replace(ENGINE, speculation="prompt_lookup(tokens=3)")
    with pytest.raises(ConfigError, match="do not speculate"):
        export_keras(decoder(), tmp_path, guessing)
    model = translator()
    cached = CachedModel(model, lambda tokens, _, given: model([given["source"], tokens]))
    with pytest.raises(ConfigError, match="an artifact's calls give none"):
        export_keras(cached, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_artifact_that_answers_otherwise_is_not_left_behind(
    model: keras.Model, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SlotAdvance, "_fill", lambda self, plan, slot, state, tokens_at: state)
    with pytest.raises(ExportError, match="logits differ from the Keras model's"):
        export_keras(model, tmp_path, dataclasses.replace(ENGINE, batch_sizes=(1,)))
    assert list(tmp_path.iterdir()) == []

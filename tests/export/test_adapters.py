"""Named adapters: each session answers as the model that its adapter is merged into."""

import dataclasses
import json
import types

import numpy as np
import pytest
import tensorflow as tf
import tiny_model
from test_attention import by_position, look
from test_snapshot import dump, load, restore
from tiny_adapters import ADAPTERS, MERGED, make_adapter
from tiny_artifacts import ENGINES, Caller, feed

from tfkv.architecture import Experts, FeedForward
from tfkv.config import EngineConfig
from tfkv.errors import INPUT_NUMBERS, ConfigError, Status
from tfkv.export import LoadedArtifact, LoraAdapter, export
from tfkv.export.engine_calls import EngineCalls
from tfkv.export.importers import ModelSource
from tfkv.export.lora_adapter import TARGETS
from tfkv.manifest import Manifest, signature_table
from tfkv.serving import Client, InputError, SavedSession
from tfkv.serving.server import Server

NAMES = ["", "legal", "medical"]


class InProcess:
    """An engine that a `Caller` takes for an artifact: nothing is written, verified and loaded.

    Args:
        engine: What to compile for.
        adapters: By name.
    """

    def __init__(self, engine: EngineConfig, adapters: dict[str, LoraAdapter]) -> None:
        calls = EngineCalls(tiny_model.source(), engine, adapters=adapters)
        self.engine, self.call = engine, without_text(calls.call)
        self.manifest = types.SimpleNamespace(signatures=signature_table(engine))


def without_text(call):
    """`Caller.stats` makes numbers of all outputs: without the list of adapters."""

    def numbers(signature, **inputs):
        answer = call(signature, **inputs)
        return {k: v for k, v in answer.items() if (signature, k) != ("stats", "adapters")}

    return numbers


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """With two adapters; dense float32, not compiled."""
    root = tmp_path_factory.mktemp("adapted")
    written = export(tiny_model.source(), root, ENGINES["plain"], adapters=ADAPTERS)
    with LoadedArtifact(written) as artifact:
        artifact.directory = root
        yield artifact


@pytest.fixture(scope="module")
def served(artifact):
    """The artifact, and an engine of the same adapters with an int8 cache, compiled with XLA."""
    called = types.SimpleNamespace(
        engine=artifact.engine, manifest=artifact.manifest, call=without_text(artifact.call)
    )
    return {"plain": called, "int8": InProcess(ENGINES["int8"], ADAPTERS)}


@pytest.fixture
def caller(served):
    yield from _sound(Caller(served["plain"]))


@pytest.fixture
def int8_caller(served):
    yield from _sound(Caller(served["int8"]))


@pytest.fixture(params=["plain", pytest.param("int8", marks=pytest.mark.slow)])
def any_caller(served, request):
    yield from _sound(Caller(served[request.param]))


def _sound(caller: Caller):
    yield caller
    assert caller.stats()["integrity"] == 0
    caller.close_all()
    stats = caller.stats()
    assert (stats["slots_used"], stats["pages_used"]) == (0, 0)


def stored_of(caller: Caller):
    return tiny_model.int8 if caller.artifact.engine.cache.endswith("int8") else lambda x: x


def expected_logits(caller: Caller, tokens, adapter) -> np.ndarray:
    return tiny_model.logits(tokens, stored=stored_of(caller), weights=MERGED[adapter])


def assert_follows(caller: Caller, tokens, said, adapter) -> None:
    """Each of `said` is the likeliest token of the merged model, up to near ties."""
    rows = expected_logits(caller, [*tokens, *said], adapter)[len(tokens) - 1 : -1]
    room = 0.1 if stored_of(caller) is tiny_model.int8 else 1e-4
    for row, token in zip(rows, said, strict=True):
        assert row.max() - row[token] <= room


def test_the_adapters_of_these_tests_change_what_is_said():
    tokens = tiny_model.text(20)
    rows = [tiny_model.logits(tokens, weights=weights)[-1] for weights in MERGED.values()]
    for one in range(3):
        for other in range(one):
            assert np.abs(rows[one] - rows[other]).max() > 1


def test_rows_of_one_batch_answer_each_as_its_merged_model(any_caller):
    """Prompts of several pieces and pages; then single tokens, in two calls."""
    most = any_caller.artifact.engine.batch_sizes[-1]
    adapters = ["legal", "medical", ""][:most]
    prompts = [tiny_model.text(n, seed=n) for n in (70, 9, 33)][: len(adapters)]
    names = [any_caller.name() for _ in prompts]
    logits = any_caller.decode(names, prompts, adapter=adapters)["logits"]
    room = 0.05 if stored_of(any_caller) is tiny_model.int8 else 2e-4
    for row, prompt, adapter in zip(logits, prompts, adapters, strict=True):
        expected = expected_logits(any_caller, prompt, adapter)[-1]
        np.testing.assert_allclose(row, expected, atol=room)
    first = any_caller.generate(names, prompts, adapter=adapters)
    ends = [len(prompt) + 8 for prompt in prompts]
    second = any_caller.generate(names, [[]] * len(names), ends, adapter=adapters)
    assert not first["status"].any() and not second["status"].any()
    for row, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        said = [*first["tokens"][row], *second["tokens"][row]]
        assert_follows(any_caller, prompt, said, adapter)


def test_the_base_is_what_it_is_without_adapters(caller, plain):
    tokens = tiny_model.text(70, seed=1)
    one, other = (c.decode(c.name(), tokens)["logits"] for c in (caller, plain))
    np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("adapter", NAMES)
def test_scores_are_those_of_the_merged_model(caller, adapter):
    tokens = tiny_model.text(40, seed=2)
    answer = caller.score(caller.name(), tokens, adapter=adapter)
    rows = tiny_model.log_softmax(expected_logits(caller, tokens, adapter))
    expected = rows[np.arange(39), tokens[1:]]
    np.testing.assert_allclose(answer["logprobs"][1:40], expected, atol=1e-4)


@pytest.mark.parametrize("adapter", NAMES)
def test_attention_is_that_of_the_merged_model(caller, adapter):
    name, tokens = caller.name(), tiny_model.text(20, seed=3)
    caller.generate(name, tokens, count=0, adapter=adapter)
    found: list[np.ndarray] = []
    tiny_model.logits(tokens, weights=MERGED[adapter], watch=found.append)
    weights = by_position(look(caller, name, 1, 12), 20)
    np.testing.assert_allclose(weights, found[1][:, 12], atol=1e-5)


def test_an_adapter_that_is_not_there_is_refused(caller):
    answer = caller.generate(caller.name(), [5], adapter="french")
    assert (answer["status"], answer["detail"]) == (Status.ADAPTER, 0)
    assert caller.stats()["slots_used"] == 0


def test_a_session_keeps_its_adapter(caller):
    tokens = tiny_model.text(20, seed=4)
    for own in NAMES:
        name = caller.name()
        said = caller.generate(name, tokens, adapter=own)
        for other in NAMES:
            if other != own:
                answer = caller.generate(name, [5], 28, adapter=other)
                assert (answer["status"], answer["detail"]) == (Status.ADAPTER, 1)
        again = caller.generate(name, tokens, adapter=own)
        np.testing.assert_array_equal(again["tokens"], said["tokens"])
        assert again["position"] == 28
        caller.close(name)
        fresh = caller.generate(name, tokens, adapter="legal")
        assert_follows(caller, tokens, fresh["tokens"], "legal")


def test_a_new_session_cannot_have_two(caller):
    name = caller.name()
    answer = caller.generate([name, name], [[5, 6], [5, 6]], adapter=["legal", "medical"])
    assert answer["status"].tolist() == [Status.OK, Status.BUSY]


def test_a_prompt_is_found_by_sessions_of_the_same_adapter_alone(any_caller):
    """vllm #30931, #42125: an adapter never meets a cache that was made without it."""
    tokens = tiny_model.text(70, seed=5)
    reused = {}
    for turn in range(2):
        for adapter in NAMES:
            before = any_caller.stats()
            name = any_caller.name()
            said = any_caller.generate(name, tokens, adapter=adapter)["tokens"]
            reused[turn, adapter] = any_caller.counted(before).get("tokens_reused", 0)
            assert_follows(any_caller, tokens, said, adapter)
            any_caller.close(name)
    assert reused == {(turn, name): 64 * turn for turn in range(2) for name in NAMES}


def test_a_branch_inherits_the_adapter(any_caller):
    tokens = tiny_model.text(40, seed=6)
    root, branch = any_caller.name(), any_caller.name()
    any_caller.generate(root, tokens, count=0, adapter="medical")
    fork = {"target": [branch]}
    assert any_caller.call("fork", root, (), 37, **fork)["status"] == Status.OK
    any_caller.sessions.add(("", branch))
    refused = any_caller.generate(branch, tokens[37:], 37)
    assert (refused["status"], refused["detail"]) == (Status.ADAPTER, 1)
    said = any_caller.generate(branch, tokens[37:], 37, adapter="medical")
    assert_follows(any_caller, tokens, said["tokens"], "medical")
    # Its pages are found by those of its adapter, and no others.
    for adapter, found in (("medical", 32), ("legal", 0), ("", 0)):
        before = any_caller.stats()
        any_caller.generate(any_caller.name(), tokens, count=0, adapter=adapter)
        assert any_caller.counted(before).get("tokens_reused", 0) == found


def test_a_fork_onto_a_session_of_another_adapter_is_refused(caller):
    tokens = tiny_model.text(20, seed=7)
    names = {adapter: caller.name() for adapter in NAMES}
    for adapter, name in names.items():
        caller.generate(name, tokens, count=0, adapter=adapter)
    answer = caller.call("fork", names["legal"], (), 20, target=[names["medical"]])
    assert (answer["status"], answer["detail"]) == (Status.ADAPTER, 1)
    answer = caller.call("fork", names["legal"], (), 20, target=[names["legal"]])
    assert answer["status"] == Status.OK


def test_a_restored_session_goes_on_with_its_adapter(any_caller):
    tokens = tiny_model.text(40, seed=8)
    for adapter in NAMES:
        first, second = any_caller.name(), any_caller.name()
        any_caller.generate(first, tokens, count=0, adapter=adapter)
        pieces = dump(any_caller, first)
        expected = any_caller.generate(first, (), 40, adapter=adapter)["tokens"]
        any_caller.close(first)
        load(any_caller, second, pieces)
        other = any_caller.generate(second, (), 40, adapter=NAMES[NAMES.index(adapter) - 1])
        assert (other["status"], other["detail"]) == (Status.ADAPTER, 1)
        answer = any_caller.generate(second, (), 40, adapter=adapter)
        np.testing.assert_array_equal(answer["tokens"], expected)
        any_caller.close(second)


def test_a_snapshot_names_its_adapter_and_an_artifact_without_it_refuses(caller, plain):
    base, own = caller.artifact.manifest.fingerprint, caller.artifact.manifest.adapters
    expected = {"": base, **{name: f"{base}/{name}@{mark}" for name, mark in own.items()}}
    for adapter in NAMES:
        name = caller.name()
        caller.generate(name, [5, 6], count=0, adapter=adapter)
        (piece,) = dump(caller, name)
        assert piece["fingerprint"].decode() == expected[adapter]
        answer = restore(plain, plain.name(), piece)
        refused = (Status.INVALID, INPUT_NUMBERS["fingerprint"])
        assert (answer["status"], answer["detail"]) == (refused if adapter else (Status.OK, 0))


@pytest.mark.slow
def test_a_session_is_restored_where_its_adapter_is(int8_caller):
    """Into an engine of the same base that has another `legal`, the same `medical`, and no more."""
    engine = dataclasses.replace(ENGINES["int8"], xla=False)
    adapters = {"legal": make_adapter(5), "medical": ADAPTERS["medical"]}
    other = Caller(InProcess(engine, adapters))
    tokens = tiny_model.text(20, seed=9)
    for adapter in NAMES:
        name = int8_caller.name()
        int8_caller.generate(name, tokens, count=0, adapter=adapter)
        pieces = dump(int8_caller, name)
        answer = restore(other, other.name(), pieces[0])
        if adapter == "legal":
            refused = (Status.INVALID, INPUT_NUMBERS["fingerprint"])
            assert (answer["status"], answer["detail"]) == refused
        else:
            assert answer["status"] == Status.OK


def test_restoring_over_a_session_of_another_adapter_is_refused(caller):
    tokens = tiny_model.text(20, seed=10)
    names = {adapter: caller.name() for adapter in NAMES}
    for adapter, name in names.items():
        caller.generate(name, tokens, count=0, adapter=adapter)
    for adapter in NAMES:
        piece = dump(caller, names[adapter])[0]
        for other in NAMES:
            answer = restore(caller, names[other], piece)
            expected = (Status.OK, 0) if other == adapter else (Status.ADAPTER, 1)
            assert (answer["status"], answer["detail"]) == expected


def test_manifest_and_stats_list_the_adapters(artifact, plain):
    fingerprints = {name: adapter.fingerprint for name, adapter in ADAPTERS.items()}
    assert artifact.manifest.adapters == fingerprints
    assert Manifest.from_json(artifact.manifest.to_json()) == artifact.manifest
    answer = artifact.call("stats", session_id=["?", "?"])["adapters"]
    assert [json.loads(text) for text in answer] == [fingerprints] * 2
    assert plain.artifact.manifest.adapters == {}
    assert "adapters" not in plain.artifact.call("stats", session_id=["?"])


def test_signatures_and_fingerprint_are_those_of_the_base(artifact, plain):
    with_adapters, without = artifact.manifest, plain.artifact.manifest
    assert with_adapters.fingerprint == without.fingerprint
    for name, spec in without.signatures.items():
        assert spec.inputs == with_adapters.signatures[name].inputs


def test_without_adapters_nothing_is_stored_or_computed_for_them():
    calls = EngineCalls(tiny_model.source(), ENGINES["plain"])
    engine = calls._engine
    assert engine.adapter_weights.stacked == {}
    assert engine.adapters.of_slot is None
    number = tf.constant([7], tf.int64)
    assert engine.adapters.owner(number, tf.constant([0])) is number
    weights = engine.decoder.read_weights(engine.adapters.of_owner(number))
    assert (weights.adapters, weights.chosen) == ({}, None)


def test_a_policy_that_judges_values_by_the_output_projection_wants_the_base_s():
    engine = ENGINES["evict"]
    with pytest.raises(ConfigError, match="'medical' adds to it"):
        EngineCalls(tiny_model.source(), engine, adapters={"medical": ADAPTERS["medical"]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cache"),
    [
        ({"experts": Experts(4, 2, 16, layers=(1,)), "num_layers": 3}, "dense"),
        ({"feed_forward": FeedForward("gelu", gated=False, bias=True)}, "k4v4(recent=64)"),
        ({"parallel_residual": True}, "snapkv(budget=40,sinks=2,window=16)"),
    ],
)
def test_other_models_and_caches_answer_as_their_merged_models(options, cache):
    config = dataclasses.replace(tiny_model.CONFIG, **options)
    weights = tiny_model.make_weights(config)
    targets = tuple(t for t in TARGETS if "snapkv" not in cache or t != "attention_output")
    adapters = {
        "one": make_adapter(3, config=config),
        "two": make_adapter(4, targets, config=config),
    }
    engine = dataclasses.replace(ENGINES["plain"], cache=cache, capacity=192)
    together = EngineCalls(ModelSource(config, weights), engine, adapters=adapters)
    alone = EngineCalls(ModelSource(config, adapters["two"].merged(weights)), engine)
    tokens = tiny_model.text(100, seed=11)
    logits = [
        artifact.call(
            "decode", session_id=["a"], adapter=[name], tokens=[tokens], length=[100], position=[0]
        )["logits"]
        for artifact, name in ((together, "two"), (alone, ""))
    ]
    np.testing.assert_allclose(*logits, atol=2e-4)


def test_sessions_over_grpc_answer_each_as_its_merged_model(artifact, tmp_path):
    """Two in one batch, a branch, and one that comes back from a file."""
    directory = artifact.directory
    prompt = tiny_model.text(30, seed=13)
    with (
        Server(directory, port=0, rest_port=None, poll_seconds=0) as server,
        Client(server.target, artifact=directory) as client,
    ):
        assert list(client.adapters()) == ["legal", "medical"]
        assert client.stats()["slots_used"] == 0
        with pytest.raises(InputError, match="no adapter 'french'. It has: legal, medical"):
            client.session(adapter="french")
        row = {"position": 0, "tokens": prompt, "stop_tokens": [-1] * 8}
        rows = [{**row, "session_id": f"row {name}", "adapter": name} for name in NAMES]
        answers = client.call("generate", rows)
        assert client.stats()["calls"] == 1
        for name, answer in zip(NAMES, answers, strict=True):
            assert_follows(Caller(artifact), prompt, answer["tokens"], name)
            client.call("close", [{"session_id": f"row {name}"}])
        for name in NAMES:
            with client.session(name or "base", adapter=name, keep=True) as session:
                said = session.generate(prompt, 6, stop_tokens=[], stream=False).result.tokens
                assert_follows(Caller(artifact), prompt, said, name)
                with session.fork() as branch:
                    more = branch.generate([], 6, stop_tokens=[], stream=False).result.tokens
                assert_follows(Caller(artifact), [*prompt, *said], more, name)
            saved = SavedSession.fetch(client, name or "base", tmp_path / "one.session")
            assert saved.adapter == name
            session.close()
            saved.restore(client)
            with client.session(
                session.session_id, tokens=[*prompt, *said], adapter=saved.adapter
            ) as again:
                again_said = again.generate([], 6, stop_tokens=[], stream=False).result.tokens
            assert again_said == more
        assert client.stats()["slots_used"] == 0


def test_text_is_fed_in_pieces_with_the_adapter(caller):
    name, tokens = caller.name(), tiny_model.text(70, seed=12)
    feed(caller, name, tokens, 23, adapter="legal")
    answer = caller.decode(name, tokens[-1:], 69, adapter="legal")
    np.testing.assert_allclose(
        answer["logits"], expected_logits(caller, tokens, "legal")[-1], atol=2e-4
    )

"""The `attention` signature: what a held token attends to."""

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import Caller, feed

from tfkv.errors import INVALID_INPUTS, Status

NUMBER = {name: number for number, name in INVALID_INPUTS.items()}
HEADS, LAYERS = tiny_model.CONFIG.num_query_heads, tiny_model.CONFIG.num_layers


def look(caller: Caller, session: str, layer: int, position: int = -1, **inputs: object) -> dict:
    return caller.call("attention", session, (), position, layer=[layer], **inputs)


def by_position(answer: dict, count: int) -> np.ndarray:
    """Weights ``[N, count]`` by position."""
    dense = np.zeros([HEADS, count])
    for entry, position in enumerate(answer["positions"]):
        if position >= 0:
            dense[:, position] = answer["weights"][:, entry]
    return dense


@pytest.mark.parametrize("layer", range(LAYERS))
def test_weights_are_those_of_a_plain_forward_pass(plain, layer):
    name = plain.name()
    tokens = tiny_model.text(40, seed=200)
    said = [*tokens, *plain.generate(name, tokens)["tokens"]]
    expected = tiny_model.attention_weights(said, layer)
    for position in (0, 15, 16, 39, 46, 47):
        answer = look(plain, name, layer, position)
        assert (answer["status"], answer["position"]) == (Status.OK, 48)
        weights = by_position(answer, 48)
        np.testing.assert_allclose(weights, expected[:, position], atol=1e-5)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_minus_one_is_the_last_held_token_filled_or_not(plain):
    name = plain.name()
    tokens = tiny_model.text(17, seed=201)
    expected = tiny_model.attention_weights(tokens, 1)[:, -1]
    plain.generate(name, tokens, count=0)
    first = look(plain, name, 1)
    plain.decode(name, tokens)
    for answer in (first, look(plain, name, 1)):
        np.testing.assert_allclose(by_position(answer, 17), expected, atol=1e-5)
        assert sorted(answer["positions"])[-17:] == list(range(17))
        assert (answer["positions"] >= 0).sum() == 17


def test_looking_changes_nothing(plain):
    name = plain.name()
    tokens = tiny_model.text(20, seed=202)
    plain.generate(name, tokens, count=0)
    before = plain.stats()
    look(plain, name, 0, 7)
    assert plain.counted(before) == {}
    assert plain.generate(name, (), 20)["tokens"].tolist() == tiny_model.greedy(tokens, 8)


def test_a_ring_shows_the_positions_that_it_kept(window):
    name = window.name()
    tokens = tiny_model.text(130, seed=203)
    feed(window, name, tokens, 50)
    expected = tiny_model.attention_weights(tokens, 1, tiny_model.window(20, 3))
    for position in (120, 129):
        answer = look(window, name, 1, position)
        assert answer["status"] == Status.OK
        weights = by_position(answer, 130)
        np.testing.assert_allclose(weights, expected[:, position], atol=1e-5)
    lost = look(window, name, 1, 40)
    assert lost["status"] == Status.NOT_REVERSIBLE
    assert look(window, name, 1, lost["detail"])["status"] == Status.OK
    assert not lost["weights"].any() and (lost["positions"] == -1).all()


def test_rows_of_a_batch_look_at_their_own_layers(plain):
    names = [plain.name() for _ in range(2)]
    prompts = [tiny_model.text(n, seed=204 + n) for n in (9, 33)]
    for name, prompt in zip(names, prompts, strict=True):
        plain.generate(name, prompt, count=0)
    answer = plain.call("attention", names, (), [3, 30], layer=np.array([1, 0], np.int32))
    for row, (prompt, layer, position) in enumerate(zip(prompts, (1, 0), (3, 30), strict=True)):
        mine = {key: value[row] for key, value in answer.items()}
        expected = tiny_model.attention_weights(prompt, layer)[:, position]
        np.testing.assert_allclose(by_position(mine, len(prompt)), expected, atol=1e-5)


def test_what_cannot_be_shown_is_refused(plain):
    name = plain.name()
    plain.generate(name, tiny_model.text(5), count=0)
    cases = [
        (look(plain, name, 0, 5), Status.GAP, 5),
        (look(plain, plain.name(), 0), Status.UNKNOWN, 0),
        (look(plain, "", 0), Status.INVALID, NUMBER["session_id"]),
        (look(plain, name, LAYERS), Status.INVALID, NUMBER["layer"]),
        (look(plain, name, -1), Status.INVALID, NUMBER["layer"]),
        (look(plain, name, 0, -2), Status.INVALID, NUMBER["position"]),
        (look(plain, name, 0, tenant=["else"]), Status.UNKNOWN, 0),
    ]
    for answer, status, detail in cases:
        assert (answer["status"], answer["detail"]) == (status, detail)
    plain.truncate(name, 0)
    assert look(plain, name, 0)["status"] == Status.EMPTY

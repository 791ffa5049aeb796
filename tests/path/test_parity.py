"""Four implementations, one answer: gRPC, the Keras model, keras-nlp, and text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from path_support import NEW_TOKENS, PROMPTS, Reference, assert_same_tokens, greedy, one

from tfkv.causal_lm import CausalLM
from tfkv.errors import Finish
from tfkv.export.importers import ModelSource
from tfkv.generation import Generator
from tfkv.serving import Client


def test_ids_over_grpc_are_those_of_keras_nlp(
    client: Client, prompts: list[list[int]], reference: Reference
):
    for text, prompt, expected, logits in zip(
        PROMPTS, prompts, reference.tokens, reference.logits, strict=True
    ):
        assert_same_tokens(greedy(client, prompt), expected, logits, text)


def test_ids_of_the_keras_model_are_those_of_keras_nlp(
    source: ModelSource, prompts: list[list[int]], reference: Reference
):
    model = CausalLM.from_weights(source.config, source.weights, capacity=256)
    answers = Generator(model).generate(prompts, NEW_TOKENS)
    for text, tokens, expected, logits in zip(
        PROMPTS, answers, reference.tokens, reference.logits, strict=True
    ):
        assert_same_tokens(tokens, expected, logits, text)


def test_logits_are_those_of_keras_nlp(
    client: Client, prompts: list[list[int]], reference: Reference
):
    """`decode` gives the logits after every prefix that it is given."""
    worst = 0.0
    for number, (prompt, tokens) in enumerate(zip(prompts, reference.tokens, strict=True)):
        text = prompt + tokens
        with client.session() as session:
            held = 0
            for end in (len(prompt), len(prompt) + 1, len(text)):
                logits = session.logits(text[held:end])
                expected = reference.logits[number][end - 1]
                worst = max(worst, float(np.abs(logits - expected).max()))
                held = end
    print(f"\nlargest difference of a logit from keras-nlp's: {worst:.2e}")
    assert worst <= 1e-3


def test_logprobs_of_sampled_and_of_given_tokens_are_those_of_keras_nlp(
    client: Client, prompts: list[list[int]], reference: Reference
):
    prompt, tokens, logits = prompts[3], reference.tokens[3], reference.logits[3]
    text = prompt + tokens
    exact = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    expected = exact[np.arange(len(text) - 1), text[1:]]
    with client.session() as session:
        scores = session.score(text)
    assert np.isnan(scores[0])
    np.testing.assert_allclose(scores[1:], expected, atol=1e-3)
    sampled = client.generate(prompt, 8, stop_tokens=(), stream=False).result
    np.testing.assert_allclose(sampled.logprobs, expected[len(prompt) - 1 :][:8], atol=1e-3)


def test_what_is_the_capital_of_france(client: Client):
    with client.session() as session:
        answer = session.chat("What is the capital of France?", stream=False)
    assert answer.text == "The capital of France is Paris."
    assert answer.result.finish == Finish.STOP


@pytest.mark.parametrize("piece", [1, 7, 64, 90])
def test_a_prompt_cut_anyhow_gives_the_same_tokens(
    client: Client,
    real_text: list[int],
    oracle_logits: Callable[[Sequence[int]], np.ndarray],
    piece: int,
):
    prompt = real_text[:90]
    whole = greedy(client, prompt, 32)
    name = f"pieces-{piece}"
    for start in range(0, len(prompt), piece):
        part = prompt[start : start + piece]
        one(client, "generate", session_id=name, tokens=part, position=start, max_new_tokens=0)
    tokens: list[int] = []
    while len(tokens) < 32:
        at = len(prompt) + len(tokens)
        row = {"session_id": name, "position": at, "max_new_tokens": 16, "stop_tokens": [-1] * 8}
        answer = one(client, "generate", **row)
        tokens += answer["tokens"].tolist()
    one(client, "close", session_id=name)
    assert_same_tokens(tokens, whole, oracle_logits(prompt + whole), f"pieces of {piece}")


def test_eight_rows_of_different_lengths_get_what_each_gets_alone(
    client: Client,
    real_text: list[int],
    oracle_logits: Callable[[Sequence[int]], np.ndarray],
):
    lengths = (1, 2, 17, 63, 64, 65, 130, 250)
    prompts = [real_text[100 * row :][:length] for row, length in enumerate(lengths)]
    names = [f"row-{row}" for row in range(8)]
    answers: list[list[int]] = [[] for _ in prompts]
    rows = [
        {"session_id": name, "tokens": prompt, "position": 0}
        for name, prompt in zip(names, prompts, strict=True)
    ]
    # A long prompt beside short ones is answered piece by piece: its row calls again.
    while waiting := [row for row in range(8) if len(answers[row]) < 32]:
        calls = [{**rows[row], "stop_tokens": [-1] * 8} for row in waiting]
        for row, answer in zip(waiting, client.call("generate", calls), strict=True):
            assert answer["status"] == 0
            answers[row] += answer["tokens"][: answer["count"]].tolist()
            reached = int(answer["position"])
            rest = prompts[row][reached:]
            rows[row] = {"session_id": names[row], "tokens": rest, "position": reached}
    client.call("close", [{"session_id": name} for name in names])
    for prompt, tokens in zip(prompts, answers, strict=True):
        alone = greedy(client, prompt, 32)
        assert_same_tokens(tokens, alone, oracle_logits(prompt + alone), f"{len(prompt)} tokens")


def test_a_second_turn_computes_only_its_own_tokens(client: Client):
    with client.session() as session:
        session.chat("What is the capital of France?", stream=False)
        held = session.position
        before = client.stats()
        answer = session.chat("And what is it famous for?", 16, stream=False)
        after = client.stats()
        added = answer.result.prompt_tokens
        assert 0 < added < held
        # The last sampled token of the first turn had no keys yet; the last token of this
        # prompt is fed by the first decode step.
        assert after["tokens_prefilled"] - before["tokens_prefilled"] == added
        assert after["tokens_decoded"] - before["tokens_decoded"] == 16
        with client.session() as fresh:
            again = fresh.generate(session.tokens[: held + added], 16, stream=False)
        assert again.result.tokens == answer.result.tokens

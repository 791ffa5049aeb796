"""Sampling inside the artifact: seeds, penalties, and independence of batch mates."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_model import greedy, logits, text

HOT = {"temperature": 1.5, "top_p": 0.95, "top_k": 40}


def sample(caller, session, prompt, cuts, **inputs):
    """Tokens of one answer sampled in calls of these sizes."""
    tokens: list[int] = []
    for count in cuts:
        given, position = ([], len(prompt) + len(tokens)) if tokens else (prompt, 0)
        answer = caller.generate(session, given, position, count=count, **inputs)
        tokens += [int(t) for t in answer["tokens"][:count]]
    return tokens


@pytest.mark.parametrize("cuts", [(4, 4, 4, 4), (1,) * 16, (3, 8, 5)])
def test_same_seed_gives_the_same_tokens_however_cut(plain, cuts):
    prompt = text(12)
    whole = sample(plain, plain.name(), prompt, (8, 8), seed=11, **HOT)
    assert sample(plain, plain.name(), prompt, cuts, seed=11, **HOT) == whole
    assert whole != greedy(prompt, 16)


def test_same_seed_gives_the_same_tokens_whoever_shares_the_batch(plain):
    prompts = [text(12, n) for n in range(4)]
    seeds = [3, 4, 5, 2**62]
    together = plain.generate([plain.name() for _ in prompts], prompts, seed=seeds, **HOT)
    for row in range(4):
        alone = plain.generate(plain.name(), prompts[row], seed=seeds[row], **HOT)
        assert list(alone["tokens"]) == list(together["tokens"][row])


def test_different_seeds_differ(plain):
    prompt = text(12)
    drawn = {
        tuple(sample(plain, plain.name(), prompt, (8,), seed=seed, temperature=3.0))
        for seed in (0, 1, -1, 2**40)
    }
    assert len(drawn) == 4


def test_greedy_row_beside_a_sampled_one_stays_greedy(plain):
    prompts = [text(12, 1), text(12, 2)]
    answer = plain.generate([plain.name(), plain.name()], prompts, temperature=[0.0, 2.0])
    assert list(answer["tokens"][0]) == greedy(prompts[0], 8)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_narrowest_sampling_is_greedy(plain, narrow):
    prompt = text(12)
    answer = plain.generate(plain.name(), prompt, temperature=1.0, **narrow)
    assert list(answer["tokens"]) == greedy(prompt, 8)


def test_sampled_tokens_follow_the_distribution(plain):
    """600 draws of one next token against softmax: a chi-square far inside its 99.9 % bound."""
    prompt = text(12)
    row = logits(prompt)[-1] / 3.0
    share = np.exp(row - row.max())
    share /= share.sum()
    session = plain.name()
    plain.generate(session, prompt, count=0)
    counts = np.zeros(97)
    draws = 150
    for seed in range(draws):
        answer = plain.generate(session, [], 12, count=1, temperature=3.0, seed=seed)
        counts[answer["tokens"][0]] += 1
        plain.truncate(session, 12)
    top = np.argsort(-share)[:4]
    grouped = np.append(counts[top], draws - counts[top].sum())
    expected = draws * np.append(share[top], 1 - share[top].sum())
    assert (((grouped - expected) ** 2) / expected).sum() < 18.5


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_the_reference(plain, penalty):
    prompt = text(30)
    session = plain.name()
    expected = greedy(prompt, 16, penalty=penalty)
    answer = plain.generate(session, prompt, repetition_penalty=penalty)
    assert list(answer["tokens"]) == expected[:8]
    # The second call sees the prompt and all that was sampled.
    answer = plain.generate(session, [], 38, repetition_penalty=penalty)
    assert list(answer["tokens"]) == expected[8:]
    assert expected != greedy(prompt, 16)


def test_penalty_of_one_row_leaves_the_other_alone(plain):
    prompts = [text(30, 1), text(30, 2)]
    answer = plain.generate([plain.name(), plain.name()], prompts, repetition_penalty=[1.5, 1.0])
    assert list(answer["tokens"][0]) == greedy(prompts[0], 8, penalty=1.5)
    assert list(answer["tokens"][1]) == greedy(prompts[1], 8)


def test_penalty_after_truncate_forgets_what_was_taken_back(plain):
    session, prompt = plain.name(), text(30)
    plain.generate(session, prompt)
    plain.truncate(session, 11)
    answer = plain.generate(session, [], 11, repetition_penalty=1.5)
    assert list(answer["tokens"]) == greedy(prompt[:11], 8, penalty=1.5)

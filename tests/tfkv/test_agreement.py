from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tfkv.agreement import Agreement, Limits, compare_answers
from tfkv.errors import ConfigError


def compared(reference, candidate, kl=(0.0,), same_top=(True,), similarity=None):
    return compare_answers(
        "why", (reference, candidate), ("so", "thus"), np.array(kl), np.array(same_top), similarity
    )


def agreement(*prompts):
    return Agreement("float32", "int8", prompts)


@pytest.mark.parametrize(
    ("candidate", "same", "tokens", "divergence"),
    [
        ([1, 2, 3], 3, 3, None),
        ([1, 9, 3], 2, 3, 1),
        ([1, 2], 2, 3, 2),
        ([1, 2, 3, 4, 5], 3, 5, 3),
        ([9, 1, 2], 0, 3, 0),
    ],
)
def test_tokens_are_compared_place_by_place(candidate, same, tokens, divergence):
    found = compared([1, 2, 3], candidate)
    assert (found.same_tokens, found.tokens, found.first_divergence) == (same, tokens, divergence)
    assert found.agreement_percent == pytest.approx(100 * same / tokens)


def test_all_prompts_weigh_as_much_as_their_tokens():
    long = compared([1] * 8, [1] * 6 + [2] * 2, kl=[0.1] * 8, same_top=[True] * 7 + [False])
    short = compared([1, 2], [1, 2], kl=[0.6, 0.6], same_top=[True, True])
    found = agreement(short, long)
    assert found.agreement_percent == pytest.approx(80)
    assert found.first_divergence == 6
    assert found.kl == pytest.approx(0.2)
    assert found.same_top_percent == pytest.approx(90)
    assert (long.kl_max, found.similarity) == (pytest.approx(0.1), None)


def test_similarities_are_of_the_two_texts():
    near = compared([1], [1], similarity=lambda one, other: {("so", "thus"): 0.9}[one, other])
    far = compared([1], [1], similarity=lambda *_: 0.5)
    assert agreement(near, far).similarity == pytest.approx(0.7)


def test_what_does_not_hold_is_named():
    found = agreement(compared([1, 2, 3, 4], [1, 2, 9, 4], [0.02], similarity=lambda *_: 0.9))
    assert Limits().broken(found) == []
    assert Limits(75, 2, 0.02, 0.9).broken(found) == []
    assert Limits(76, 3, 0.019, 0.91).broken(found) == [
        "agreement is 75 %, expected at least 76 %",
        "first divergence is 2, expected at least 3",
        "KL is 0.02 nats, expected at most 0.019 nats",
        "similarity is 0.9, expected at least 0.91",
    ]


def test_answers_that_never_differ_hold_any_first_divergence():
    assert Limits(100, 10_000).broken(agreement(compared([1, 2], [1, 2]))) == []


def test_a_divergence_that_is_no_number_holds_no_limit():
    (sentence,) = Limits(max_kl=1.0).broken(agreement(compared([1], [1], [math.nan])))
    assert sentence.startswith("KL is nan")


def test_a_similarity_that_was_not_measured_is_no_similarity():
    with pytest.raises(ConfigError, match="were not measured"):
        Limits(min_similarity=0.5).broken(agreement(compared([1], [1])))


@pytest.mark.parametrize(
    "limits",
    [{"min_agreement": 101}, {"min_first_divergence": -1}, {"max_kl": math.nan}],
)
def test_limits_out_of_range_are_refused(limits):
    (name,) = limits
    with pytest.raises(ConfigError, match=f"`{name}` must be from 0"):
        Limits(**limits)


def test_as_data_it_has_every_prompt_and_the_whole():
    data = json.loads(json.dumps(agreement(compared([1, 2], [1, 3])).to_dict()))
    assert data["overall"]["agreement_percent"] == 50
    assert data["prompts"][0]["first_divergence"] == data["overall"]["first_divergence"] == 1
    assert (data["reference"], data["candidate"]) == ("float32", "int8")

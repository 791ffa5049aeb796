"""`generate`: the right tokens, however the call is cut, batched or repeated."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import feed
from tiny_model import STOP, greedy, log_softmax, logits, text

from tfkv.errors import Finish, Status


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 80])
def test_greedy_tokens_equal_the_reference(plain, length):
    prompt = text(length)
    answer = plain.generate(plain.name(), prompt)
    assert list(answer["tokens"]) == greedy(prompt, 8)
    assert (answer["count"], answer["finish"]) == (8, Finish.LENGTH)
    assert (answer["position"], answer["status"], answer["detail"]) == (length + 8, 0, 0)


def test_logprobs_are_those_of_the_unmodified_model(plain):
    prompt = text(20)
    answer = plain.generate(plain.name(), prompt, repetition_penalty=1.7, temperature=0.9, top_k=5)
    tokens = list(answer["tokens"])
    expected = log_softmax(logits(prompt + tokens))[19:-1]
    np.testing.assert_allclose(answer["logprobs"], expected[np.arange(8), tokens], atol=1e-4)


def test_shorter_answers_are_padded_with_minus_one_and_zero(plain):
    answer = plain.generate(plain.name(), text(5), count=3)
    assert list(answer["tokens"][3:]) == [-1] * 5
    assert list(answer["logprobs"][3:]) == [0.0] * 5
    assert (answer["count"], answer["finish"], answer["position"]) == (3, Finish.LENGTH, 8)


def test_max_new_tokens_zero_only_prefills(plain):
    answer = plain.generate(plain.name(), text(5), count=0)
    assert (answer["count"], answer["finish"], answer["position"]) == (0, Finish.NONE, 5)
    assert list(answer["tokens"]) == [-1] * 8


@pytest.mark.parametrize("cut", [1, 7, 64, 88])
def test_prompt_cut_anyhow_gives_the_same_tokens(plain, cut):
    """keras-hub #2274 is a neighbour: prompts are prefilled, not decoded one by one."""
    prompt, session = text(88), plain.name()
    feed(plain, session, prompt, cut)
    answer = plain.generate(session, [], 88)
    assert list(answer["tokens"]) == greedy(prompt, 8)


@pytest.mark.parametrize("lengths", [(3, 70), (1, 17, 64, 33), (80, 2, 5)])
def test_rows_of_a_ragged_batch_get_what_they_get_alone(plain, lengths):
    """omlx #2172, mlx-lm #439 and #965: lengths belong to rows, and rows never meet."""
    prompts = [text(n, seed) for seed, n in enumerate(lengths)]
    together = plain.generate([plain.name() for _ in prompts], prompts)
    for row, prompt in enumerate(prompts):
        alone = plain.generate(plain.name(), prompt)
        assert list(together["tokens"][row]) == list(alone["tokens"]) == greedy(prompt, 8)
        np.testing.assert_allclose(together["logprobs"][row], alone["logprobs"], atol=1e-5)


def test_sessions_that_take_turns_stay_apart(plain):
    names, transcripts = [plain.name(), plain.name()], [text(9, 1), text(30, 2)]
    for turn in range(3):
        for name, transcript in zip(names, transcripts, strict=True):
            held = len(transcript) if turn else 0
            given = [] if turn else transcript
            answer = plain.generate(name, given, held, count=5)
            assert list(answer["tokens"][:5]) == greedy(transcript, 5)
            transcript += greedy(transcript, 5)


def test_second_turn_continues_and_computes_only_its_new_tokens(plain):
    session, first, second = plain.name(), text(20, 1), text(6, 2)
    sampled = list(plain.generate(session, first)["tokens"])
    before = plain.stats()
    answer = plain.generate(session, second, 28)
    assert list(answer["tokens"]) == greedy(first + sampled + second, 8)
    counted = plain.counted(before)
    # The last sampled token and all new ones but the last: one is fed by the first decode step.
    assert counted == {"calls": 1, "rows": 1, "tokens_prefilled": 6, "tokens_decoded": 8}


def test_call_that_overlaps_what_is_held_computes_only_the_rest(plain):
    session, prompt = plain.name(), text(40)
    plain.generate(session, prompt[:30], count=0)
    before = plain.stats()
    answer = plain.generate(session, prompt, 0)
    assert list(answer["tokens"]) == greedy(prompt, 8)
    assert plain.counted(before)["tokens_prefilled"] == 10


def test_position_minus_one_means_at_the_end(plain):
    session, prompt = plain.name(), text(12)
    plain.generate(session, prompt[:5], -1, count=0)
    answer = plain.generate(session, prompt[5:], -1)
    assert list(answer["tokens"]) == greedy(prompt, 8)
    assert list(plain.generate(session, [], -1)["tokens"]) == greedy(prompt, 16)[8:]


def test_stop_token_ends_the_answer_and_is_included(plain):
    prompt = text(9)
    expected = greedy(prompt, 8)
    stop = expected[3]
    session = plain.name()
    answer = plain.generate(session, prompt, stop_tokens=[[stop, *[-1] * 7]])
    end = expected.index(stop) + 1
    assert list(answer["tokens"]) == expected[:end] + [-1] * (8 - end)
    assert (answer["count"], answer["finish"]) == (end, Finish.STOP)
    assert answer["position"] == 9 + end
    # What follows a stop token is a new turn, and it sees the stop token.
    turn = text(4, 5)
    after = plain.generate(session, turn, 9 + end)
    assert list(after["tokens"]) == greedy(prompt + expected[:end] + turn, 8)


def test_any_of_eight_stop_tokens_stops(plain):
    prompt = text(9)
    expected = greedy(prompt, 8)
    answer = plain.generate(plain.name(), prompt, stop_tokens=[[*[-1] * 7, expected[0]]])
    assert (answer["count"], answer["finish"]) == (1, Finish.STOP)


def test_stop_on_the_last_token_wanted_is_a_stop(plain):
    prompt = text(9)
    expected = greedy(prompt, 8)
    last = next(n for n in range(8) if expected[n] not in expected[:n] and n > 2)
    stops = [[expected[last], *[-1] * 7]]
    answer = plain.generate(plain.name(), prompt, count=last + 1, stop_tokens=stops)
    assert (answer["count"], answer["finish"]) == (last + 1, Finish.STOP)


def test_rows_stop_each_by_itself(plain):
    prompts = [text(9, 0), text(9, 1), text(9, 2)]
    texts = [greedy(prompt, 8) for prompt in prompts]
    stops = np.full([3, 8], -1)
    stops[1, 0] = texts[1][2]
    counts = [8, texts[1].index(texts[1][2]) + 1, 5]
    answer = plain.generate(
        [plain.name() for _ in prompts], prompts, stop_tokens=stops, max_new_tokens=[8, 8, 5]
    )
    assert list(answer["count"]) == counts
    assert list(answer["finish"]) == [Finish.LENGTH, Finish.STOP, Finish.LENGTH]
    for row in range(3):
        assert list(answer["tokens"][row][: counts[row]]) == texts[row][: counts[row]]


def test_artifact_stops_at_its_own_stop_tokens_by_default(plain):
    assert plain.artifact.manifest.stop_tokens == (STOP,)
    spec = plain.artifact.manifest.signatures["generate"].inputs["stop_tokens"]
    assert spec.default == [STOP, *[-1] * 7]


# --- the same call again -------------------------------------------------------------------


def assert_same(first: dict, second: dict) -> None:
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_every_call_may_be_repeated_and_changes_nothing(plain):
    """gRPC retries: a retry after a lost reply must not duplicate tokens."""
    session, prompt, turn = plain.name(), text(30, 1), text(5, 2)
    calls = [
        ("generate", prompt[:11], 0, {"max_new_tokens": 0}),
        ("generate", prompt[11:], 11, {"max_new_tokens": 8, "temperature": 1.0, "seed": 5}),
        ("generate", [], 38, {"max_new_tokens": 8, "temperature": 1.0, "seed": 5}),
        ("decode", turn, 46, {}),
        ("score", text(6, 3), 51, {}),
        ("generate", [], 57, {"max_new_tokens": 3}),
    ]
    for signature, tokens, position, inputs in calls:
        answers = [plain.call(signature, session, tokens, position, **inputs) for _ in range(3)]
        assert answers[0]["status"] == Status.OK
        for answer in answers[1:]:
            for name, value in answer.items():
                np.testing.assert_allclose(value, answers[0][name], atol=1e-5, err_msg=name)
    assert plain.generate(session, [], 60, count=0)["position"] == 60


def test_replay_is_answered_from_history_without_computing(plain):
    session, prompt = plain.name(), text(30)
    first = plain.generate(session, prompt)
    before = plain.stats()
    assert_same(first, plain.generate(session, prompt))
    assert plain.counted(before) == {"calls": 1, "rows": 1, "replays": 1}


def test_replay_returns_what_was_sampled_whatever_the_sampling_inputs(plain):
    session, prompt = plain.name(), text(30)
    first = plain.generate(session, prompt)
    again = plain.generate(session, prompt, temperature=2.0, seed=9, repetition_penalty=1.9)
    assert_same(first, again)


def test_replay_of_a_stopped_answer_stops_there_again(plain):
    session, prompt = plain.name(), text(9)
    stops = [[greedy(prompt, 8)[3], *[-1] * 7]]
    first = plain.generate(session, prompt, stop_tokens=stops)
    assert first["finish"] == Finish.STOP
    assert_same(first, plain.generate(session, prompt, stop_tokens=stops))
    assert_same(first, plain.generate(session, prompt))


def test_asking_for_more_than_was_sampled_samples_only_the_rest(plain):
    session, prompt = plain.name(), text(9)
    plain.generate(session, prompt, count=3)
    before = plain.stats()
    answer = plain.generate(session, prompt, count=8)
    assert list(answer["tokens"]) == greedy(prompt, 8)
    assert (answer["count"], answer["finish"], answer["position"]) == (8, Finish.LENGTH, 17)
    assert plain.counted(before)["tokens_decoded"] == 5


def test_asking_for_less_than_was_sampled_returns_that_much(plain):
    session, prompt = plain.name(), text(9)
    plain.generate(session, prompt, count=8)
    answer = plain.generate(session, prompt, count=3)
    assert list(answer["tokens"]) == greedy(prompt, 3) + [-1] * 5
    assert (answer["count"], answer["finish"], answer["position"]) == (3, Finish.LENGTH, 17)


def test_late_duplicate_returns_its_own_text_never_the_next_turn(plain):
    session, prompt, turn = plain.name(), text(9), text(4, 1)
    first = plain.generate(session, prompt)
    plain.generate(session, turn, 17)
    late = plain.generate(session, prompt)
    assert list(late["tokens"]) == list(first["tokens"])
    assert (late["count"], late["finish"]) == (8, Finish.LENGTH)
    assert late["position"] == 29


def test_sampling_where_a_given_token_stands_is_a_conflict(plain):
    session, prompt = plain.name(), text(9)
    plain.generate(session, prompt, count=0)
    answer = plain.generate(session, prompt[:4], count=8)
    assert (answer["status"], answer["detail"], answer["count"]) == (Status.CONFLICT, 4, 0)
    assert list(answer["tokens"]) == [-1] * 8
    assert plain.generate(session, prompt)["status"] == Status.OK


def test_prefix_of_a_session_is_confirmed_without_sampling(plain):
    session, prompt = plain.name(), text(9)
    plain.generate(session, prompt)
    answer = plain.generate(session, prompt[:4], count=0)
    assert (answer["status"], answer["position"]) == (Status.OK, 17)


def test_identical_rows_of_a_batch_share_an_answer_and_advance_once(plain):
    """TFS batching: padding copies a live row, and copies must not advance its session."""
    session, prompt = plain.name(), text(9)
    before = plain.stats()
    answer = plain.generate([session] * 4, [prompt] * 4)
    for row in range(4):
        assert list(answer["tokens"][row]) == greedy(prompt, 8)
    assert list(answer["position"]) == [17] * 4
    counted = plain.counted(before)
    assert (counted["rows"], counted["rows_padded"], counted["tokens_decoded"]) == (1, 3, 8)


def test_batch_of_three_is_padded_and_nothing_counts_twice(plain):
    """TFS batching, tensorflow/serving #276: three rows in, three rows out."""
    prompts = [text(5, seed) for seed in range(3)]
    names = [plain.name() for _ in prompts]
    before = plain.stats()
    answer = plain.generate(names, prompts, -1)
    assert answer["tokens"].shape == (3, 8)
    counted = plain.counted(before)
    assert (counted["rows"], counted["rows_padded"], counted["tokens_decoded"]) == (3, 1, 24)
    for name, prompt in zip(names, prompts, strict=True):
        assert plain.generate(name, [], -1, count=0)["position"] == 13
        assert list(plain.generate(name, [], 13)["tokens"]) == greedy(prompt, 16)[8:]


def test_what_stands_behind_length_is_nobodys_business(plain):
    """tensorflow/serving #1279, mlx-lm #439: length counts, padding is never read."""
    session, prompt = plain.name(), text(5)
    padded = np.array([prompt + [96] * 20])
    answer = plain.artifact.call(
        "generate", session_id=[session], tokens=padded, length=[5], position=[0]
    )
    plain.sessions.add(("", session))
    assert list(answer["tokens"][0]) == greedy(prompt, 8)
    again = plain.generate(session, prompt)
    assert list(again["tokens"]) == greedy(prompt, 8)


def test_prefill_past_the_batch_budget_is_finished_by_calling_again(plain):
    """At most 128 tokens a batch are prefilled; who comes last gets the rest next time."""
    prompts = [text(88, seed) for seed in range(500, 503)]  # in no other test: not found
    names = [plain.name() for _ in prompts]
    before = plain.stats()
    first = plain.generate(names, prompts)
    assert list(first["status"]) == [0, 0, 0]
    assert list(first["count"]) == [8, 0, 0]
    assert list(first["finish"]) == [Finish.LENGTH, Finish.NONE, Finish.NONE]
    assert plain.counted(before)["tokens_prefilled"] == 128
    assert list(first["position"]) == [96, 128 - 87 + 1, 1]
    second = plain.generate(names, prompts)
    third = plain.generate(names, prompts)
    for row, prompt in enumerate(prompts):
        assert list(third["tokens"][row]) == greedy(prompt, 8)
    assert list(second["count"]) == [8, 8, 0]
    assert plain.counted(before)["tokens_prefilled"] == 3 * 87


def test_a_long_prompt_waits_for_its_neighbours_piece_by_piece(fair):
    """Its neighbour is answered in every batch; alone, it takes all the budget."""
    long, short = tiny_model.text(200, 1), tiny_model.text(9, 2)
    names = [fair.name(), fair.name()]
    reached, said, position = 0, [], 0
    while reached < len(long):
        given, at = (short, 0) if not said else ([], len(short) + len(said))
        answer = fair.generate(names, [long[reached:], given], [reached, at], max_new_tokens=1)
        assert list(answer["status"]) == [0, 0]
        assert answer["count"][1] == 1, "the neighbour gets its token"
        said.append(int(answer["tokens"][1, 0]))
        position = int(answer["position"][0])
        done = answer["count"][0] == 1
        assert position - reached in (64, 65) or done
        reached = len(long) if done else position
    assert len(said) == 4  # 199 keys, 64 at a time
    assert said == greedy(short, 4)
    assert answer["tokens"][0, 0] == greedy(long, 1)[0]
    alone = fair.generate([fair.name()], [long], max_new_tokens=1)
    assert alone["count"][0] == 1


def test_int8_cache_answers_as_the_int8_reference_however_cut(int8):
    prompt = text(80)
    whole = int8.decode(int8.name(), prompt)
    expected = logits(prompt, stored=tiny_model.int8)[-1]
    np.testing.assert_allclose(whole["logits"], expected, atol=0.05)
    for cut in (7, 64):
        session = int8.name()
        feed(int8, session, prompt[:79], cut)
        cut_up = int8.decode(session, prompt[79:], 79)
        # As near to the reference as the whole is, and no nearer to that: a number halfway
        # between two codes may be rounded either way, which is why int8 is not chunk-invariant.
        np.testing.assert_allclose(cut_up["logits"], expected, atol=0.05)
        int8.close(session)


def test_int8_takes_a_third_of_the_bytes_or_less_for_wide_heads():
    from tfkv.layers.cache_spec import CacheSpec

    full, small = (
        CacheSpec.parse(f"dense+{codec}").bytes_per_token(2, 1, 64) for codec in ("float32", "int8")
    )
    assert small <= full / 3

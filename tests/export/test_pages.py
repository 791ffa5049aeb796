"""Pages: taken as needed, shared by prefix and by fork, and never lost."""

import numpy as np
import pytest
import tiny_model
from tiny_artifacts import Caller, feed

from tfkv.errors import Status


@pytest.fixture
def crowded(caller_of) -> Caller:
    """Eight slots over a pool of ten pages; two sessions a tenant."""
    return caller_of("crowded")


def _greedy(prompt, count=8):
    return tiny_model.greedy(prompt, count)


def test_a_session_holds_only_the_pages_that_it_uses(plain):
    name = plain.name()
    for tokens, pages in ((3, 1), (16, 1), (17, 2), (40, 3)):
        plain.close(name)
        feed(plain, name, tiny_model.text(tokens + 1, seed=tokens), 128)
        assert plain.stats()["pages_used"] == pages


def test_pages_that_a_stopped_generation_did_not_need_go_back(plain):
    prompt = tiny_model.text(15)
    expected = _greedy(prompt)
    answer = plain.generate(plain.name(), prompt, stop_tokens=[[expected[0]] + [-1] * 7])
    assert answer["count"] == 1
    assert plain.stats()["pages_used"] == 1


def test_a_prompt_that_was_seen_is_found_and_not_prefilled_again(plain):
    prompt = tiny_model.text(70, seed=91)
    first = plain.generate(plain.name(), prompt)
    before = plain.stats()
    again = plain.generate(plain.name(), prompt)
    counted = plain.counted(before)
    np.testing.assert_array_equal(first["tokens"], again["tokens"])
    assert counted["tokens_reused"] == 64
    assert counted["tokens_prefilled"] == 5
    assert counted["prefix_lookups"] == counted["prefix_hits"] == 4


def test_a_prompt_found_whole_is_answered_right(plain):
    prompt = tiny_model.text(64, seed=92)
    feed(plain, plain.name(), [*prompt, 1], 128)
    before = plain.stats()
    answer = plain.generate(plain.name(), prompt)
    assert plain.counted(before)["tokens_reused"] == 64
    assert "tokens_prefilled" not in plain.counted(before)
    assert answer["tokens"].tolist() == _greedy(prompt)


def test_pages_of_a_closed_session_are_found_until_they_are_needed(plain):
    prompt = tiny_model.text(49, seed=93)
    name = plain.name()
    plain.generate(name, prompt)
    plain.close(name)
    before = plain.stats()
    answer = plain.generate(plain.name(), prompt)
    assert plain.counted(before)["tokens_reused"] == 48
    assert answer["tokens"].tolist() == _greedy(prompt)


def test_prefixes_are_not_shared_across_tenants(plain):
    prompt = tiny_model.text(49, seed=94)
    plain.generate(plain.name(), prompt, tenant=["one"])
    before = plain.stats()
    answer = plain.generate(plain.name(), prompt, tenant=["two"])
    assert "tokens_reused" not in plain.counted(before)
    assert answer["tokens"].tolist() == _greedy(prompt)


def test_a_page_is_found_only_behind_the_same_parent(plain):
    page = tiny_model.text(16, seed=95)
    plain.generate(plain.name(), [*tiny_model.text(16, seed=96), *page, 1])
    other = [*tiny_model.text(16, seed=97), *page, 1]
    before = plain.stats()
    answer = plain.generate(plain.name(), other)
    assert "tokens_reused" not in plain.counted(before)
    assert answer["tokens"].tolist() == _greedy(other)


def test_sessions_with_a_shared_prompt_hold_its_pages_once(plain):
    prompt = tiny_model.text(64, seed=98)
    for _ in range(6):
        answer = plain.generate(plain.name(), prompt, count=3)
        assert answer["tokens"][:3].tolist() == _greedy(prompt, 3)
    stats = plain.stats()
    assert stats["pages_shared"] == 4
    assert stats["pages_used"] == 4 + 6


def test_a_batch_with_a_shared_prompt_answers_each_row_as_alone(plain):
    """Two rows share four pages, one shares two of these, one is a stranger."""
    prompt = tiny_model.text(64, seed=98)
    talks = [[*prompt, *tiny_model.text(3 + row, seed=200 + row)] for row in range(2)]
    talks += [[*prompt[:32], *tiny_model.text(20, seed=210)], tiny_model.text(40, seed=211)]
    feed(plain, plain.name(), [*prompt, 1], 128)
    names = [plain.name() for _ in talks]
    for name, talk in zip(names, talks, strict=True):
        feed(plain, name, talk, 128)
    assert plain.stats()["pages_shared"] == 4
    answers = plain.generate(names, [[]] * len(talks), [len(talk) for talk in talks])
    for tokens, talk in zip(answers["tokens"], talks, strict=True):
        assert tokens.tolist() == _greedy(talk)


def test_a_branch_goes_its_own_way_and_copies_only_the_page_it_writes(plain):
    prompt, turn = tiny_model.text(40, seed=99), tiny_model.text(5, seed=100)
    root, branch = plain.name(), plain.name()
    plain.generate(root, prompt, count=0)
    pages = plain.stats()["pages_used"]
    forked = plain.call("fork", root, (), -1, target=[branch])
    plain.sessions.add(("", branch))
    assert (forked["status"], forked["position"]) == (Status.OK, 40)
    assert plain.stats()["pages_used"] == pages
    other = plain.generate(branch, turn, 40)
    assert other["tokens"].tolist() == _greedy([*prompt, *turn])
    assert plain.generate(root, (), 40)["tokens"].tolist() == _greedy(prompt)
    assert plain.stats()["pages_shared"] == 2


def test_a_branch_from_the_middle_forgets_what_followed(plain):
    prompt = tiny_model.text(50, seed=101)
    root, branch = plain.name(), plain.name()
    plain.generate(root, prompt)
    plain.sessions.add(("", branch))
    assert plain.call("fork", root, (), 21, target=[branch])["position"] == 21
    assert plain.generate(branch, (), 21)["status"] == Status.OK
    turn = tiny_model.text(4, seed=102)
    plain.truncate(branch, 21)
    answer = plain.generate(branch, turn, 21)
    assert answer["tokens"].tolist() == _greedy([*prompt[:21], *turn])


def test_a_fork_can_be_repeated_and_refuses_another_conversation(plain):
    root, branch, stranger = plain.name(), plain.name(), plain.name()
    prompt = tiny_model.text(20, seed=103)
    plain.generate(root, prompt)
    plain.sessions.add(("", branch))
    for _ in range(2):
        answer = plain.call("fork", root, (), 20, target=[branch])
        assert (answer["status"], answer["position"]) == (Status.OK, 20)
    plain.generate(stranger, tiny_model.text(20, seed=104))
    answer = plain.call("fork", root, (), 20, target=[stranger])
    assert answer["status"] == Status.CONFLICT
    assert plain.call("fork", plain.name(), (), -1, target=["x"])["status"] == Status.UNKNOWN
    assert plain.call("fork", root, (), 99, target=["x"])["status"] == Status.GAP


def test_closing_the_root_leaves_its_branches_whole(plain):
    prompt = tiny_model.text(40, seed=105)
    root, branch = plain.name(), plain.name()
    plain.generate(root, prompt, count=0)
    plain.sessions.add(("", branch))
    plain.call("fork", root, (), -1, target=[branch])
    plain.close(root)
    assert plain.generate(branch, (), 40)["tokens"].tolist() == _greedy(prompt)


def test_a_full_pool_refuses_a_row_and_leaves_everyone_as_they_were(crowded):
    names = [crowded.name() for _ in range(3)]
    prompts = [tiny_model.text(70, seed=110 + i) for i in range(3)]
    answers = [
        crowded.generate(n, p, count=0, tenant=[n]) for n, p in zip(names, prompts, strict=True)
    ]
    assert [a["status"] for a in answers] == [Status.OK, Status.OK, Status.FULL]
    assert answers[2]["detail"] > 0
    assert crowded.stats()["slots_used"] == 2
    for name, prompt in zip(names[:2], prompts[:2], strict=True):
        answer = crowded.generate(name, (), 70, count=4, tenant=[name])
        assert answer["tokens"][:4].tolist() == _greedy(prompt, 4)
    crowded.close(names[0], tenant=[names[0]])
    answer = crowded.generate(names[2], prompts[2], count=4, tenant=[names[2]])
    assert answer["tokens"][:4].tolist() == _greedy(prompts[2], 4)


def test_cached_pages_make_way_the_longest_unused_first(crowded):
    prompts = [tiny_model.text(33, seed=120 + i) for i in range(6)]
    for prompt in prompts:
        name = crowded.name()
        crowded.generate(name, prompt, count=0)
        crowded.close(name)
    before = crowded.stats()
    assert before["evictions"] > 0
    name = crowded.name()
    crowded.generate(name, prompts[-1], count=0)
    assert crowded.counted(before)["tokens_reused"] == 32
    crowded.close(name)
    before = crowded.stats()
    answer = crowded.generate(crowded.name(), prompts[0], count=4)
    assert "tokens_reused" not in crowded.counted(before)
    assert answer["tokens"][:4].tolist() == _greedy(prompts[0], 4)


def test_a_tenant_beyond_its_quota_is_refused_and_others_are_not(crowded):
    prompt = tiny_model.text(5)
    for _ in range(2):
        assert crowded.generate(crowded.name(), prompt, tenant=["one"])["status"] == Status.OK
    refused = crowded.generate(crowded.name(), prompt, tenant=["one"])
    assert (refused["status"], refused["detail"]) == (Status.QUOTA, 2)
    assert crowded.generate(crowded.name(), prompt, tenant=["two"])["status"] == Status.OK


def test_a_branch_of_a_ring_reads_what_its_root_read(window):
    prompt = tiny_model.text(100, seed=130)
    root, branch = window.name(), window.name()
    feed(window, root, prompt, 128)
    window.sessions.add(("", branch))
    assert window.call("fork", root, (), -1, target=[branch])["status"] == Status.OK
    sees = tiny_model.window(20, 3)
    expected = tiny_model.greedy(prompt, 24, sees=sees)
    for name in (branch, root):
        said, at = [], 100
        for _ in range(3):
            answer = window.generate(name, (), at)
            said += answer["tokens"].tolist()
            at = int(answer["position"])
        assert said == expected


def test_full_rings_of_all_slots_go_on_where_no_page_is_free(window):
    """The pages of a ring are kept for others to find, until it needs them itself."""
    ring = 112  # a page of sinks, and 20 + 64 in whole pages
    sees = tiny_model.window(20, 3)
    prompts = [tiny_model.text(ring + 1, seed=150 + number) for number in range(3)]
    names = [window.name() for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        feed(window, name, prompt[:ring], 128)
    assert window.stats()["pages_free"] == 0
    for name, prompt in zip(names, prompts, strict=True):
        answer = window.generate(name, prompt[ring:], ring)
        assert answer["status"] == Status.OK
        assert answer["tokens"].tolist() == tiny_model.greedy(prompt, 8, sees=sees)
    # What was overwritten is not found any more.
    window.close(names[1])
    before = window.stats()
    again = window.generate(names[1], prompts[1])
    assert again["tokens"].tolist() == tiny_model.greedy(prompts[1], 8, sees=sees)
    assert window.counted(before).get("tokens_reused", 0) < ring
    assert window.stats()["integrity"] == 0


def test_a_ring_that_goes_back_to_its_first_round_finds_prompts_again(window):
    """It gives up the pages behind that place: what is found would be mapped over them."""
    root, branch = window.name(), window.name()
    prompt, other = tiny_model.text(120, seed=230), tiny_model.text(17, seed=231)
    feed(window, root, prompt[:97], 97)
    feed(window, branch, [*prompt[:96], *other], 113)
    window.generate(root, prompt[97:], 97, count=0)  # behind the first 112 tokens
    assert window.truncate(root, 96)["status"] == Status.OK
    before = window.stats()
    logits = window.decode(root, other, 96)["logits"]
    assert window.counted(before)["tokens_reused"] == 16
    assert window.stats()["integrity"] == 0
    wanted = tiny_model.logits([*prompt[:96], *other], tiny_model.window(20, 3))[-1]
    np.testing.assert_allclose(logits, wanted, atol=2e-3)


def test_a_refused_row_of_a_session_with_pages_leaves_the_table_sound(plain):
    name = plain.name()
    prompt = tiny_model.text(40, seed=140)
    plain.generate(name, prompt)
    assert plain.generate(name, [prompt[0] + 1], 0)["status"] == Status.CONFLICT
    assert plain.stats()["integrity"] == 0

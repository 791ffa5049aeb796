"""A load is run as it was asked for, and what it reports adds up."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from tfkv.cli import app
from tfkv.serving import Client, InputError, Load, run_load


def _prompts(server: Any) -> dict[bytes, list[int]]:
    """Tokens that each session brought, by its id."""
    found: dict[bytes, list[int]] = {}
    for signature, row in server.calls:
        if signature == "generate":
            given = row["tokens"][: row["length"]]
            found.setdefault(row["session_id"], []).extend(given.tolist())
    return found


def test_all_sessions_run_all_turns_and_leave_nothing_behind(server: Any, client: Client) -> None:
    report = run_load(
        client, Load(requests=6, concurrency=3, prompt_tokens=5, new_tokens=9, turns=2)
    )
    assert len(report.turns) == 12
    assert [turn.tokens for turn in report.turns] == [9] * 12
    assert report.tokens_per_second == pytest.approx(12 * 9 / report.seconds)
    assert not report.errors
    assert not server.sessions


def test_prompts_differ_but_for_what_is_shared(server: Any, client: Client) -> None:
    load = Load(requests=4, prompt_tokens=6, shared_tokens=7, new_tokens=1)
    run_load(client, load)
    prompts = list(_prompts(server).values())
    assert [len(prompt) for prompt in prompts] == [13] * 4
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert len({tuple(prompt[7:]) for prompt in prompts}) == 4


def test_the_same_seed_asks_the_same(server: Any, client: Client) -> None:
    asked = []
    for seed in (1, 1, 2):
        server.calls.clear()
        run_load(client, Load(requests=3, prompt_tokens=6, new_tokens=1, seed=seed))
        asked.append(sorted(_prompts(server).values()))
    assert asked[0] == asked[1] != asked[2]


def test_a_gap_is_shared_by_the_tokens_that_it_brought(client: Client) -> None:
    # The first token comes alone, the others four at a time.
    report = run_load(client, Load(requests=1, prompt_tokens=3, new_tokens=9))
    (turn,) = report.turns
    assert len(turn.gaps) == 8
    assert turn.gaps[0] == turn.gaps[3] and turn.gaps[4] == turn.gaps[7]
    assert turn.first + sum(turn.gaps) == pytest.approx(turn.last)


def test_no_more_sessions_run_at_a_time_than_asked(server: Any, client: Client) -> None:
    running: set[bytes] = set()
    most = 0
    plain = server.next_token

    def watched(history: Any, row: Any) -> int:
        nonlocal most
        running.update(name for _, name in server.sessions)
        most = max(most, len(server.sessions))
        time.sleep(0.002)
        return plain(history, row)

    server.next_token = watched
    run_load(client, Load(requests=9, concurrency=3, prompt_tokens=2, new_tokens=6))
    assert most == 3
    assert len(running) == 9


def test_an_open_loop_counts_from_when_a_session_was_due(server: Any, client: Client) -> None:
    """Calls of the toy server run one at a time: a fast rate makes the later ones wait."""
    plain = server.next_token

    def slow(history: Any, row: Any) -> int:
        time.sleep(0.005)
        return plain(history, row)

    server.next_token = slow
    report = run_load(client, Load(requests=8, rate=10_000.0, prompt_tokens=1, new_tokens=5))
    assert len(report.turns) == 8
    # All were due at once, so that the last one's time is that of the whole run.
    assert max(turn.last for turn in report.turns) >= 8 * 5 * 0.005


def test_a_session_that_fails_is_counted_and_the_others_go_on(server: Any, client: Client) -> None:
    server.limit = 40  # tokens that a session holds
    report = run_load(client, Load(requests=3, prompt_tokens=10, new_tokens=10, turns=3))
    assert len(report.turns) == 6
    (message,) = report.errors
    assert report.errors[message] == 3
    assert "OVERFLOW" in message


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"new_tokens": 0},
        {"shared_tokens": -1},
        {"rate": -1.0},
        {"rate": float("inf")},
    ],
)
def test_a_load_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Load(**wrong)


def test_the_command_prints_latencies_and_rates(server: Any) -> None:
    asked = ["bench", "--target", server.target, "--requests", "2", "--new-tokens", "9"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    for words in ("first token", "between tokens", "whole turn", "p99", "tokens/s"):
        assert words in shown.stdout
    facts = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert facts["turns"] == 2
    assert set(facts["latency_ms"]["first token"]) == {"p50", "p90", "p99", "max"}


def test_the_command_exits_with_2_where_a_session_failed(server: Any) -> None:
    server.limit = 12
    asked = ["bench", "--target", server.target, "--requests", "2", "--prompt-tokens", "20"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 2
    assert "2 sessions failed" in shown.stderr

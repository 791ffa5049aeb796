"""The client's branches on a real engine: fork, n-best sampling and beam search."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import tiny_model
from tiny_model import STOP

from tfkv.serving import Client, beam_search
from tfkv.serving.metrics_bridge import MetricsBridge
from tfkv.serving.server import Server

PROMPT = tiny_model.text(40, seed=400)
LETTERS = range(tiny_model.CONFIG.vocabulary_size)


@pytest.fixture(scope="module")
def client_of(exported: dict[str, pathlib.Path]) -> Iterator[Callable[[str], Client]]:
    """Clients of served artifacts, by name of `ENGINES`."""
    opened: dict[str, tuple[Server, Client]] = {}

    def make(name: str) -> Client:
        if name not in opened:
            directory = exported[name].parent
            server = Server(directory, port=0, rest_port=None, poll_seconds=0).start()
            opened[name] = server, Client(server.target, artifact=directory)
        return opened[name][1]

    yield make
    for server, client in opened.values():
        client.close()
        server.stop()


@pytest.fixture
def client(client_of: Callable[[str], Client]) -> Iterator[Client]:
    """A client that must leave nothing behind."""
    yield client_of("plain")
    stats = client_of("plain").stats()
    assert (stats["slots_used"], stats["pages_used"], stats["integrity"]) == (0, 0, 0)


def logprobs_of(tokens: Sequence[int]) -> list[float]:
    rows = tiny_model.log_softmax(tiny_model.logits([*PROMPT, *tokens]))
    return [float(rows[len(PROMPT) - 1 + at, token]) for at, token in enumerate(tokens)]


def textbook(width: int, longest: int) -> list[tuple[float, tuple[int, ...]]]:
    """Beam search by mean logprob, without branches."""
    live: list[tuple[int, ...]] = [()]
    ended: list[tuple[int, ...]] = []
    for _ in range(longest):
        longer: list[tuple[float, tuple[int, ...]]] = []
        for word in live:
            row = tiny_model.log_softmax(tiny_model.logits([*PROMPT, *word])[-1:])[0]
            total = math.fsum(logprobs_of(word)) if word else 0.0
            longer += [(total + float(row[letter]), (*word, letter)) for letter in LETTERS]
        longer.sort(reverse=True)
        ended += [word for _, word in longer if word[-1] == STOP]
        live = [word for _, word in longer if word[-1] != STOP][:width]
    scored = [(math.fsum(logprobs_of(word)) / len(word), word) for word in [*ended, *live]]
    return sorted(scored, reverse=True)[:width]


def test_branches_share_pages_and_go_on_alone(client: Client) -> None:
    with client.session() as session:
        first = list(session.generate(PROMPT, 8))
        with session.fork() as branch, session.fork(position=20) as early:
            assert client.stats()["pages_shared"] >= 2
            history = [*PROMPT, *first]
            for one, begin, turn in (
                (branch, history, [5, 6]),
                (session, history, [7]),
                (early, PROMPT[:20], [8]),
            ):
                assert list(one.generate(turn, 8)) == tiny_model.greedy([*begin, *turn], 8)


@pytest.mark.parametrize("n", [1, 5])
def test_continuations_are_those_of_single_runs(client: Client, n: int) -> None:
    alone = {}
    for seed in range(30, 30 + n):
        generation = client.generate(PROMPT, 12, temperature=1.0, seed=seed)
        alone[seed] = list(generation)
    with client.session() as session:
        before = client.stats()
        found = session.generate_n(n, PROMPT, 12, seed=30)
        assert {one.seed: one.tokens for one in found} == alone
        for one in found:
            assert one.logprobs == pytest.approx(logprobs_of(one.tokens), abs=1e-3)
        assert found == sorted(found, key=lambda one: -one.mean_logprob)
        stats = client.stats()
        assert stats["rows"] - before["rows"] <= 1 + 2 * n
        history = [*PROMPT, *found[0].tokens, 9]
        assert list(session.generate([9], 4)) == tiny_model.greedy(history, 4)


@pytest.mark.parametrize("width", [1, 3])
def test_beam_search_is_the_textbook(client: Client, width: int) -> None:
    with client.session() as session:
        found = beam_search(session, width, 6, 1.0, prompt=PROMPT)
    best = textbook(width, 6)
    assert [tuple(one.tokens) for one in found] == [word for _, word in best]
    assert [one.score for one in found] == pytest.approx([score for score, _ in best], abs=1e-3)


def test_a_branch_where_the_window_has_moved_on(client_of: Callable[[str], Client]) -> None:
    prompt = tiny_model.text(150, seed=401)
    with client_of("window").session() as session:
        list(session.generate(prompt, 4))
        with session.fork(position=30) as branch:
            sees = tiny_model.window(20, 3)
            assert list(branch.generate((), 4)) == tiny_model.greedy(prompt[:30], 4, sees)


def test_prometheus_page_of_an_engine(client: Client) -> None:
    page = MetricsBridge(client).render()
    assert "\ntfkv_up 1.0\n" in page
    assert "\ntfkv_slots 8.0\n" in page
    assert 'tfkv_tokens_total{kind="decoded"}' in page

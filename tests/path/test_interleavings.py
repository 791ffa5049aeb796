"""Two hundred random operations on the real model: each session as if it were alone."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfkv.errors import Status
from tfkv.export.verification import NEAR_TIE
from tfkv.serving import Client, SavedSession, Session

OPERATIONS = 200
MOST_TOKENS = 300


@dataclasses.dataclass
class Known:
    """A session, and what it must hold."""

    session: Session
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampled: list[int] = dataclasses.field(default_factory=list)  # positions
    last: dict[str, Any] = dataclasses.field(default_factory=dict)  # its last call
    answer: list[int] = dataclasses.field(default_factory=list)


class World:
    """Sessions of one server, moved on at random."""

    def __init__(self, client: Client, text: Sequence[int], slots: int) -> None:
        self.client, self.text, self.slots = client, text, slots
        self.dice = random.Random(11)
        self.open: list[Known] = []
        self.finished: list[tuple[list[int], list[int]]] = []

    def act(self) -> None:
        actions = [self.speak] * 5 + [self.speak_together] * 2
        actions += [self.repeat, self.fork, self.truncate, self.close, self.move, self.overfill]
        self.dice.choice(actions)()

    def pick(self) -> Known | None:
        return self.dice.choice(self.open) if self.open else None

    def piece(self) -> list[int]:
        # Few beginnings: many prompts begin as others do.
        start, length = self.dice.choice([0, 0, 64, 500]), self.dice.randint(1, 90)
        return list(self.text[start : start + length])

    def speak(self, known: Known | None = None) -> None:
        known = known or (self.pick() if self.dice.random() < 0.7 else None)
        if known is None or len(known.tokens) > MOST_TOKENS:
            if len(self.open) == self.slots:
                return
            known = Known(self.client.session())
            self.open.append(known)
        given, wanted = self.piece(), self.dice.randint(0, 16)
        start = len(known.tokens)
        if wanted:
            result = known.session.generate(given, wanted, stop_tokens=(), stream=False).result
            answer = list(result.tokens)
        else:
            known.session.logits(given)
            answer = []
        assert len(answer) == wanted
        known.last = {"tokens": given, "position": start, "max_new_tokens": wanted}
        known.answer = answer
        known.tokens += given
        known.sampled += range(len(known.tokens), len(known.tokens) + wanted)
        known.tokens += answer

    def speak_together(self) -> None:
        """Several at once: the server makes batches of them, and pads those."""
        some = self.dice.sample(self.open, min(3, len(self.open)))
        some = [known for known in some if len(known.tokens) <= MOST_TOKENS]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(self.speak, known) for known in some]:
                done.result()

    def repeat(self) -> None:
        """A late duplicate of a session's last call, and a copy of it in the same batch."""
        known = self.pick()
        if known is None or not known.last:
            return
        row = {"session_id": known.session.session_id, "stop_tokens": [-1] * 8, **known.last}
        for answer in self.client.call("generate", [row, row]):
            assert answer["status"] == Status.OK
            assert list(answer["tokens"][: answer["count"]]) == known.answer
            assert answer["position"] == len(known.tokens)

    def fork(self) -> None:
        known = self.pick()
        if known is None or len(self.open) == self.slots:
            return
        at = self.dice.randint(1, len(known.tokens))
        branch = Known(known.session.fork(position=at), known.tokens[:at])
        branch.sampled = [place for place in known.sampled if place < at]
        self.open.append(branch)

    def truncate(self) -> None:
        known = self.pick()
        if known is None:
            return
        self.finished.append((list(known.tokens), list(known.sampled)))
        at = self.dice.randint(1, len(known.tokens))
        known.session.truncate(at)
        known.tokens = known.tokens[:at]
        known.sampled = [place for place in known.sampled if place < at]
        known.last = {}

    def close(self, known: Known | None = None) -> None:
        known = known or self.pick()
        if known is None:
            return
        known.session.close()
        self.open.remove(known)
        self.finished.append((known.tokens, known.sampled))

    def move(self) -> None:
        """Out of the graph as bytes, and back under the same name."""
        known = self.pick()
        if known is None:
            return
        name = known.session.session_id
        saved = SavedSession.read(self.client, name)
        assert saved.held == len(known.tokens)
        self.client.call("close", [{"session_id": name}])
        saved.restore(self.client)

    def overfill(self) -> None:
        """No slot is left: the row is refused, and nobody loses one."""
        if len(self.open) < self.slots:
            return
        row = {"session_id": "one-too-many", "tokens": [5], "position": 0, "max_new_tokens": 1}
        assert self.client.call("generate", [row])[0]["status"] == Status.FULL


def test_sessions_of_the_real_model_are_as_if_each_were_alone(
    client: Client,
    real_text: list[int],
    oracle_logits: Callable[[Sequence[int]], np.ndarray],
    record_property: Callable[[str, object], None],
):
    """keras-nlp, without a cache, must have chosen every token that was ever sampled."""
    world = World(client, real_text, client.stats()["slots"])
    for _ in range(OPERATIONS):
        world.act()
        assert client.stats()["integrity"] == 0
    while world.open:
        world.close(world.open[0])
    assert client.stats()["pages_used"] == 0
    record_property("real_operations", OPERATIONS)

    longest = max(len(tokens) for tokens, _ in world.finished)
    checked = 0
    for tokens, sampled in world.finished:
        if not sampled:
            continue
        # One width, one trace; what stands behind a text does not change it.
        logits = oracle_logits([*tokens, *[0] * (longest - len(tokens))])
        before = logits[np.array(sampled) - 1]
        behind = before.max(axis=-1) - before[np.arange(len(sampled)), np.array(tokens)[sampled]]
        # A near tie of either side: both round differently.
        assert (behind <= 2 * NEAR_TIE).all(), (tokens, np.array(sampled)[behind > 2 * NEAR_TIE])
        checked += len(sampled)
    assert checked > 5 * len(world.finished)

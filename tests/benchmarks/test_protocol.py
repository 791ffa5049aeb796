from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator

import pytest

from benchmarks.peers import child
from benchmarks.peers.protocol import Answers, Case, Job, Timing

CASES = [
    Case([[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [1, 1, 1]]),
    Case([[1] * 9], [[2] * 9]),
    Case([[1] * 2], [[2] * 2]),
]
JOB = Job("weights", {"cache": "f32"}, threads=2, steps=6, cases=CASES)
TIMING = Timing(0.5, 2.0, 8, 6, [[1, 2], [3, 4]])


def test_a_job_is_read_as_it_was_written() -> None:
    assert Job.read(JOB.write()) == JOB
    assert "\n" not in JOB.write()


def test_a_job_knows_what_room_its_cases_need() -> None:
    assert (JOB.longest, JOB.most_rows) == (9 + 6 + 1, 2)
    assert (CASES[0].context, CASES[0].rows) == (3, 2)


def line(kind: str, **data: object) -> str:
    return json.dumps({"kind": kind, **data})


def test_answers_of_a_child_that_ended_early_go_as_far_as_it_came() -> None:
    answers = Answers.read([line("loaded", seconds=2.5, about={"torch": "2"})])
    assert (answers.load_seconds, answers.about) == (2.5, {"torch": "2"})
    assert (answers.cases, answers.peak_mb) == ([], 0.0)


@pytest.mark.parametrize("text", ["llama_model_loader: loaded", "[1]", '{"kind": "other"}', "{}"])
def test_a_line_that_is_no_answer_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="JSON of kind loaded, case or end") as error:
        Answers.read([text])
    assert text in str(error.value)


class Fake:
    """Says what it is asked to run; refuses long prompts."""

    about = {"version": "1"}
    pid = "self"

    def __init__(self, compiles: bool) -> None:
        self.compiles = compiles
        self.seen: list[tuple[int, int, int]] = []

    def run(self, prompts: list[list[int]], steps: int) -> Timing:
        self.seen.append((len(prompts[0]), len(prompts), steps))
        if len(prompts[0]) > 5:
            raise child.NotRun("too long")
        return TIMING


def serve(system: Fake, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> Answers:
    """What a child that runs `JOB` answers, with its standard output as it finds it."""

    @contextlib.contextmanager
    def open_system(job: Job) -> Iterator[Fake]:
        assert job == JOB
        os.write(1, b"a library says hello\n")
        yield system

    monkeypatch.setattr(sys, "stdin", io.StringIO(JOB.write()))
    kept = os.dup(1)
    try:
        child.serve(open_system)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    captured = capfd.readouterr()
    assert "hello" in captured.err
    return Answers.read(captured.out.splitlines())


def test_a_child_answers_each_case_and_says_why_one_was_not_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    answers = serve(Fake(compiles=False), monkeypatch, capfd)
    ran, refused, _ = answers.cases
    assert (ran.context, ran.rows, ran.timing) == (3, 2, TIMING)
    assert (refused.timing, refused.reason) == (None, "too long")
    assert answers.about == {"version": "1"}
    assert answers.peak_mb > 1


@pytest.mark.parametrize(
    ("compiles", "expected"),
    [
        (True, [(3, 2, 6), (3, 2, 6), (9, 1, 6), (2, 1, 6), (2, 1, 6)]),
        (False, [(3, 2, 4), (3, 2, 6), (9, 1, 6), (2, 1, 6)]),
    ],
)
def test_who_compiles_warms_up_with_each_shape_and_others_once(
    compiles: bool,
    expected: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    system = Fake(compiles)
    serve(system, monkeypatch, capfd)
    assert system.seen == expected

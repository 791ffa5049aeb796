from __future__ import annotations

import io
import json
import pathlib

import pytest
from rich.console import Console

from benchmarks import figures
from benchmarks.bars import Bar, Measurement, read_bars
from benchmarks.registry import MODULES, Measure, Say, measures, measures_of

BARS = [
    Bar("demo.exact", "= 640", "tokens", "demo"),
    Bar("demo.memory", "<= 2*weights", "MB", "demo"),
    Bar("demo.speed", ">= 2", "ratio", "demo"),
    Bar("demo.gain", "report", "metric", "demo"),
    Bar("demo.loss", "<= 1e-3", "nats", "demo"),
]


@measures("demo.exact", "demo.memory")
def both(say: Say) -> dict[str, float | Measurement]:
    say("measuring")
    return {"demo.exact": 640, "demo.memory": Measurement(1100.5, {"weights": 500}, "why")}


@measures("demo.speed")
def broken(say: Say) -> dict[str, float | Measurement]:
    raise RuntimeError("no clock")


@measures("demo.loss")
def sound(say: Say) -> dict[str, float | Measurement]:
    return {"demo.loss": 5e-4}


@measures("demo.gain")
def silent(say: Say) -> dict[str, float | Measurement]:
    return {}


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_value_that_is_no_number_falls_short_and_breaks_no_table() -> None:
    lines = figures.table(BARS[:1], {"demo.exact": Measurement(float("nan"), note="no clock")})
    assert lines == ["demo.exact  nan  tokens  = 640  FALLS SHORT  (no clock)"]


def test_table_has_a_line_for_each_figure() -> None:
    lines = figures.table(BARS, figures.run_measures([both], console()))
    assert [line.split()[:3] for line in lines] == [
        ["demo.exact", "640", "tokens"],
        ["demo.memory", "1100", "MB"],
        ["demo.speed", "missing", "ratio"],
        ["demo.gain", "missing", "metric"],
        ["demo.loss", "missing", "nats"],
    ]
    assert lines[0].split()[3:] == ["=", "640", "holds"]
    assert lines[1].endswith("<= 2*weights = 1000  FALLS SHORT  (why)")
    assert [line.endswith("FALLS SHORT") for line in lines[2:]] == [True, True, True]


def test_a_failing_measurement_is_told_and_leaves_the_others() -> None:
    screen = console()
    found = figures.run_measures([broken, both, silent], screen)
    assert set(found) == {"demo.exact", "demo.memory"}
    assert "demo.speed could not be measured" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert "no clock" in screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Measure]]:
    registered = {"demo": [both, broken, silent, sound]}
    monkeypatch.setattr(figures, "read_bars", lambda: BARS)
    monkeypatch.setattr(figures, "measures_of", lambda issue: registered.get(issue, []))
    monkeypatch.setattr(figures.terminal, "load_tensorflow", lambda: None)
    return registered


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize(
    ("arguments", "code", "lines"),
    [
        (["demo"], 1, 5),
        ([], 1, 5),
        (["demo", "--only", "exact"], 1, 2),
        (["demo", "--only", "demo.exact", "--only", "memory"], 1, 2),
        (["--only", "gain"], 1, 1),
        (["--only", "loss"], 0, 1),
        (["unheard"], 2, 0),
    ],
)
def test_exit_code_is_1_if_any_falls_short(
    arguments: list[str], code: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main(arguments) == code
    assert len(capsys.readouterr().out.splitlines()) == lines


@pytest.mark.usefixtures("demo")
def test_json(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "figures.json"
    figures.main(["demo", "--json", str(path)])
    data = {item["name"]: item for item in json.loads(path.read_text())}
    assert data["demo.exact"]["verdict"] == "holds"
    assert data["demo.memory"]["limit"] == 1000
    assert data["demo.speed"]["value"] is None


#: Issues that are done; of others, what is not measured yet is printed as missing.
DONE = {"path", "engine"}


@pytest.mark.parametrize("issue", MODULES)
def test_every_figure_of_an_issue_is_measured_once(issue: str) -> None:
    names = [name for measure in measures_of(issue) for name in measure.names]
    bars = [bar.name for bar in read_bars() if bar.issue == issue]
    assert len(names) == len(set(names))
    assert set(names) <= set(bars)
    if issue in DONE:
        assert sorted(names) == sorted(bars)


def test_an_issue_without_a_module_measures_nothing() -> None:
    assert measures_of("unheard") == []

from __future__ import annotations

import math
import pathlib

import pytest

from benchmarks.bars import Bar, Measurement, as_json, evaluate, read_bars


def bar(text: str) -> Bar:
    return Bar("issue.figure", text, "unit", "issue")


@pytest.mark.parametrize(
    ("text", "value", "verdict"),
    [
        ("<= 1e-3", 1e-3, "holds"),
        ("<= 1e-3", 1.1e-3, "FALLS SHORT"),
        (">= 98", 98.0, "holds"),
        (">= 98", 97.9, "FALLS SHORT"),
        ("= 640", 640, "holds"),
        ("= 640", 639, "FALLS SHORT"),
        ("= 0", 0, "holds"),
        ("report", 5.0, "report"),
        ("<= 1", math.nan, "FALLS SHORT"),
        (">= 1", math.inf, "FALLS SHORT"),
        ("report", math.nan, "FALLS SHORT"),
    ],
)
def test_verdict(text: str, value: float, verdict: str) -> None:
    assert bar(text).verdict(Measurement(value)) == verdict


@pytest.mark.parametrize("text", ["<= 1", "= 0", "report"])
def test_a_missing_value_counts_as_short(text: str) -> None:
    assert bar(text).verdict(None) == "FALLS SHORT"


def test_a_bar_speaks_of_measured_values() -> None:
    resident = bar("<= 1.3*weights+pool+700")
    names = {"weights": 538.0, "pool": 400.0}
    assert resident.limit(names) == pytest.approx(1799.4)
    assert resident.verdict(Measurement(1799.0, names)) == "holds"
    assert resident.verdict(Measurement(1800.0, names)) == "FALLS SHORT"


def test_a_name_without_a_value_counts_as_short() -> None:
    assert bar("<= C-1+suffix").verdict(Measurement(0, {"C": 64})) == "FALLS SHORT"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1e-3", 1e-3),
        ("ceil(1024/C)+private", 20.0),
        ("C-1+private", 66.0),
        ("-(C - 1) / 3", -21.0),
        ("floor(private/2)", 1.0),
    ],
)
def test_evaluate(expression: str, value: float) -> None:
    names = {"C": 64.0, "private": 3.0}
    expected = 19.0 if expression.startswith("ceil") else value
    assert evaluate(expression, names) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    ["", "640", "< 1", "<=", "<= 1 +", "<= x.y", "<= open('f')", "<= 2**9", "<= 'a'", "<= ceil"],
)
def test_what_is_not_a_bar_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        limit = bar(text).limit({})
        if limit is None:
            raise KeyError(text)


def test_every_bar_of_the_file_can_be_read() -> None:
    bars = read_bars()
    assert len(bars) > 30
    assert {"path", "engine", "caches", "fast"} <= {bar.issue for bar in bars}
    assert all(bar.name.startswith(f"{bar.issue}.") and bar.unit for bar in bars)


def test_two_bars_of_one_name_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "figures.tsv"
    path.write_text("name\tbar\tunit\tissue\thow\na.b\t= 0\tx\ta\t\na.b\t= 1\tx\ta\t\n")
    with pytest.raises(ValueError, match=r"'a\.b' has two bars"):
        read_bars(path)


def test_as_json_keeps_what_the_bar_needed() -> None:
    data = as_json(bar("<= 2*x"), Measurement(3.0, {"x": 2.0}, "note"))
    assert (data["value"], data["limit"], data["verdict"]) == (3.0, 4.0, "holds")
    assert data["names"] == {"x": 2.0}
    assert as_json(bar("<= 2"), None)["value"] is None

from __future__ import annotations

import xml.etree.ElementTree

import pytest

from benchmarks.families import _HOLDS, count


def _report(*tests: tuple[str, str, str, bool]) -> xml.etree.ElementTree.Element:
    """A report of tests: name, case, family, whether it passed."""
    root = xml.etree.ElementTree.Element("testsuite")
    for name, case, family, passed in tests:
        test = xml.etree.ElementTree.SubElement(root, "testcase", name=f"{name}[{case}]")
        if passed:
            properties = xml.etree.ElementTree.SubElement(test, "properties")
            xml.etree.ElementTree.SubElement(properties, "property", name="family", value=family)
        else:
            xml.etree.ElementTree.SubElement(test, "failure")
    return root


def _all(case: str, family: str) -> list[tuple[str, str, str, bool]]:
    return [(name, case, family, True) for name in _HOLDS]


def test_a_family_counts_where_all_three_hold_in_all_cases() -> None:
    assert count(_report(*_all("gemma_1", "Gemma"), *_all("gemma_2", "Gemma"))).value == 1
    assert count(_report(*_all("opt", "OPT"), *_all("bloom", "Bloom"))).value == 2


@pytest.mark.parametrize("missing", range(3))
def test_one_that_failed_or_was_not_run_does_not_count(missing: int) -> None:
    tests = _all("gemma_1", "Gemma") + _all("gemma_2", "Gemma")
    name, case, family, _ = tests[missing]
    assert count(_report(*tests[:missing], *tests[missing + 1 :])).value == 0
    failed = (name, case, family, False)
    assert count(_report(*tests[:missing], failed, *tests[missing + 1 :])).value == 0


def test_what_was_not_promised_is_named_beside() -> None:
    found = count(_report(*_all("qwen_3_moe", "Qwen 3 MoE"), *_all("opt", "OPT")))
    assert (found.value, "Qwen 3 MoE" in found.note) == (1, True)

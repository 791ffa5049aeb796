"""Figures of the families of models."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections import defaultdict

from benchmarks.bars import Measurement
from benchmarks.registry import Measured, Say, measures

ROOT = pathlib.Path(__file__).resolve().parent.parent
_TESTS = "tests/export/importers/test_families.py"
#: What must hold of a family, each in all of its cases.
_HOLDS = (
    "test_logits_are_those_of_keras_nlp",
    "test_cached_decoding_equals_one_pass_of_keras_nlp",
    "test_an_artifact_says_what_keras_nlp_says",
)
#: Comes with Qwen MoE and is not one of those promised.
_BESIDE = ("Qwen 3 MoE",)


@measures("keras.families")
def families(say: Say) -> Measured:
    """Families for which all three hold, with all of their options on."""
    say("a tiny random model of each family, against keras-nlp: some minutes")
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        wanted = " or ".join(_HOLDS)
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", _TESTS]
        command += ["-k", wanted]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not report.exists():
            return {"keras.families": Measurement(float("nan"), note=done.stdout[-300:])}
        tree = xml.etree.ElementTree.parse(report)
    return {"keras.families": count(tree.getroot())}


def count(report: xml.etree.ElementTree.Element) -> Measurement:
    """What a report of those tests says.

    Args:
        report: JUnit's.
    """
    held, failed, gap = defaultdict(set), set(), 0.0
    for test in report.iter("testcase"):
        name, _, case = test.attrib["name"].rstrip("]").partition("[")
        properties = {p.attrib["name"]: p.attrib["value"] for p in test.iter("property")}
        if name not in _HOLDS:
            continue
        if "family" not in properties or test.find("failure") is not None:
            failed.add(case)
            continue
        held[properties["family"]].add((case, name))
        gap = max(gap, float(properties.get("logit_gap", 0.0)))
    whole = [
        family
        for family, found in held.items()
        if {(case, name) for case, _ in found for name in _HOLDS} == found
        and not {case for case, _ in found} & failed
    ]
    value = sum(family not in _BESIDE for family in whole)
    beside = [family for family in whole if family in _BESIDE]
    note = f"largest logit difference {gap:.1e}; beside them: {', '.join(beside) or 'none'}"
    return Measurement(value, note=note)

"""The page about pictures names what there is, and its snippets run; on a tiny model."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

from tfkv import viz
from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig

CONFIG = DecoderConfig(64, 2, 32, 4, 2, 8, 48, context_length=64)


class Source:
    """In place of the model that the first snippet loads."""

    config = CONFIG
    weights = CausalLM(CONFIG).export_weights()


@pytest.fixture(scope="module")
def page() -> str:
    root = pathlib.Path(__file__).resolve().parents[2]
    return (root / "docs" / "pictures.md").read_text(encoding="utf-8")


def test_page_names_every_function(page):
    named = set(re.findall(r"`(\w+)`", page))
    assert set(viz.__all__) - named == {"QualityPoint", "CallTokens", "Span", "Timeline"} - named
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert rows and set(rows) <= set(viz.__all__)


def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *others = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert 'load("smollm2")' in first
    names = {
        "source": Source,
        "ids": np.arange(20).tolist(),
        "tokens": [f" {number}" for number in range(20)],
    }
    for snippet in others:
        exec(snippet, names)
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {
        "head.png",
        "sinks.svg",
        "attention.html",
        "text.html",
        "retention.png",
        "memory.png",
    }

"""Makes a calibration of a model: `tfkv calibrate`."""

from __future__ import annotations

import pathlib
from typing import Any

from tfkv import sample_text
from tfkv.cache_report import Progress
from tfkv.calibration import Calibration, calibrate
from tfkv.export import model_text
from tfkv.export.importers import load
from tfkv.prefix_compression import REPEAT


def calibrate_model(
    source: Any,
    out: str | pathlib.Path,
    text: str | None = None,
    tokens: int = 2048,
    passages: int = 4,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Reads text through a model and writes which of its heads look far, and the moments of its
    queries, keys and values.

    Policies that share their budget out between heads need it: ``caps`` of their cache strings
    names one of its tables. So do the codecs ``block_gtq`` and ``low_rank``.

    Args:
        source: As of `tfkv.export.export`; it needs a tokenizer.
        out: File to write, JSON.
        text: What to read, of the kind that will be served; Python's language reference where
            left out.
        tokens: Of a passage.
        passages: How many, spread evenly over the text.
        progress: Called with ``"passages"``, those done and all of them.

    Raises:
        ConfigError: A number is out of range, or the text is too short.
        ModelSourceError: The source cannot be read.
    """
    model = load(source)
    whole = sample_text.language_reference() if text is None else text
    read = model_text.passages(model, model_text.encode(model, whole), passages, tokens)
    repeat = model_text.encode(model, REPEAT).tolist()
    made = calibrate(model.config, model.weights, read, repeat, progress)
    made.save(out)
    return made

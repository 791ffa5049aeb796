"""Which pages a decode step reads: ``python -m benchmarks.selection``.

2048 tokens are read as a prompt, the next 256 one at a time, on the pages of an engine; KL from
reading everything, nats. All policies read as many tokens: so many pages, of which the two newest
are always among them, in all layers but the first two.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks import texts
from tfkv.config import EngineConfig
from tfkv.evaluation import compare_logits, read_on
from tfkv.export import Engine
from tfkv.export.engine_reader import EngineReader

_READ, _LATER = 2048, 256
#: Tokens of a page, and tokens that are read: a quarter and an eighth.
_SIZES = ((16, 512), (16, 256), (64, 512))
_POLICIES = ("quest", "recent_pages", "random_pages")


def _reader(cache: str, page_size: int) -> EngineReader:
    engine = EngineConfig(
        cache=cache, slots=1, capacity=_READ + _LATER, page_size=page_size, batch_sizes=(1,)
    )
    model = texts.model()
    return EngineReader(Engine(model.config, model.weights, engine))


def _later_logits(reader: EngineReader, passage: np.ndarray) -> np.ndarray:
    """Logits after each of the last tokens of a passage."""
    reader.start()
    read_on(reader, passage[:_READ], 0, prompt=True)
    rows = range(_READ, _READ + _LATER)
    return np.concatenate([reader.read(passage[at : at + 1], at).numpy() for at in rows])


def main() -> None:
    """Prints a line for each policy and size as soon as it is measured; all, or those named."""
    asked = sys.argv[1:] or _POLICIES
    passages = texts.passages(4, _READ + _LATER)
    full = _reader("dense", 64)
    expected = [_later_logits(full, passage) for passage in passages]
    nothing = np.full([_LATER], -1)
    for size, tokens in _SIZES:
        for policy in asked:
            cache = f"{policy}(pages={tokens // size - 2},page_size={size})"
            reader = _reader(cache, size)
            both = zip(expected, (_later_logits(reader, one) for one in passages), strict=True)
            found = [compare_logits(*pair, nothing)[:2] for pair in both]
            gap, same = (float(np.mean(field)) for field in zip(*found, strict=True))
            print(f"{gap:.5f}  {100 * same:.1f} % same top  {cache}", flush=True)


if __name__ == "__main__":
    main()

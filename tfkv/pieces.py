"""A text in pieces of one width, which one compiled function reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def padded_pieces(
    tokens: Sequence[int] | np.ndarray, width: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Where each piece of ``tokens [S]`` begins, and its tokens, int32 ``[width]``; the last one
    is filled up with −1."""
    ids = np.asarray(tokens, np.int32)
    for first in range(0, ids.size, width):
        row = np.full([width], -1, np.int32)
        given = ids[first : first + width]
        row[: given.size] = given
        yield first, row

"""Eviction by score written anew in NumPy, float64, from the papers: one session of one layer,
its KV heads as plain lists of tokens.

Nothing of tfkv is used here, so that a mistake there cannot hide here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import reference


@dataclasses.dataclass
class Head:
    """One KV head: what it stores, and what the queries of its group were.

    Args:
        positions: Of the tokens stored, ascending.
        keys: ``[S, H]``, rotated, as they are read.
        values: ``[S, H]``.
        mass: Attention that each token got, added up, or the highest.
        queries: Of the whole text so far, ``[T, G, H]``, rotated, times 1/√H.
        raw: Likewise, before rotation.
        outputs: ``[G, H, D]``, rows of the output projection.
        base: RoPE base.
    """

    positions: list[int]
    keys: np.ndarray
    values: np.ndarray
    mass: np.ndarray
    queries: np.ndarray
    raw: np.ndarray
    outputs: np.ndarray
    base: float

    def attention(self, window: int) -> np.ndarray:
        """Of the newest queries over what is stored, ``[W, G, S]``."""
        end = len(self.queries)
        rows = []
        for t in range(max(end - window, 0), end):
            scores = self.queries[t] @ self.keys.T
            scores[:, np.array(self.positions) > t] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            rows.append(weights / weights.sum(axis=-1, keepdims=True))
        return np.array(rows)

    def norms(self) -> np.ndarray:
        """Mean over the group of ``‖W_o v‖₁``, ``[S]``."""
        return np.mean([np.abs(self.values @ out).sum(axis=-1) for out in self.outputs], axis=0)


def mean_pool(x: np.ndarray, width: int) -> np.ndarray:
    """Mean over neighbours along the last axis; zeros beyond the edges."""
    return np.apply_along_axis(lambda r: np.convolve(r, np.ones(width) / width, "same"), -1, x)


def max_pool(x: np.ndarray, width: int) -> np.ndarray:
    half = width // 2
    span = range(x.shape[-1])
    return np.stack([x[..., max(i - half, 0) : i + half + 1].max(axis=-1) for i in span], axis=-1)


def h2o(head: Head, normalize: bool = True) -> np.ndarray:
    seen_by = len(head.queries) - np.array(head.positions)
    return head.mass / seen_by if normalize else head.mass


def kvzip(head: Head) -> np.ndarray:
    return head.mass


def snapkv(head: Head, window: int, width: int = 5) -> np.ndarray:
    return mean_pool(head.attention(window).mean(axis=(0, 1)), width)


def snapkv_max(head: Head, window: int, width: int = 7) -> np.ndarray:
    return max_pool(head.attention(window).mean(axis=(0, 1)), width)


def critical(head: Head, window: int, budget: int) -> np.ndarray:
    """Half of the budget by votes, then votes times norms."""
    votes = snapkv(head, window)
    old = np.array(head.positions) < len(head.queries) - window
    first = np.argsort(-np.where(old, votes, -1), kind="stable")[: (budget - window) // 2]
    scores = (votes + 1e-4) * head.norms()
    scores[first] += 1e6
    return scores


def defensive(head: Head, window: int) -> np.ndarray:
    weights = mean_pool(head.attention(window), 5)
    weights /= weights.sum(axis=-1, keepdims=True)
    worst = weights.max(axis=(0, 1))
    return np.maximum(worst, worst.mean()) * head.norms()


def expected(head: Head, window: int, future: int) -> np.ndarray:
    raw = head.raw[-window:]
    mean = raw.mean(axis=0)
    size, end = raw.shape[-1], len(head.raw)
    turns = [rotation(end + ahead, size, head.base) for ahead in range(future)]
    turn = np.mean(turns, axis=0)
    scores = []
    for g in range(raw.shape[1]):
        centred = raw[:, g] - mean[g]
        covariance = turn @ (centred.T @ centred / len(raw)) @ turn.T
        score = head.keys @ (turn @ mean[g])
        score = score + np.einsum("sh,hi,si->s", head.keys, covariance, head.keys) / 2
        weights = np.exp(score - score.max())
        scores.append(weights / weights.sum())
    return np.mean(scores, axis=0) * np.linalg.norm(head.values, axis=-1)


def rotation(position: int, size: int, base: float) -> np.ndarray:
    """The matrix that RoPE multiplies a column by."""
    return reference.rope(np.eye(size)[:, None], np.full(size, position), base)[:, 0].T


def key_diff(head: Head) -> np.ndarray:
    unit = head.keys / np.linalg.norm(head.keys, axis=-1, keepdims=True)
    anchor = unit.mean(axis=0)
    return -(unit @ anchor) / np.linalg.norm(anchor)


def knorm(head: Head) -> np.ndarray:
    return -np.linalg.norm(head.keys, axis=-1)


def session(
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    cuts: list[int],
    score: Callable[[Head], np.ndarray],
    budgets: list[int],
    room: int,
    sinks: int,
    recent: int,
    base: float,
    codec: str = "float32",
    highest: bool = False,
    together: bool = False,
) -> tuple[np.ndarray, list[list[int]]]:
    """Reads ``x [T, D]`` chunk by chunk.

    Args:
        x: The text.
        weights: As for `reference.attention`.
        cuts: Widths of the chunks.
        score: What a token is worth to a head.
        budgets: Tokens of each KV head after an eviction.
        room: Tokens that fit beside them.
        sinks: First tokens that stay.
        recent: Newest tokens that stay.
        base: RoPE base.
        codec: How keys and values are written.
        highest: Whether mass is the highest attention instead of the sum.
        together: Whether heads keep the same tokens, by their mean score.

    Returns:
        Outputs ``[T, D]``, and the positions that each KV head stores at the end.
    """
    x = x.astype(np.float64)
    steps = np.arange(len(x))
    raw, keys, values = (
        np.einsum("td,dnh->tnh", x, weights[name].astype(np.float64))
        for name in ("query", "key", "value")
    )
    size = raw.shape[-1]
    raw = raw / np.sqrt(size)
    queries, keys = reference.rope(raw, steps, base), reference.rope(keys, steps, base)
    keys, values = reference.stored(keys, codec), reference.stored(values, codec, "values")
    group, count = raw.shape[1] // keys.shape[1], keys.shape[1]
    stored: list[list[int]] = [[] for _ in range(count)]
    mass = [np.zeros(len(x)) for _ in range(count)]
    mixed, start = np.zeros_like(raw), 0

    def head_of(k: int, end: int) -> Head:
        own, rows = stored[k], slice(k * group, (k + 1) * group)
        output = weights["output"].astype(np.float64)[rows]
        return Head(
            own,
            keys[own, k],
            values[own, k],
            mass[k][own],
            queries[:end, rows],
            raw[:end, rows],
            output,
            base,
        )

    for width in cuts:
        end = start + width
        if any(len(stored[k]) + width > budgets[k] + room for k in range(count)):
            scores = [score(head_of(k, start)) for k in range(count)]
            if together:
                scores = [np.mean(scores, axis=0)] * count
            for k in range(count):
                at = np.array(stored[k])
                worth = np.where((at < sinks) | (at >= start - recent), np.inf, scores[k])
                order = np.argsort(-worth, kind="stable")[: budgets[k]]
                stored[k] = sorted(at[order].tolist())
        for k in range(count):
            stored[k] += range(start, end)
            for t in range(start, end):
                seen = [s for s in stored[k] if s <= t]
                for n in range(k * group, (k + 1) * group):
                    scores_ = keys[seen, k] @ queries[t, n]
                    shares = np.exp(scores_ - scores_.max())
                    shares /= shares.sum()
                    mixed[t, n] = shares @ values[seen, k]
                    if highest:
                        mass[k][seen] = np.maximum(mass[k][seen], shares)
                    else:
                        mass[k][seen] += shares
        start = end
    output = np.einsum("tnh,nhd->td", mixed, weights["output"].astype(np.float64))
    return output, stored

"""A tiny decoder with lively weights, and its forward pass written anew in NumPy, float64.

Nothing of tfkv computes in it, so that a mistake there cannot hide here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from tfkv.calibration import Calibration, fingerprint_of
from tfkv.config import DecoderConfig
from tfkv.export.importers import ModelSource, expected_tensors
from tfkv.moments import measure

#: Whether the query at one position sees the key at another.
Sees = Callable[[int, int], bool]

CONFIG = DecoderConfig(
    vocabulary_size=97,
    num_layers=2,
    hidden_dim=32,
    num_query_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_dim=48,
    rope_max_wavelength=1000.0,
    context_length=512,
    tie_embeddings=False,
)
STOP = 2


def make_weights(config: DecoderConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights whose greedy text varies: strong layers, an output matrix of its own."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in expected_tensors(config):
        if "norm" in name:
            value = rng.uniform(0.7, 1.3, shape)
        elif name == "output":
            value = rng.normal(size=shape)
        elif name == "token_embedding":
            value = rng.normal(size=shape) * 0.5
        else:
            fan_in = np.prod(shape[:2]) if "attention_output" in name else shape[0]
            value = rng.normal(size=shape) * (2.0 / np.sqrt(fan_in))
        weights[name] = value.astype(np.float32)
    return weights


WEIGHTS = make_weights()


def source(stop_tokens: tuple[int, ...] = (STOP,), **overrides: object) -> ModelSource:
    """The tiny model as an importer would hand it over."""
    fields = {"config": CONFIG, "weights": WEIGHTS, "description": "tiny", **overrides}
    return ModelSource(stop_tokens=stop_tokens, **fields)  # type: ignore[arg-type]


def everything(query: int, key: int) -> bool:
    """Plain causal visibility."""
    return key <= query


def window(size: int, sinks: int) -> Sees:
    """Visibility of a sliding window with sinks."""
    return lambda query, key: key <= query and (query - key < size or key < sinks)


def sliding_pages(entries: int, page: int) -> Sees:
    """What a session that slides sees: its first page, and as many whole newer pages as fit.

    Written as a simulation: a cache of `entries` drops its oldest page, the first one
    excepted, whenever the next token finds no room.
    """

    def sees(query: int, key: int) -> bool:
        if key > query:
            return False
        dropped = 0
        while query + 1 - dropped * page > entries:
            dropped += 1
        return key < page or key >= page * (dropped + 1)

    return sees


def logits(
    tokens: Sequence[int],
    sees: Sees | Sequence[Sees] = everything,
    stored: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    config: DecoderConfig = CONFIG,
    weights: dict[str, np.ndarray] = WEIGHTS,
    watch: Callable[[np.ndarray], object] = lambda share: None,
) -> np.ndarray:
    """Logits ``[T, V]`` of a whole sequence.

    Args:
        tokens: The sequence.
        sees: Visibility by position, or that of each layer.
        stored: What keys and values ``[..., H]`` read as once a codec wrote them.
        config: Architecture.
        weights: Canonical weights.
        watch: Gets each layer's attention ``[N, T, T]``.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    count = len(tokens)
    of_layers = [sees] * config.num_layers if callable(sees) else sees
    masks = {
        rule: np.array([[rule(q, k) for k in range(count)] for q in range(count)])
        for rule in dict.fromkeys(of_layers)
    }
    x = w["token_embedding"][list(tokens)]
    for layer in range(config.num_layers):
        p = f"layers/{layer}/"
        h = _rms(x, w[p + "attention_norm"], config)
        q, k, v = (np.einsum("td,dnh->tnh", h, w[p + n]) for n in ("query", "key", "value"))
        q, k = _rope(q, config), stored(_rope(k, config))
        k, v = (np.repeat(y, config.query_group_size, axis=1) for y in (k, stored(v)))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(config.head_dim)
        scores = np.where(masks[of_layers[layer]], scores, -np.inf)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        watch(share)
        seen = np.einsum("nts,snh->tnh", share, v)
        x = x + np.einsum("tnh,nhd->td", seen, w[p + "attention_output"])
        h = _rms(x, w[p + "feedforward_norm"], config)
        gate = h @ w[p + "gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "up"])) @ w[p + "down"]
    out = w["token_embedding"] if config.tie_embeddings else w["output"]
    return _rms(x, w["final_norm"], config) @ out.T


def attention_weights(tokens: Sequence[int], layer: int, sees: Sees = everything) -> np.ndarray:
    """Attention ``[N, T, T]`` of a whole sequence in one layer, query by key."""
    found: list[np.ndarray] = []
    logits(tokens, sees, watch=found.append)
    return found[layer]


def _rms(x: np.ndarray, scale: np.ndarray, config: DecoderConfig) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_epsilon) * scale


def _rope(x: np.ndarray, config: DecoderConfig) -> np.ndarray:
    half = config.head_dim // 2
    angles = np.arange(len(x))[:, None, None] * config.rope_max_wavelength ** (
        -np.arange(half) / half
    )
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def int8(x: np.ndarray) -> np.ndarray:
    """What ``x [..., H]`` reads as from an int8 cache: 255 levels between its least and most."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = np.float64(np.float16((high - low) / 254))
    zero = np.float64(np.float16((high + low) / 2))
    return np.clip(np.round((x - zero) / scale), -127, 127) * scale + zero


def log_softmax(rows: np.ndarray) -> np.ndarray:
    top = rows.max(-1, keepdims=True)
    return rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))


def greedy(
    tokens: Sequence[int],
    count: int,
    sees: Sees = everything,
    stored: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    penalty: float = 1.0,
) -> list[int]:
    """The `count` tokens that follow greedily."""
    tokens = list(tokens)
    for _ in range(count):
        row = logits(tokens, sees, stored)[-1]
        seen = np.isin(np.arange(len(row)), tokens)
        row = np.where(seen, np.where(row > 0, row / penalty, row * penalty), row)
        tokens.append(int(row.argmax()))
    return tokens[len(tokens) - count :] if count else []


def text(count: int, seed: int = 0) -> list[int]:
    """A prompt; the stop token is not in it."""
    rng = np.random.default_rng([7, seed])
    return [int(t) for t in rng.integers(STOP + 1, CONFIG.vocabulary_size, count)]


@functools.cache
def calibration() -> Calibration:
    """Moments of the model over a text of its own; no tables of budgets."""
    weights = make_weights()
    moments = measure(CONFIG, weights, [np.array(text(96, seed)) for seed in (31, 32)])
    return Calibration(fingerprint_of(CONFIG, weights), 96, 2, {}, moments)

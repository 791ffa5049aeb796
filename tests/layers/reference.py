"""Attention and codecs written anew in NumPy, float64, by the definitions.

Nothing of tfkv is used here, so that a mistake there cannot hide here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import ml_dtypes
import numpy as np


def rope(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """``x [T, heads, H]`` turned by ``positions [T]``, pair (i, i + H/2) as a complex number."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * positions[:, None, None] * base ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def sees(query: int, key: int, window: int | None, sinks: int) -> bool:
    """Whether the query at one position sees the key at another."""
    if key > query:
        return False
    return window is None or query - key < window or key < sinks


def stored(x: np.ndarray, codec: str, side: str = "keys", group: int = 32) -> np.ndarray:
    """What ``x [T, ..., H]`` reads as once it was written by a codec; `group` of them together."""
    if codec in ("k8v4", "k6v4", "k4v4"):
        bits = int(codec[1]) if side == "keys" else 4
        turn = hadamard(x.shape[-1])
        return integer_blocks(x @ turn, bits, 64 if bits == 8 else 32) @ turn
    if codec == "int4":
        return integer_blocks(x, 4, 32)
    if codec.startswith("kivi"):
        bits = int(codec[4])
        return channel_groups(x, bits, group) if side == "keys" else integer_blocks(x, bits, 32)
    if codec in ("nvfp4", "mxfp4"):
        return float4(x, codec)
    if codec == "int8_symmetric":
        scale = np.float64(np.float16(np.abs(x).max(-1, keepdims=True) / 127))
        return np.clip(np.round(x / scale), -127, 127) * scale
    if codec == "float32":
        return x.astype(np.float32).astype(np.float64)
    if codec == "bfloat16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    if codec == "float16":
        return x.astype(np.float16).astype(np.float64)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = np.float64(np.float16((high - low) / 254))
    zero = np.float64(np.float16((high + low) / 2))
    return np.clip(np.round((x - zero) / scale), -127, 127) * scale + zero


def stored_by_head(
    x: np.ndarray, codec: str, side: str, arguments: dict[str, str], tables: dict[str, np.ndarray]
) -> np.ndarray:
    """As `stored`, of ``x [T, K, H]`` and codecs with tables ``[K, ...]`` for each KV head."""
    if codec not in ("low_rank", "block_gtq") or (codec == "block_gtq" and side == "values"):
        together = int(arguments.get("group", 32))
        return stored(x, "k4v4" if codec == "block_gtq" else codec, side, together)
    read = np.empty_like(x)
    for head in range(x.shape[1]):
        own = {name: table[head] for name, table in tables.items()}
        if codec == "low_rank":
            read[:, head] = low_rank(x[:, head], side, int(arguments["bits"]), own)
        else:
            widths = [int(width) for width in arguments["widths"].strip("(,)").split(",")]
            read[:, head] = block_gtq(x[:, head], widths, own)
    return read


def low_rank(x: np.ndarray, side: str, bits: int, tables: dict[str, np.ndarray]) -> np.ndarray:
    """The directions of ``x [T, H]``, rounded, and back."""
    mean = tables.get(f"{side}/mean", 0.0)
    latent = (x - mean) @ tables[f"{side}/down"]
    latent = stored(latent, {16: "float16", 8: "int8", 4: "k4v4"}[bits])
    return latent @ tables[f"{side}/up"].T + mean


def block_gtq(x: np.ndarray, widths: list[int], tables: dict[str, np.ndarray]) -> np.ndarray:
    """Channels of ``x [T, H]`` in their order, each run of them in as many bits as it gets."""
    order = tables["order"].astype(int)
    segments = np.split((x - tables["mean"])[:, order], len(widths), axis=-1)
    coded = [integer_blocks(s, bits, s.shape[-1]) for s, bits in zip(segments, widths, strict=True)]
    read = np.empty_like(x)
    read[:, order] = np.concatenate(coded, axis=-1)
    return read + tables["mean"]


def hadamard(size: int) -> np.ndarray:
    """Entry (i, j) is the parity of the bits that i and j share; `size` a power of two."""
    parity = [[(i & j).bit_count() % 2 for j in range(size)] for i in range(size)]
    return (1 - 2 * np.array(parity)) / np.sqrt(size)


def integer_blocks(x: np.ndarray, bits: int, block: int) -> np.ndarray:
    """Asymmetric integers with a float16 scale and lowest number for each block."""
    blocks = x.reshape(*x.shape[:-1], -1, min(block, x.shape[-1]))
    low = blocks.min(-1, keepdims=True)
    scale = (blocks.max(-1, keepdims=True) - low) / (2**bits - 1)
    low, scale = (np.float64(np.float16(number)) for number in (low, scale))
    codes = np.clip(np.round((blocks - low) / np.maximum(scale, 1e-7)), 0, 2**bits - 1)
    return (codes * scale + low).reshape(x.shape)


def channel_groups(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """As `integer_blocks`, for each channel of so many tokens ``x [T, ..., H]``."""
    pieces = [
        integer_blocks(x[first : first + group].swapaxes(0, -1), bits, group).swapaxes(0, -1)
        for first in range(0, len(x), group)
    ]
    return np.concatenate(pieces)


def float4(x: np.ndarray, codec: str) -> np.ndarray:
    """NVFP4 with a tensor scale of 1/16, or MXFP4, through the types of ml_dtypes."""
    block = {"nvfp4": 16, "mxfp4": 32}[codec]
    blocks = x.reshape(*x.shape[:-1], -1, min(block, x.shape[-1]))
    most = np.abs(blocks).max(-1, keepdims=True)
    if codec == "nvfp4":
        scale = np.clip(most / 6 * 16, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
        scale = scale.astype(np.float64) / 16
    else:
        scale = 2.0 ** (np.floor(np.log2(most)) - 2)
    codes = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float64) * scale).reshape(x.shape)


def pages_read(
    queries: np.ndarray, keys: np.ndarray, t: int, pages: int, size: int, recent: int, first: int
) -> set[int]:
    """Pages that the ``queries [G, H]`` of token `t` read of ``keys [t, H]``: the newest, and so
    many more: the `first` ones, and those of the highest bound by Quest's equation."""
    newest = set(range(max(t // size - recent + 1, 0), t // size + 1))
    bounds = {}
    for page in set(range(t // size)) - newest:
        least = keys[page * size : (page + 1) * size].min(axis=0)
        greatest = keys[page * size : (page + 1) * size].max(axis=0)
        bounds[page] = max(np.maximum(q * least, q * greatest).sum() for q in queries)
        if page < first:
            bounds[page] = np.inf
    return newest | set(sorted(bounds, key=lambda page: bounds[page])[-pages:])


def attention(
    x: np.ndarray,
    weights: dict[str, np.ndarray],
    codec: str = "float32",
    window: int | None = None,
    sinks: int = 0,
    base: float | None = None,
    furthest: int | None = None,
    tables: dict[str, np.ndarray] | None = None,
    selects: tuple[int, int, int, int] | None = None,
    alone: Sequence[int] = (),
) -> np.ndarray:
    """Causal attention of one session ``x [T, D]``, token by token and head by head.

    From beyond `furthest` a query looks at the sinks as if it stood there.
    `tables` are those of a codec that needs a calibration, ``[K, ...]``. The tokens that were
    read `alone` look at pages only: as many as `selects` says, of so many tokens, and newest ones;
    of the former so many first ones.
    Weights are ``query [D, N, H]``, ``key`` and ``value [D, K, H]``, ``output [N, H, D]``.
    """
    x = x.astype(np.float64)
    steps = np.arange(len(x))
    queries, keys, values = (
        np.einsum("td,dnh->tnh", x, weights[name].astype(np.float64))
        for name in ("query", "key", "value")
    )
    raw = queries
    if base is not None:
        queries, keys = rope(queries, steps, base), rope(keys, steps, base)
    # "k4v4(recent=3,sinks=1)": tokens less than 3 behind, and the first one, are exact.
    name, _, arguments = codec.partition("(")
    exactly = dict(re.findall(r"(\w+)=(\d+|\([\d,]+\))", arguments))
    recent, first = int(exactly.get("recent", 0)), int(exactly.get("sinks", 0))
    coded = [
        stored_by_head(x, name, side, exactly, tables or {})
        for x, side in ((keys, "keys"), (values, "values"))
    ]
    heads, head_dim = queries.shape[1:]
    group = heads // keys.shape[1]
    mixed = np.zeros_like(queries)
    for t in steps:
        visible = [s for s in steps if sees(t, s, window, sinks)]
        kept = np.array([t - s < recent or s < first for s in visible])
        for n in range(heads):
            seen, near = visible, kept[:, None, None]
            if selects is not None and t in alone:
                own = n // group
                asks = queries[t, own * group : (own + 1) * group]
                read = pages_read(asks, coded[0][:t, own], t, *selects)
                seen = [
                    s for s, k in zip(visible, kept, strict=True) if k or s // selects[1] in read
                ]
                near = kept[seen][:, None, None]
            k = np.where(near, keys[seen], coded[0][seen])
            v = np.where(near, values[seen], coded[1][seen])
            asked = np.broadcast_to(queries[t, n], [len(seen), head_dim]).copy()
            if furthest is not None and base is not None:
                there = rope(raw[t : t + 1], np.array([min(t, furthest)]), base)[0, n]
                asked[[s < sinks for s in seen]] = there
            scores = (k[:, n // group] * asked).sum(-1) / np.sqrt(head_dim)
            shares = np.exp(scores - scores.max())
            mixed[t, n] = shares @ v[:, n // group] / shares.sum()
    return np.einsum("tnh,nhd->td", mixed, weights["output"].astype(np.float64))

"""Second moments of what a model's attention reads, and the codecs they make."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError
from tfkv.pieces import padded_pieces

#: Least eigenvalue of a moment, as a part of the greatest one, where it is inverted.
_FLOOR = 1e-4

#: Most bits of a channel.
_MOST_BITS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """Mean products of channels over a text, of each layer and KV head (axes L, K, H, H).

    Args:
        queries: Of the queries of a head's group, rotated, unscaled; ``[L, K, H, H]``.
        keys: Of keys, rotated.
        outputs: Of what the heads of a group make of values: mixed by their attention.
        readers: Of what the output projections of the group make of a channel: their products
            with themselves.
        key_means: Mean keys, ``[L, K, H]``.
    """

    queries: np.ndarray
    keys: np.ndarray
    outputs: np.ndarray
    readers: np.ndarray
    key_means: np.ndarray

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.keys.tobytes())

    def low_rank(self, rank: int, layer: int | None = None) -> dict[str, np.ndarray]:
        """See `tfkv.layers.codecs.calibrated_codec.CodecTables`.

        Of all maps to `rank` directions, that with the least mean square error: of scores for
        keys, ``E (q·(k - k'))²``, and of what the output projection makes of mixed values: to
        project values and then mix them is the same as to mix them first.
        """
        queries, keys, outputs, readers, means = self._of(layer)
        key_down, key_up = _directions(keys - _outer(means), queries, rank)
        value_down, value_up = _directions(outputs, readers, rank)
        return {
            "keys/down": key_down,
            "keys/up": key_up,
            "keys/mean": means,
            "values/down": value_down,
            "values/up": value_up,
        }

    def block_gtq(
        self, bits: float, segment: int, sensitivity: str, layer: int | None = None
    ) -> tuple[tuple[int, ...], dict[str, np.ndarray]]:
        """See `tfkv.layers.codecs.calibrated_codec.CodecTables`."""
        by_block = self._sensitivity(sensitivity)
        width = min(segment, 2 * by_block.shape[-1])
        order = np.argsort(-by_block, axis=-1, kind="stable")
        ranked = np.take_along_axis(by_block, order, axis=-1)
        # A head counts by how its own blocks compare, whatever the size of its numbers.
        share = ranked / ranked.sum(axis=-1, keepdims=True)
        of_segments = share.reshape(*share.shape[:-1], -1, width // 2).mean(axis=-1)
        profile = np.exp(np.log(of_segments).mean(axis=(0, 1)))
        widths = allocate(profile, round(bits * len(profile)))
        blocks = order.reshape(*order.shape[:-1], -1, width // 2)
        # The halves of a head are the two channels of its blocks.
        channels = np.concatenate([blocks, blocks + ranked.shape[-1]], axis=-1)
        order = channels.reshape(*order.shape[:-1], -1)
        pick = slice(None) if layer is None else layer
        return widths, {"order": order[pick], "mean": self.key_means[pick]}

    def _sensitivity(self, kind: str) -> np.ndarray:
        """How much the scores of a head suffer from an error in each block of two channels that
        RoPE turns together, ``[L, K, H/2]``; see `BlockGTQ`."""

        def of_blocks(moment: np.ndarray) -> np.ndarray:
            first, second = np.split(np.einsum("lkii->lki", moment.astype(np.float64)), 2, axis=-1)
            return first + second

        queries, keys = of_blocks(self.queries), of_blocks(self.keys)
        if kind == "sum":
            return (queries + keys) / 2
        return queries * of_blocks(self.keys - _outer(self.key_means))

    def _of(self, layer: int | None) -> tuple[np.ndarray, ...]:
        pick = slice(None) if layer is None else layer
        return tuple(getattr(self, field.name)[pick] for field in dataclasses.fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Arrays as JSON can hold them: shape, and float32 in base64; of moments, which are
        symmetric, what is on the diagonal and above."""
        written = {}
        for field in dataclasses.fields(self):
            array = getattr(self, field.name)
            numbers = array if array.ndim == 3 else array[(..., *_triangle(array.shape[-1]))]
            data = base64.b64encode(numbers.astype("<f4").tobytes()).decode()
            written[field.name] = {"shape": list(array.shape), "float32": data}
        return written

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads what `to_dict` wrote."""
        arrays = {}
        for name, one in data.items():
            array = np.zeros(one["shape"], np.float32)
            upper = _triangle(array.shape[-1]) if array.ndim == 4 else ()
            numbers = np.frombuffer(base64.b64decode(one["float32"]), "<f4")
            array[(..., *upper)] = numbers.reshape(*array.shape[:2], -1)
            if upper:
                array[(..., *upper[::-1])] = array[(..., *upper)]
            arrays[name] = array
        return cls(**arrays)


def measure(
    config: DecoderConfig, weights: Mapping[str, np.ndarray], passages: Sequence[np.ndarray]
) -> Moments:
    """Reads passages through a model, in pieces, and takes the moments of what it stores.

    Raises:
        ConfigError: Its layers share keys and values.
    """
    import tensorflow as tf

    from tfkv.causal_lm import CausalLM
    from tfkv.layers import attention

    if any(source >= 0 for source in config.attention.share_kv_with):
        raise ConfigError(
            "A calibration is of layers that have keys and values of their own. Received: "
            f"share_kv_with={config.attention.share_kv_with}. Choose a cache that needs none."
        )
    width = min(512, max(len(passage) for passage in passages))
    capacity = max(len(passage) for passage in passages)
    model = CausalLM.from_weights(config, weights, capacity=capacity)
    group, heads, head_dim = config.query_group_size, config.num_key_value_heads, config.head_dim

    @tf.function(jit_compile=True)
    def read(tokens: tf.Tensor, first: tf.Tensor, state: Any) -> tuple[list[tf.Tensor], Any]:
        given = tokens >= 0
        positions = tf.where(given, first + tf.range(width), -1)
        x, found, after = model.embed(tokens, positions), [], []
        there = tf.cast(given, tf.float32)[:, tf.newaxis, :, tf.newaxis]
        by_group = tf.tile(there, [1, 1, group, 1])
        for block, own in zip(model.blocks, state, strict=True):
            normal = block.attention_norm(x)
            queries, keys, _ = block.attention.project_in(normal, positions)
            # Grouped queries come scaled.
            asked = queries / config.query_scale * by_group
            keys *= there
            seen, _ = block.attention.mixed(normal, positions, own)
            seen = attention.group_queries(seen, heads) * head_dim**0.5 * by_group
            products = [tf.einsum("bksi,bksj->kij", one, one) for one in (asked, keys, seen)]
            found.append((*products, tf.reduce_sum(keys, axis=[0, 2])))
            x, own = block(x, positions=positions, state=own)
            after.append(own)
        return [tf.stack(one) for one in zip(*found, strict=True)], after

    sums: list[Any] = [0.0] * 4
    for passage in passages:
        state = model.init_state(1)
        for first, row in padded_pieces(passage, width):
            found, state = read(tf.constant(row[np.newaxis]), tf.constant(first), state)
            sums = [s + one.numpy().astype(np.float64) for s, one in zip(sums, found, strict=True)]
    tokens = sum(len(passage) for passage in passages)
    queries, keys, outputs, means = (total / tokens for total in sums)
    kernels = np.stack(
        [weights[f"layers/{i}/attention_output"] for i in range(config.num_layers)]
    ).reshape(config.num_layers, heads, group, head_dim, -1)
    readers = np.einsum("lkgid,lkgjd->lkij", kernels, kernels, optimize=True)
    arrays = (queries / group, keys, outputs / group, readers, means)
    return Moments(*(array.astype(np.float32) for array in arrays))


def allocate(sensitivity: np.ndarray, total: int) -> tuple[int, ...]:
    """Bits of each segment, 1 to 8, `total` in all: one after the other goes where it lowers
    ``Σ s 4^-b`` most.

    Args:
        sensitivity: s of each segment.
        total: Bits to give, from one for each to eight.

    Raises:
        ConfigError: `total` is out of range.
    """
    count = len(sensitivity)
    if not count <= total <= _MOST_BITS * count:
        raise ConfigError(
            f"`bits` must be from 1 to {_MOST_BITS} in the mean. Received: {total / count}."
        )
    widths = np.ones(count, int)
    for _ in range(total - count):
        gain = np.where(widths < _MOST_BITS, sensitivity * 0.75 * 4.0**-widths, -1.0)
        widths[np.argmax(gain)] += 1
    return tuple(widths.tolist())


def _directions(moment: np.ndarray, metric: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Maps down and up, ``[..., H, R]``: of all of rank R, those that lose least of vectors with
    second moment ``moment [..., H, H]`` as ``metric [..., H, H]`` measures what is lost."""
    root, inverse = _roots(metric)
    _, vectors = np.linalg.eigh(root @ moment @ root)
    best = vectors[..., ::-1][..., :rank]
    return root @ best, inverse @ best


def _roots(moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric square root, and its inverse."""
    sizes, vectors = np.linalg.eigh(moment.astype(np.float64))
    least = np.maximum(_FLOOR * sizes[..., -1:], np.finfo(np.float32).tiny)
    sizes = np.sqrt(np.maximum(sizes, least))[..., np.newaxis, :]
    turned = np.swapaxes(vectors, -1, -2)
    return (vectors * sizes) @ turned, (vectors / sizes) @ turned


def _triangle(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns on the diagonal and above."""
    return np.triu_indices(size)


def _outer(means: np.ndarray) -> np.ndarray:
    return means[..., :, np.newaxis] * means[..., np.newaxis, :]

"""What one reading of a text tells about a model: which heads look far, and which directions of
keys and values matter."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError
from tfkv.moments import Moments, measure

__all__ = ["Calibration", "calibrate", "fingerprint_of"]

#: Part of every head's budget that is the same for all, as in Ada-KV; a repetition says so
#: clearly who looks far that its table needs none.
_EVEN = 0.2
_EVEN_OF = {"kvzip": 0.0}

#: Shares of the text's entries that are kept when heads are compared.
_RATIOS = (0.125, 0.25, 0.5)

#: Table to the scores it is made of, and whether heads compete across layers.
_TABLES = {
    "kvzip": ("kvzip", True),
    "ada_kv": ("snapkv", False),
    "defensive_kv": ("defensive_kv(caps='')", False),
    "layer_defensive_kv": ("defensive_kv(caps='')", True),
}


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Tables that policies share budgets out by, and moments that codecs are made of; of one
    model, and valid for no other.

    Attributes:
        fingerprint: Of architecture and weights.
        tokens: Tokens of a passage it was made from.
        passages: How many.
        tables: By name, then by share of entries kept (as text): how many of the kept entries
            were in each KV head of each layer, ``[L][K]``; the mean is 1.
        moments: What codecs with tables are made of; None in files of before there were any.
    """

    fingerprint: str
    tokens: int
    passages: int
    tables: Mapping[str, Mapping[str, list[list[float]]]]
    moments: Moments | None = None

    def shares(self, table: str, budget: int) -> list[list[float]]:
        """See `tfkv.layers.policies.cache_policy.BudgetTables`: of the ratio that is nearest to
        `budget` in a passage."""
        if table not in self.tables:
            raise ConfigError(
                f"The calibration has no table {table!r}. It has: {', '.join(self.tables)}."
            )
        ratios = self.tables[table]
        wanted = math.log(budget / self.tokens)
        return ratios[min(ratios, key=lambda ratio: abs(math.log(float(ratio)) - wanted))]

    def budgets(self, table: str, budget: int, guarded: int) -> list[list[int]]:
        """See `tfkv.layers.policies.cache_policy.BudgetTables`."""
        shares = np.array(self.shares(table, budget))
        even = _EVEN_OF.get(table, _EVEN)
        # Beyond what is guarded, in proportion to what each head should have beyond it.
        free = (budget - guarded) * shares.size
        mixed = budget * ((1 - even) * shares / shares.mean() + even)
        beyond = np.maximum(mixed - guarded, 0.0) if free else np.zeros_like(mixed)
        wanted = beyond * free / max(beyond.sum(), 1.0)
        found = np.floor(wanted).astype(int)
        missing = free - int(found.sum())
        for place in np.argsort(found - wanted, axis=None, kind="stable")[:missing]:
            found.flat[place] += 1
        return (found + guarded).tolist()

    def low_rank(self, rank: int, layer: int | None) -> Mapping[str, np.ndarray]:
        """See `tfkv.layers.codecs.calibrated_codec.CodecTables`."""
        return self._moments().low_rank(rank, layer)

    def block_gtq(
        self, bits: float, segment: int, sensitivity: str, layer: int | None
    ) -> tuple[tuple[int, ...], Mapping[str, np.ndarray]]:
        """See `tfkv.layers.codecs.calibrated_codec.CodecTables`."""
        return self._moments().block_gtq(bits, segment, sensitivity, layer)

    def _moments(self) -> Moments:
        if self.moments is None:
            raise ConfigError(
                "The calibration is of a version that took no moments of keys and values, which "
                "this codec needs. Run `tfkv calibrate` anew."
            )
        return self.moments

    def check(self, fingerprint: str) -> None:
        """Raises `ConfigError` where it is not a calibration of this model."""
        if fingerprint != self.fingerprint:
            raise ConfigError(
                "The calibration was made with other weights: fingerprint "
                f"{self.fingerprint}, of this model {fingerprint}. Run `tfkv calibrate` anew."
            )

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a JSON file."""
        moments = {} if self.moments is None else {"moments": self.moments.to_dict()}
        text = json.dumps({**vars(self), **moments}, indent=1)
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            ConfigError: It is not such a file.
        """
        try:
            read = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
            if read.get("moments"):
                read["moments"] = Moments.from_dict(read["moments"])
            return cls(**read)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is not a file of `tfkv calibrate`: {error}.") from error


def fingerprint_of(config: DecoderConfig, weights: Mapping[str, np.ndarray]) -> str:
    """Short hash of architecture and weights."""
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(weights[name], np.float32).tobytes())
    return digest.hexdigest()[:16]


def calibrate(
    config: DecoderConfig,
    weights: Mapping[str, np.ndarray],
    passages: Sequence[np.ndarray],
    repeat: Sequence[int],
    progress: Callable[[str, int, int], Any] = lambda *_: None,
) -> Calibration:
    """Runs passages through a model and compares what its heads look at.

    Args:
        config: Architecture.
        weights: Canonical weights.
        passages: Token ids of equal length, real text of the kind that will be served.
        repeat: Token ids of `tfkv.prefix_compression.REPEAT`.
        progress: Called with ``"passages"``, those done and all of them.

    Raises:
        ConfigError: There is no passage, they differ in length, or they are too short to
            tell heads apart.
    """
    lengths = {len(passage) for passage in passages}
    if len(lengths) != 1 or min(lengths) < 16:
        raise ConfigError(
            "`passages` must be of one length of at least 16 tokens. Received lengths: "
            f"{sorted(lengths)}."
        )
    (tokens,) = lengths
    sources = dict.fromkeys(source for source, _ in _TABLES.values())
    scorers = {source: _scorer(config, weights, source, tokens, repeat) for source in sources}
    zeros = np.zeros([config.num_layers, config.num_key_value_heads])
    sums = {name: {str(ratio): zeros for ratio in _RATIOS} for name in _TABLES}
    for index, passage in enumerate(passages):
        scores = {source: score(passage) for source, score in scorers.items()}
        for name, (source, across) in _TABLES.items():
            for ratio in _RATIOS:
                sums[name][str(ratio)] = sums[name][str(ratio)] + _kept(
                    scores[source], ratio, across
                )
        progress("passages", index + 1, len(passages))
    tables = {
        name: {ratio: np.round(total / len(passages), 4).tolist() for ratio, total in table.items()}
        for name, table in sums.items()
    }
    moments = measure(config, weights, passages)
    return Calibration(fingerprint_of(config, weights), tokens, len(passages), tables, moments)


def _scorer(
    config: DecoderConfig,
    weights: Mapping[str, np.ndarray],
    policy: str,
    tokens: int,
    repeat: Sequence[int],
) -> Callable[[np.ndarray], np.ndarray]:
    """A function of a passage that gives what a policy thinks of it, ``[L, K, S]``."""
    import tensorflow as tf

    from tfkv.causal_lm import CausalLM
    from tfkv.evaluation import ModelReader
    from tfkv.layers.cache_spec import CacheSpec
    from tfkv.prefix_compression import PrefixCompressor

    chunk = min(512, tokens)
    capacity = tokens + chunk + len(repeat) + 64
    # Nothing is evicted: the budget only has to be one.
    cache = CacheSpec.parse(policy)
    model = CausalLM.from_weights(config, weights, cache=cache, capacity=capacity)

    def worth(state: Any) -> np.ndarray:
        layers = [
            block.attention.worth(own)[0, :, :tokens]
            for block, own in zip(model.blocks, state, strict=True)
        ]
        return tf.stack(layers).numpy()

    if policy == "kvzip":
        compressor = PrefixCompressor(model, repeat, chunk)
        return lambda passage: worth(compressor.weigh(passage))
    reader = ModelReader(model)

    def score(passage: np.ndarray) -> np.ndarray:
        return worth(reader.state_after(passage))

    return score


def _kept(scores: np.ndarray, ratio: float, across: bool) -> np.ndarray:
    """Kept entries of each head over their mean, ``[L, K]``, where heads compete."""
    layers, heads, tokens = scores.shape
    groups = scores.reshape(1 if across else layers, -1)
    count = round(ratio * groups.shape[1])
    order = np.argsort(-groups, axis=1, kind="stable")[:, :count]
    kept = np.zeros(groups.shape, bool)
    np.put_along_axis(kept, order, True, axis=1)
    return kept.reshape(layers, heads, tokens).sum(-1) / (ratio * tokens)

"""Configuration of the decoder and of the engine that serves it.

Standard library only, so that the client can read what an artifact says of
itself without the TensorFlow runtime.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

from tfkv.errors import ConfigError


def _from_dict(cls: type, data: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(
            f"`{cls.__name__}` has no field {unknown[0]!r}. "
            f"Known fields: {', '.join(sorted(known))}."
        )
    return cls(**data)


def described(cache: object, layer_caches: Iterable[str]) -> str:
    """A cache and its exceptions, for people and as a key."""
    return "; ".join([str(cache), *layer_caches])


def _require(holds: bool, name: str, rule: str, received: Any) -> None:
    if not holds:
        raise ConfigError(f"`{name}` {rule}. Received: {name}={received!r}.")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a Llama-style decoder, independent of where its weights come from.

    Args:
        vocabulary_size: Rows of the embedding matrix.
        num_layers: Decoder blocks (axis L).
        hidden_dim: Width of the residual stream (axis D).
        num_query_heads: Query heads (axis N).
        num_key_value_heads: Key/value heads (axis K); N is a multiple of K.
        head_dim: Width of a head (axis H); even, since RoPE turns pairs.
        intermediate_dim: Width of the feed-forward layer (axis F).
        rope_max_wavelength: RoPE base ("theta").
        rms_epsilon: Added to the mean square in RMSNorm.
        context_length: Positions the model was trained on, in tokens.
        tie_embeddings: Whether the output matrix is the embedding matrix.

    Raises:
        ConfigError: A value is out of range, or N is not a multiple of K.
    """

    vocabulary_size: int
    num_layers: int
    hidden_dim: int
    num_query_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_dim: int
    rope_max_wavelength: float = 10000.0
    rms_epsilon: float = 1e-5
    context_length: int = 2048
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                _require(value > 0, field.name, "must be greater than 0", value)
        _require(
            self.num_query_heads % self.num_key_value_heads == 0,
            "num_query_heads",
            f"must be a multiple of num_key_value_heads={self.num_key_value_heads}",
            self.num_query_heads,
        )
        _require(self.head_dim % 2 == 0, "head_dim", "must be even for RoPE", self.head_dim)

    @property
    def query_group_size(self) -> int:
        """Query heads that share one key/value head (axis G)."""
        return self.num_query_heads // self.num_key_value_heads

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return _from_dict(cls, data)


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What an artifact's in-graph engine is compiled for.

    Args:
        cache: Cache string, policy then codec: ``dense+float32``,
            ``sliding_window(window=1024)+int8``.
        slots: Sessions held at once.
        capacity: Most tokens a session stores; a window policy stores fewer.
        page_size: Token positions a page (axis C).
        decode_chunk: Most tokens one ``generate`` call samples (axis N of the contract).
        prefill_tokens: Most prompt tokens one call carries, and most that one batch
            prefills (axis T).
        shared_prefill_tokens: Most tokens that long prompts prefill in a batch where other
            callers wait for their tokens, but a prefill piece of 64 for each of them at
            least. A prompt that needs no more is never cut.
        batch_sizes: Compiled batch sizes, ascending; the last is the largest batch.
        batch_timeout_us: How long the in-graph batcher waits for company, microseconds.
        max_enqueued_batches: Batches that may wait; beyond it callers get UNAVAILABLE.
        history: Token positions a session remembers; 0 means the model's context length.
        ttl_ms: Lifetime of an idle session whose caller does not say, milliseconds.
        pool_bytes: Bytes of the page pool; 0 means room for every slot at full capacity.
        tenant_sessions: Most sessions one tenant may hold; 0 means any number.
        scan_pages: Pages attention reads at once (see docs/decisions).
        head_budgets: Entries of each KV head of each layer, for a policy that evicts and whose
            budget a calibration has shared out; empty = the same for all.
        layer_caches: Layers that have another codec than `cache`, as exceptions of
            `tfkv.layers.layer_caches`: ``("0-1=int8",)``.
        xla: Whether prefill and decode are compiled with XLA.

    Raises:
        ConfigError: A value is out of range or two do not fit together.
    """

    cache: str = "dense+float32"
    slots: int = 8
    capacity: int = 2048
    page_size: int = 64
    decode_chunk: int = 16
    prefill_tokens: int = 1024
    shared_prefill_tokens: int = 128
    batch_sizes: tuple[int, ...] = (1, 4, 8)
    batch_timeout_us: int = 0
    max_enqueued_batches: int = 64
    history: int = 0
    ttl_ms: int = 600_000
    pool_bytes: int = 0
    tenant_sessions: int = 0
    scan_pages: int = 8
    head_budgets: tuple[tuple[int, ...], ...] = ()
    layer_caches: tuple[str, ...] = ()
    xla: bool = True

    def __post_init__(self) -> None:
        _require(
            not isinstance(self.layer_caches, str),
            "layer_caches",
            "must be several strings, such as ('0-1=int8',)",
            self.layer_caches,
        )
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        object.__setattr__(self, "layer_caches", tuple(self.layer_caches))
        object.__setattr__(self, "head_budgets", tuple(map(tuple, self.head_budgets)))
        for name in ("slots", "capacity", "page_size", "decode_chunk", "prefill_tokens"):
            _require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        for name in ("max_enqueued_batches", "ttl_ms", "scan_pages", "shared_prefill_tokens"):
            _require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        for name in ("batch_timeout_us", "history", "pool_bytes", "tenant_sessions"):
            _require(getattr(self, name) >= 0, name, "must not be negative", getattr(self, name))
        sizes = self.batch_sizes
        _require(
            bool(sizes) and sizes[0] >= 1 and list(sizes) == sorted(set(sizes)),
            "batch_sizes",
            "must be ascending positive numbers without repeats",
            sizes,
        )

        # A repeated call must find all that it gave and got, and the token before it.
        least = self.prefill_tokens + self.decode_chunk + 1
        _require(
            self.history == 0 or self.history >= least,
            "history",
            f"must be 0 or at least prefill_tokens + decode_chunk + 1 = {least}",
            self.history,
        )

    @property
    def pages_per_slot(self) -> int:
        """Pages that hold ``capacity`` tokens."""
        return math.ceil(self.capacity / self.page_size)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return _from_dict(cls, data)

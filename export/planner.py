"""How much memory an artifact will take, and how many sessions fit, before it is exported."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfkv.config import WEIGHT_TYPES, DecoderConfig, EngineConfig, described
from tfkv.errors import ConfigError
from tfkv.export.engine import PREFILL_PIECE
from tfkv.export.exact_tail import exact_bytes
from tfkv.export.geometry import ENDLESS, CacheGeometry
from tfkv.export.history import BYTES_PER_TOKEN as HISTORY_BYTES_PER_TOKEN
from tfkv.export.importers.source import expected_tensors, is_matrix, matrix_shape
from tfkv.export.kept_tokens import kept_bytes
from tfkv.export.layer_groups import LayerGroups
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.per_layer import normal_form, with_exceptions
from tfkv.layers.policies import EvictingPolicy

#: What a warm server holds besides weights and sessions: program, compiled code, buffers.
#: `path.resident_mb` of `make figures` is held to this.
PROGRAM_BYTES = 700_000_000
#: Weights and what loading them leaves behind; likewise.
WEIGHTS_FACTOR = 1.3


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of an engine, and what fits into a budget.

    Attributes:
        cache: Policy and codec, and those of layers that have others.
        context: Tokens a session is planned for.
        key_bytes: Of the keys of one token, all layers; exact.
        value_bytes: Of its values; exact.
        page_bytes: Of one page, all layers; exact.
        session_pages: Pages that a session of `context` tokens takes, in the layers that take
            most; with a policy that evicts, once it has: a prompt that is judged whole takes
            pages for all of it before.
        cache_bytes: Of the pages of a session, each layer's own number of them; exact.
        history_bytes: Of the token history of one session.
        beside_bytes: Of one session beside its pages: what its codec keeps exactly, and what a
            policy that evicts has kept.
        weight_bytes: Of the weights as they are served.
        memory: The budget.
    """

    cache: str
    context: int
    key_bytes: int
    value_bytes: int
    page_bytes: int
    session_pages: int
    cache_bytes: int
    history_bytes: int
    beside_bytes: int
    weight_bytes: int
    memory: int

    @property
    def token_bytes(self) -> int:
        """Bytes of cache of one token."""
        return self.key_bytes + self.value_bytes

    @property
    def session_bytes(self) -> int:
        """Bytes of one session: its pages, its history and what it has beside them."""
        return self.cache_bytes + self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        """Bytes of a session's slot, pages apart."""
        return self.history_bytes + self.beside_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of one loaded version without any session."""
        spare = self.page_bytes + self._slot_bytes
        return math.ceil(WEIGHTS_FACTOR * self.weight_bytes) + spare

    @property
    def sessions(self) -> int:
        """Sessions that fit where versions are never swapped."""
        return self._fit(1)

    @property
    def sessions_with_swap(self) -> int:
        """Sessions that fit where a version swap must: two versions are loaded during it."""
        return self._fit(2)

    def peak_bytes(self, sessions: int, versions: int = 1) -> int:
        """Resident bytes with a pool for so many sessions, in each of so many versions."""
        return PROGRAM_BYTES + versions * (self.fixed_bytes + sessions * self.session_bytes)

    def _fit(self, versions: int) -> int:
        room = self.memory - PROGRAM_BYTES - versions * self.fixed_bytes
        return max(room // (versions * self.session_bytes), 0)

    def pool_bytes(self, sessions: int) -> int:
        """What to give `tfkv export --pool-bytes` for so many sessions, and as many `--slots`."""
        return sessions * self.cache_bytes + self.page_bytes

    def to_dict(self) -> dict[str, Any]:
        """All of it as data."""
        swap = self.sessions_with_swap
        return {
            **dataclasses.asdict(self),
            "token_bytes": self.token_bytes,
            "session_bytes": self.session_bytes,
            "sessions": self.sessions,
            "pool_bytes": self.pool_bytes(self.sessions),
            "peak_bytes": self.peak_bytes(self.sessions),
            "sessions_with_swap": swap,
            "pool_bytes_with_swap": self.pool_bytes(swap),
            "swap_peak_bytes": self.peak_bytes(swap, versions=2),
        }


def plan_memory(
    model: DecoderConfig, engine: EngineConfig, context: int, memory: int
) -> MemoryPlan:
    """Plans the memory of an engine.

    Args:
        model: Architecture.
        engine: Of it, the cache, the page size and the history count.
        context: Tokens a session is planned for; a window policy stores fewer.
        memory: Bytes that the server may take.

    Raises:
        ConfigError: A value is out of range, or the cache cannot be had for this model.
    """
    given = described(*normal_form(engine.cache, model.num_layers, engine.layer_caches))
    specs = with_exceptions(engine.cache, model.num_layers, engine.layer_caches)
    endless = all(spec.policy.furthest is not None for spec in specs)
    most = ENDLESS if endless else model.context_length
    if not 1 <= context <= most:
        raise ConfigError(
            f"`context` must be from 1 to {most} tokens, of this model and cache. "
            f"Received: context={context}."
        )
    if memory < 1:
        raise ConfigError(f"`memory` must be at least 1 byte. Received: memory={memory}.")
    engine = dataclasses.replace(
        engine, cache=_without_caps(engine.cache), capacity=max(context, 2 * engine.page_size)
    )
    groups = LayerGroups.of(model, engine, PREFILL_PIECE)
    size = engine.page_size
    for codec in dict.fromkeys(groups.codecs):
        codec.check(model.head_dim)
    keys, values = groups.bytes_per_token(model).values()
    pages = [_pages_at_rest(group, context) for group in groups.groups]
    stored = [
        count * size * sum(group.bytes_per_token(model).values())
        for count, group in zip(pages, groups.groups, strict=True)
    ]
    return MemoryPlan(
        cache=given,
        context=context,
        key_bytes=keys,
        value_bytes=values,
        page_bytes=size * (keys + values),
        session_pages=max(pages),
        cache_bytes=sum(stored),
        history_bytes=(engine.history or model.context_length) * HISTORY_BYTES_PER_TOKEN,
        beside_bytes=exact_bytes(model, groups.codecs) + kept_bytes(model, groups.first, engine),
        weight_bytes=_weight_bytes(model, engine.weights),
        memory=memory,
    )


def _weight_bytes(model: DecoderConfig, dtype: str) -> int:
    """Bytes of all weights where matrices are stored as `dtype`; exact."""
    total = 0
    for name, shape in expected_tensors(model):
        total += math.prod(shape) * (WEIGHT_TYPES[dtype] if is_matrix(name) else 4)
        if is_matrix(name) and dtype == "int8":
            total += 4 * math.prod(matrix_shape(name, shape)[:-1])
    return total


def _without_caps(cache: str) -> str:
    """The cache with equal budgets: shared out they take as many bytes, but for a part of a page
    in each head."""
    spec = CacheSpec.parse(cache)
    if not isinstance(spec.policy, EvictingPolicy):
        return cache
    return str(dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, caps="")))


def _pages_at_rest(geometry: CacheGeometry, context: int) -> int:
    size, policy = geometry.page_size, geometry.cache.policy
    pages = min(math.ceil(context / size), geometry.columns)
    if not isinstance(policy, EvictingPolicy) or context <= policy.budget + policy.interval:
        return pages
    # What came since the last eviction, which need not begin with a page.
    return min(pages, math.ceil(policy.interval / size) + 1)

"""Which layers of an artifact keep the same tokens, and so share pages."""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from tfkv.config import DecoderConfig, EngineConfig, described
from tfkv.errors import ConfigError
from tfkv.export.geometry import CacheGeometry
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs import CacheCodec
from tfkv.layers.per_layer import normal_form, with_exceptions


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """What the layers of an artifact keep: those of one policy are a group.

    A group has pages, a block table and a prefix index of its own: a page of a window is
    overwritten where layers that keep everything take another one. A session has pages in all
    groups, and what can be done with it is what all of them can do. Mostly there is one group.

    Args:
        groups: In the order of their first layers; the first is the only one where a policy
            evicts by score or selects pages.
    """

    groups: tuple[CacheGeometry, ...]

    @classmethod
    def of(cls, model: DecoderConfig, engine: EngineConfig, prefill_piece: int) -> LayerGroups:
        """Groups of an artifact.

        Args:
            model: Architecture.
            engine: Caches, page size, capacity and chunks.
            prefill_piece: Tokens of a row that are prefilled at once.

        Raises:
            ConfigError: The capacity is too small to work with, or layers differ in what they
                may not.
        """
        cache, specs = _of_layers(model, engine)
        # Equal ones are one object.
        codecs: dict[CacheCodec, CacheCodec] = {cache.codec: cache.codec}
        of_policy: dict[str, dict[int, CacheCodec]] = {}
        caches: dict[str, CacheSpec] = {str(cache.policy): cache}
        for layer, spec in enumerate(specs):
            name = str(spec.policy)
            caches.setdefault(name, spec)
            codec = codecs.setdefault(spec.codec, spec.codec)
            of_policy.setdefault(name, {})[layer] = codec
        return cls(
            tuple(
                CacheGeometry.of(model, engine, prefill_piece, caches[name], own)
                for name, own in of_policy.items()
            )
        )

    @property
    def first(self) -> CacheGeometry:
        """The first group."""
        return self.groups[0]

    @property
    def page_size(self) -> int:
        """Tokens a page, the same in all groups (axis C)."""
        return self.first.page_size

    @functools.cached_property
    def group_of(self) -> tuple[int, ...]:
        """Number of each layer's group."""
        of_layer = {layer: n for n, group in enumerate(self.groups) for layer in group.layers}
        return tuple(of_layer[layer] for layer in sorted(of_layer))

    @property
    def codecs(self) -> tuple[CacheCodec, ...]:
        """Of each layer; equal ones are one object."""
        own = {n: c for one in self.groups for n, c in zip(one.layers, one.codecs, strict=True)}
        return tuple(own[layer] for layer in sorted(own))

    @property
    def selects(self) -> tuple[bool, ...]:
        """Of each layer, whether a token that is read alone looks at some pages only."""
        own = {n: s for one in self.groups for n, s in zip(one.layers, one.selects, strict=True)}
        return tuple(own[layer] for layer in sorted(own))

    @property
    def positions(self) -> int:
        """Most positions a session may reach."""
        return min(group.positions for group in self.groups)

    @property
    def entries(self) -> int:
        """Tokens that a session may have before any group drops one. So many of a prompt are
        shared, and so long a session can be copied: then all groups hold the same pages."""
        return min(group.layout.entries for group in self.groups)

    @property
    def chunk_invariant(self) -> bool:
        """Whether the result is the same however a prompt is cut, codecs apart."""
        return all(group.cache.policy.chunk_invariant for group in self.groups)

    @property
    def rollback(self) -> int:
        """Tokens that can always be taken back; −1 = all, as long as a session does not slide."""
        bounds = [group.rollback for group in self.groups if group.rollback >= 0]
        return min(bounds, default=-1)

    def bytes_per_token(self, model: DecoderConfig) -> dict[str, int]:
        """Bytes that keys and values of one token take where all layers store it, by side;
        exact."""
        each = [group.bytes_per_token(model) for group in self.groups]
        return {side: sum(one[side] for one in each) for side in each[0]}

    def stored_bytes(self, model: DecoderConfig, tokens: int | None = None) -> int:
        """Bytes of what is stored of a session of so many tokens; exact. The most there can be
        where left out."""
        total = 0
        for group in self.groups:
            entries = group.layout.entries
            entries = entries if tokens is None else min(entries, tokens)
            total += entries * sum(group.bytes_per_token(model).values())
        return total

    def with_codec(self, codec: CacheCodec) -> LayerGroups:
        """The same groups for a codec of the first one that has got its tables."""
        plain = self.first.cache.codec
        return LayerGroups(
            tuple(
                group.with_codec(codec) if group.cache.codec == plain else group
                for group in self.groups
            )
        )

    def limit(self, overflow: tf.Tensor) -> tf.Tensor:
        """Most tokens a session may hold, by its overflow choice; int32."""
        return functools.reduce(tf.minimum, [group.limit(overflow) for group in self.groups])

    def reversible(self, reached: tf.Tensor, floor: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        """Whether a query finds all it sees in every layer; see `CacheGeometry.reversible`."""
        each = [group.reversible(reached, floor, position) for group in self.groups]
        return functools.reduce(tf.logical_and, each)

    def earliest_reversible(self, reached: tf.Tensor, floor: tf.Tensor) -> tf.Tensor:
        """The first position for which `reversible` holds; int32."""
        each = [group.earliest_reversible(reached, floor) for group in self.groups]
        return functools.reduce(tf.maximum, each)


def _of_layers(model: DecoderConfig, engine: EngineConfig) -> tuple[CacheSpec, list[CacheSpec]]:
    """The cache of most layers, and that of each.

    Raises:
        ConfigError: Layers differ in what they may not.
    """
    cache, exceptions = normal_form(engine.cache, model.num_layers, engine.layer_caches)
    specs = with_exceptions(cache, model.num_layers, exceptions)
    asked = described(engine.cache, engine.layer_caches)
    policies = {str(spec.policy): spec.policy for spec in specs}
    apart = [one for one in policies.values() if one.evicts or one.selects]
    if len(policies) > 1 and apart:
        does = "evicts by score" if apart[0].evicts else "selects pages"
        raise ConfigError(
            f"{apart[0].name!r} {does}, which an artifact does in all layers or in none. Layers "
            "may mix 'dense', 'sliding_window' and 'streaming_llm', with any windows. A Keras "
            f"model takes it: CausalLM(cache=layer_caches(...)). Received: {asked!r}."
        )
    if exceptions and cache.policy.evicts:
        raise ConfigError(
            f"{cache.policy.name!r} moves what it keeps from pages to a store of one codec, so "
            "that no layer of an artifact may have another. A Keras model takes it: "
            f"CausalLM(cache=layer_caches(...)). Received: {asked!r}."
        )
    calibrated = [spec.codec.name for spec in specs if spec.codec.needs_calibration]
    if calibrated and any(spec.codec != cache.codec for spec in specs):
        raise ConfigError(
            f"{calibrated[0]!r} has tables of all layers in an artifact, so that no layer may have "
            "another codec. A Keras model takes it: CausalLM(cache=layer_caches(...)). Received: "
            f"{asked!r}."
        )
    return cache, specs

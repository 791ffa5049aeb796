"""Keys and values of a batch of sessions of which a query reads some pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfkv.errors import CacheError, ConfigError
from tfkv.layers import page_bounds
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cache_view import CacheView
from tfkv.layers.codecs.grouping import touched_groups
from tfkv.layers.dense_store import DenseStore, Plan, scatter, take_entries
from tfkv.layers.entry_layout import EntryLayout
from tfkv.layers.policies.quest import Quest
from tfkv.layers.shapes import shape_of
from tfkv.layers.store import State


class SelectingStore(DenseStore):
    """A `DenseStore` that knows the least and greatest keys of each of its pages.

    To the state of `DenseStore` it adds ``bounds``: float16 ``[B, K, P, 2H]``, of the keys as the
    codec reads them. A write makes those of all pages that it touches anew from what lies there
    then, so that they hold whatever was taken back; of a page that is no longer whole they may be
    too wide until then, and the page is a newest one, which is always read.

    What the codec keeps exactly is read whatever pages are selected.

    Args:
        cache: Policy and codec.
        num_key_value_heads: KV heads (axis K).
        head_dim: Width of a head (axis H).
        capacity: Most tokens of a session.
        slack: Without effect: everything can be taken back.

    Raises:
        ConfigError: A value is out of range, or the policy does not select.
    """

    def __init__(
        self,
        cache: CacheSpec | str | Mapping[str, Any],
        num_key_value_heads: int,
        head_dim: int,
        capacity: int,
        slack: int = 0,
    ) -> None:
        super().__init__(cache, num_key_value_heads, head_dim, capacity, slack)
        if not isinstance(self.cache.policy, Quest):
            raise ConfigError(f"`cache` must select pages. Received: cache={str(self.cache)!r}.")
        self.policy: Quest = self.cache.policy
        #: Pages of a session (axis P).
        self.pages = self.layout.entries // self.policy.page_size

    def spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        shape = (batch_size, self.num_key_value_heads, self.pages, 2 * self.head_dim)
        return super().spec(batch_size) | {"bounds": tf.TensorSpec(shape, page_bounds.DTYPE)}

    def seen_by(
        self, state: State, queries: tf.Tensor, positions: tf.Tensor, alone: bool
    ) -> CacheView:
        if positions.shape[1] is None:
            raise CacheError(
                "A chunk must have a static width where the policy selects pages for a token that "
                f"is read alone. Received: positions.shape={positions.shape} and "
                f"cache={str(self.cache)!r}."
            )
        if not alone:
            return super().seen_by(state, queries, positions, alone)
        at = positions[:, 0]
        number = tf.math.floordiv(at, self.policy.page_size)
        numbers = EntryLayout(self.pages).positions_of(number + 1)
        chosen = self.policy.choose(queries, state["bounds"], at, numbers)
        places = tf.maximum(chosen, 0)[..., tf.newaxis] * self.policy.page_size
        places += tf.range(self.policy.page_size)
        # Of a session that takes tokens back, those from its own position on are gone.
        end = tf.minimum(state["filled"], at)[:, tf.newaxis, tf.newaxis, tf.newaxis]
        there = (chosen >= 0)[..., tf.newaxis] & (places < end)
        batch, heads, count = shape_of(chosen)
        flat = [batch, heads, count * self.policy.page_size]
        held = tf.reshape(tf.where(there, places, -1), flat)

        def read(part: tf.Tensor) -> tf.Tensor:
            """The chosen pages of a part ``[B, K, S, ...]``."""
            entries, *inner = part.shape[2:]
            size = entries // self.pages
            pages = tf.reshape(part, [batch, heads, self.pages, size, *inner])
            taken = tf.gather(pages, tf.maximum(chosen, 0), axis=2, batch_dims=2)
            return tf.reshape(taken, [batch, heads, count * size, *inner])

        keys, values = (
            {name: read(part) for name, part in self._side(state, side).items()}
            for side in ("keys", "values")
        )
        return CacheView(keys, values, held)

    def _beside(self, state: State, written: State, plan: Plan) -> State:
        size, codec = self.policy.page_size, self.cache.codec.keys
        touched = touched_groups(plan.kept, size).positions
        coded = {
            name: take_entries(written[f"keys/{name}"], touched[:, :: part.tokens] // part.tokens)
            for name, part in codec.spec(self.head_dim).items()
        }
        keys = codec.decode(coded)
        batch, heads, count, width = shape_of(keys)
        keys = tf.reshape(keys, [batch, heads, count // size, size, width])
        there = tf.reshape(touched >= 0, [batch, 1, count // size, size])
        first = touched[:, ::size]
        slots, sources, writes = self._slots(tf.where(first >= 0, first // size, -1), self.pages)
        bounds = page_bounds.bounds_of(keys, there)
        return {"bounds": scatter(state["bounds"], slots, sources, writes, bounds)}

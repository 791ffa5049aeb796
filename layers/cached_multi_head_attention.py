"""Multi-head attention that continues a session from a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfkv.architecture import Rope, read
from tfkv.errors import CacheError, ConfigError
from tfkv.layers import attention, masks
from tfkv.layers.attention_heads import AttentionHeads, silenced
from tfkv.layers.cache_fit import check_fit
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cache_view import CacheView
from tfkv.layers.codecs import CODECS, CacheCodec, Codec, Coded
from tfkv.layers.codecs.codec import code_of_heads
from tfkv.layers.continuation import Continuation
from tfkv.layers.dense_store import DenseStore
from tfkv.layers.evicting_store import Asked, EvictingStore, Weighing
from tfkv.layers.keras_api import keras
from tfkv.layers.positions import consecutive_positions, first_position
from tfkv.layers.ragged_store import RaggedStore
from tfkv.layers.rotary import look_from, rotary_angles, rotate
from tfkv.layers.scoring import Scoring, grouped_slopes
from tfkv.layers.store import State
from tfkv.layers.stores import make_store

#: How a chunk that was never stored is written.
_FLOAT32 = CODECS["float32"]


#: Keys and values of a chunk and their positions, for layers that share them.
KeysValues = dict[str, tf.Tensor]


class _Chunk(NamedTuple):
    """Tokens on their way through a layer.

    Attributes:
        queries: float32 ``[B, K, Q, H]`` of `attention.group_queries`.
        positions: int32 ``[B, T]``; −1 = padding.
        exact: Keys and values as they are, float32 ``[B, K, T, H]``.
        coded: Keys and values as the codec writes them.
        scoring: Of the layer.
        alone: Whether it is a token that was given alone.
    """

    queries: tf.Tensor
    positions: tf.Tensor
    exact: tuple[tf.Tensor, tf.Tensor]
    coded: tuple[Coded, Coded]
    scoring: Scoring
    alone: bool

    def of_heads(self, heads: slice) -> _Chunk:
        """What belongs to some KV heads."""
        return self._replace(
            queries=self.queries[:, heads],
            exact=(self.exact[0][:, heads], self.exact[1][:, heads]),
            coded=(code_of_heads(self.coded[0], heads), code_of_heads(self.coded[1], heads)),
            scoring=self.scoring.of_heads(heads),
        )


@keras.saving.register_keras_serializable(package="tfkv")
class CachedMultiHeadAttention(AttentionHeads):
    """Causal multi-head, grouped-query or multi-query attention with a KV cache.

    Choose it in place of `keras.layers.MultiHeadAttention` in a decoder that is to be
    served. Without a state it is plain causal attention, for training. With one, a chunk
    of any length continues each row's session; the state comes back updated and nothing is
    kept in the layer, so that it traces, compiles and exports like any other.

    What a query sees follows from positions alone and is the same on both paths: a policy
    with a window is trained with that window. A chunk reads its own keys and values as the
    codec writes them, so that it makes no difference how a prompt is cut.

    Keys are stored after RoPE at their true positions, KV heads are never repeated, and
    scores and softmax are float32 whatever the compute dtype. Weights are named and shaped
    as in keras-nlp: ``query/kernel [D, N, H]``, ``key/kernel [D, K, H]``,
    ``value/kernel [D, K, H]``, ``attention_output/kernel [N, H, D]``.

    Args:
        num_heads: Query heads (axis N).
        key_dim: Width of a head (axis H); even where `rope_max_wavelength` is given.
        num_key_value_heads: KV heads (axis K), a divisor of `num_heads`; all of them where
            left out.
        rope_max_wavelength: RoPE base ("theta"); None = no rotation.
        cache: What the cache keeps and how it is written: ``"dense"``,
            ``"sliding_window(window=512,sinks=4)+int8"``, a `CacheSpec`, or what its `to_config`
            gives.
        capacity: Most tokens of a session, where the policy does not bound them.
        slack: Tokens that a window keeps beyond what it shows, so that as many can be
            taken back.
        use_bias: Whether the projections of queries, keys and values add a bias.
        kernel_initializer: Of the four kernels.
        use_output_bias: Whether the output projection adds one; as `use_bias` where left out.
        rope: Rotation of which there is more to say than its base, in place of
            `rope_max_wavelength`; a `tfkv.architecture.Rope` or a dict of its fields.
        alibi_scale: What a distance lowers scores by, as a multiple of ALiBi's slopes; 0 = no
            ALiBi.
        window: Newest tokens that a query sees, its own included, whatever else the cache
            keeps; 0 = all.
        soft_cap: Scores are squeezed below it; 0 = they are not.
        query_scale: What queries are multiplied by; 0 = 1/√H.
        query_key_epsilon: Each head's queries and keys pass an RMSNorm with this epsilon before
            they are turned; 0 = none.
        share_kv_with: An earlier layer, or its name, whose keys and values this one reads: it
            has no projections for them and no cache of its own. Heads, rotation, cache and
            capacity must be those of that layer, which must not share itself.

    Call arguments:
        x: ``[B, T, D]``.
        positions: int32 ``[B, T]``, absolute, −1 = padding. Where left out, each row's
            tokens follow on what its session holds. Positions before its end take back
            what was there.
        state: As of `init_state` or of the call before; None or empty = no cache.
        training: Whether the call is part of training, which has no state.
        mask: bool ``[B, T]``, False = padding; Keras fills it in from a layer that makes
            one.
        keep: bool ``[B, T]``, False = a token that the chunk sees, and nothing after it; for a
            policy that evicts.
        kv: For a layer that shares: what the layer that it names returned as its third. Its
            `state` is then the one that was given to that layer.
        return_kv: Whether keys and values of the chunk are returned as well.

    Returns:
        ``(output, state)``: ``[B, T, D]`` in the compute dtype, and the state after the
        chunk, of the same spec (empty where none was given, or where the layer shares). Outputs
        of padding are meaningless. With `return_kv` also a dict: ``keys`` and ``values``, float32
        ``[B, K, T, H]``, and ``positions``, int32 ``[B, T]``.

    Raises:
        ConfigError: An argument is out of range, or the cache string cannot be read.
        CacheError: In eager mode, tokens do not continue a session or do not fit;
            `DenseStore` says what happens in a graph. Or training with a state.

    Example:
        >>> layer = CachedMultiHeadAttention(8, 64, 2, rope_max_wavelength=1e4, capacity=256)
        >>> state = layer.init_state(batch_size=1)
        >>> prompt, token = tf.random.normal([1, 5, 512]), tf.random.normal([1, 1, 512])
        >>> output, state = layer(prompt, state=state)
        >>> output, state = layer(token, state=state)

    Reference:
        Ainslie et al., GQA, https://arxiv.org/abs/2305.13245; Su et al., RoFormer,
        https://arxiv.org/abs/2104.09864; keys and values of another layer: Brandon et al., CLA,
        https://arxiv.org/abs/2405.12981
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        num_key_value_heads: int | None = None,
        rope_max_wavelength: float | None = None,
        cache: CacheSpec | str | Mapping[str, Any] = "dense",
        capacity: int = 2048,
        slack: int = 0,
        use_bias: bool = False,
        kernel_initializer: Any = "glorot_uniform",
        use_output_bias: bool | None = None,
        rope: Rope | Mapping[str, Any] | None = None,
        alibi_scale: float = 0.0,
        window: int = 0,
        soft_cap: float = 0.0,
        query_scale: float = 0.0,
        query_key_epsilon: float = 0.0,
        share_kv_with: str | CachedMultiHeadAttention | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_heads,
            key_dim,
            num_key_value_heads,
            use_bias,
            kernel_initializer,
            use_output_bias,
            soft_cap,
            query_scale,
            query_key_epsilon,
            **kwargs,
        )
        self.rope_max_wavelength = rope_max_wavelength
        self.capacity = capacity
        self.slack = slack
        self.rope: Rope | None = read(Rope, rope)
        if self.rope is None and rope_max_wavelength is not None:
            self.rope = Rope(rope_max_wavelength)
        self.alibi_scale = alibi_scale
        self.window = window
        self._check()
        group = num_heads // self.num_key_value_heads
        self.store = make_store(cache, self.num_key_value_heads, key_dim, capacity, slack, group)
        self.cache = self.store.cache
        check_fit(self.cache, "alibi" if alibi_scale else "rope")
        self.share_kv_with = self._checked_source(share_kv_with)
        #: What layers that share its keys and values know it by.
        self.shared_name = self.name

    def _checked_source(self, source: str | CachedMultiHeadAttention | None) -> str | None:
        """Name of the layer whose keys and values this one reads."""
        if source is None:
            return None
        if self.store.longest_chunk is not None:
            raise ConfigError(
                "`share_kv_with` needs a cache that reads any chunk at once, and "
                f"{str(self.cache)!r} evicts, or codes tokens together. Choose 'dense', "
                "'sliding_window' or 'quest', and a codec such as 'int8'."
            )
        if not isinstance(source, CachedMultiHeadAttention):
            return source
        if source.share_kv_with is not None:
            raise ConfigError(
                "`share_kv_with` must name a layer that has keys and values of its own. Received: "
                f"{source.name!r}, which shares those of {source.share_kv_with!r}. Name that one."
            )
        for name in ("num_key_value_heads", "key_dim", "rope", "cache", "capacity", "slack"):
            mine, its = getattr(self, name), getattr(source, name)
            if mine != its:
                raise ConfigError(
                    f"`{name}` must be that of {source.name!r}, whose keys and values are shared: "
                    f"{its}. Received: {name}={mine}."
                )
        return source.name

    def _check(self) -> None:
        if self.rope_max_wavelength is not None and self.key_dim % 2:
            raise ConfigError(f"`key_dim` must be even for RoPE. Received: key_dim={self.key_dim}.")
        if self.rope is not None:
            self.rope.check(self.key_dim)
        self._check_not_negative("alibi_scale", "window")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self._build_heads(input_shape[-1], None if self.share_kv_with else input_shape[-1])
        self.built = True

    def get_state_spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state; none where the layer shares."""
        return {} if self.share_kv_with else self.store.spec(batch_size)

    def init_state(self, batch_size: int) -> State:
        """The state of empty sessions; empty where the layer shares."""
        return {} if self.share_kv_with else self.store.init(batch_size)

    def bytes_per_session(self) -> int:
        """Bytes of cache that one session takes in this layer; 0 where it shares."""
        return 0 if self.share_kv_with else self.store.bytes_per_session()

    def call(
        self,
        x: tf.Tensor,
        positions: tf.Tensor | None = None,
        state: State | None = None,
        training: bool = False,
        mask: tf.Tensor | None = None,
        keep: tf.Tensor | None = None,
        kv: KeysValues | None = None,
        return_kv: bool = False,
    ) -> tuple[tf.Tensor, State] | tuple[tf.Tensor, State, KeysValues]:
        # Keras models have no place for a None among their outputs, hence the empty state.
        if training:
            self._refuse_to_train(state)
        self._check_sharing(kv, return_kv)
        # Beside a second tensor argument Keras does not fill in `mask` by itself.
        mask = getattr(x, "_keras_mask", None) if mask is None else mask
        x = tf.cast(x, self.compute_dtype)
        scope = None if state else Continuation.current()
        if kv is not None:
            positions = kv["positions"]
            before = state if scope is None else scope.of(str(self.share_kv_with))
            output, _, _ = self._advance(x, positions, before, alone=x.shape[1] == 1, kv=kv)
            return output, {}
        if scope is None:
            positions = self._positions(x, positions, state, mask)
            output, state, made = self._follow(x, positions, state, keep)
        else:
            # What is padding it knows: a padding id that was sampled is a token.
            positions = _fitting(scope.positions, x) if positions is None else positions
            before = scope.take(self, self.shared_name)
            output, after, made = self._follow(x, positions, before, keep)
            scope.give(after)
            state = {}
        return (output, state, {**made, "positions": positions}) if return_kv else (output, state)

    def _check_sharing(self, kv: KeysValues | None, return_kv: bool) -> None:
        """Refuses calls that do not go with what the layer shares."""
        if (kv is None) != (self.share_kv_with is None):
            raise CacheError(
                "`kv` and `share_kv_with` belong together: a layer that shares needs what the "
                f"other returned with return_kv=True. Received: share_kv_with="
                f"{self.share_kv_with!r} and kv={'None' if kv is None else 'a dict'}."
            )
        if return_kv and self.share_kv_with is not None:
            raise CacheError(
                f"A layer that shares has no keys and values to return. Pass on those that "
                f"{self.share_kv_with!r} returned."
            )
        if return_kv and self.store.longest_chunk is not None:
            raise CacheError(
                "`return_kv` needs a cache that reads any chunk at once. Received: "
                f"cache={str(self.cache)!r}, which evicts, or codes tokens together."
            )
        heads = None if kv is None else (kv["keys"].shape[1], kv["keys"].shape[3])
        if heads not in (None, (self.num_key_value_heads, self.key_dim)):
            raise CacheError(
                f"`kv` must have {self.num_key_value_heads} KV heads of width {self.key_dim}. "
                f"Received: {heads}."
            )

    def _follow(
        self, x: tf.Tensor, positions: tf.Tensor, state: State | None, keep: tf.Tensor | None
    ) -> tuple[tf.Tensor, State, KeysValues]:
        """A chunk of any length: output, state after it, and its keys and values where it was
        read at once."""
        if keep is not None and not (state and self.cache.policy.evicts):
            raise CacheError(
                "`keep` needs a state, and a policy that evicts. Received: "
                f"cache={str(self.cache)!r}. Choose 'recent_tokens', for example."
            )
        if not state or self.store.longest_chunk is None:
            return self._advance(x, positions, state, alone=x.shape[1] == 1)
        outputs, before = [], state["dropped"]
        for piece in self._pieces(x, self.store.longest_chunk):
            # What follows on a refused piece is refused as well.
            whole = state["dropped"] == before
            if self.cache.policy.evicts:
                to_come = tf.where(whole[:, tf.newaxis], positions[:, piece], -1)
                state = self._evicting.make_room(state, to_come, self.weighing())
            alone = x.shape[1] == 1
            output, state, _ = self._advance(x[:, piece], positions[:, piece], state, whole, alone)
            if keep is not None:
                whole = (state["dropped"] == before)[:, tf.newaxis]
                hidden = tf.where(
                    whole & ~tf.cast(keep[:, piece], tf.bool), positions[:, piece], -1
                )
                state = self._evicting.hide(state, hidden)
            outputs.append(output)
        return tf.concat(outputs, axis=1), state, {}

    @property
    def _evicting(self) -> EvictingStore | RaggedStore:
        """The store of a policy that evicts."""
        if not isinstance(self.store, (EvictingStore, RaggedStore)):
            raise CacheError(
                f"Only a policy that evicts does this. Received: cache={str(self.cache)!r}."
            )
        return self.store

    def _pieces(self, x: tf.Tensor, most: int) -> list[slice]:
        """Pieces of a chunk that can be read at once."""
        width = x.shape[1]
        if width is None:
            raise CacheError(
                "A chunk must have a static width where the policy evicts or the codec codes "
                f"tokens together. Received: x.shape={x.shape} and cache={str(self.cache)!r}."
            )
        return [slice(first, min(first + most, width)) for first in range(0, width, most)]

    def weighing(self) -> Weighing:
        """What an `EvictingStore` needs of this layer."""
        kernel = tf.cast(tf.convert_to_tensor(self.attention_output.kernel), tf.float32)
        heads = self.num_key_value_heads
        shape = [heads, self.num_heads // heads, *kernel.shape[1:]]
        return Weighing(tf.reshape(kernel, shape), self.rope, self._scoring())

    def _scoring(self) -> Scoring:
        group = self.num_heads // self.num_key_value_heads
        slopes = grouped_slopes(self.alibi_scale, self.num_key_value_heads, group)
        return Scoring(self.soft_cap, slopes, self.window)

    def evict(self, state: State) -> State:
        """The state with no more entries than the policy's budget, as after a prompt.

        Raises:
            CacheError: The policy does not evict.
        """
        return self._evicting.evict(state, self.weighing())

    def worth(self, state: State) -> tf.Tensor:
        """What the policy thinks of each entry, float32 ``[B, K, S]``; the highest stays."""
        return self._evicting.worth(state, self.weighing())

    def _advance(
        self,
        x: tf.Tensor,
        positions: tf.Tensor,
        state: State | None,
        also: tf.Tensor | bool = True,
        alone: bool = False,
        kv: KeysValues | None = None,
    ) -> tuple[tf.Tensor, State, KeysValues]:
        """One chunk, for which there is room; written in rows ``also [B]`` alone."""
        mixed, state, chunk = self._pass(x, positions, state, also, alone, kv)
        output = self.attention_output(tf.cast(mixed, self.compute_dtype))
        return output, state or {}, dict(zip(("keys", "values"), chunk.exact, strict=True))

    def mixed(
        self,
        x: tf.Tensor,
        positions: tf.Tensor,
        state: State | None,
        also: tf.Tensor | bool = True,
        alone: bool = False,
    ) -> tuple[tf.Tensor, State | None]:
        """What the heads of one chunk saw, before the output projection, and the state after it.

        Args:
            x: ``[B, T, D]``.
            positions: int32 ``[B, T]``; −1 = padding.
            state: As of `call`; there must be room for the chunk.
            also: bool ``[B]``, rows that are written.
            alone: Whether it is a token that was given alone, for which a policy may select.

        Returns:
            float32 ``[B, T, N, H]``, and the state.
        """
        return self._pass(x, positions, state, also, alone)[:2]

    def _pass(
        self,
        x: tf.Tensor,
        positions: tf.Tensor,
        state: State | None,
        also: tf.Tensor | bool = True,
        alone: bool = False,
        kv: KeysValues | None = None,
    ) -> tuple[tf.Tensor, State | None, _Chunk]:
        """As `mixed`, and the chunk; one whose keys and values `kv` are another layer's is not
        written here."""
        x = silenced(x, positions >= 0)
        queries, keys, values = self.project_in(x, positions, kv)
        codec = self.cache.codec if state else _FLOAT32
        coded = _encoded(codec.keys, keys), _encoded(codec.values, values)
        chunk = _Chunk(queries, positions, (keys, values), coded, self._scoring(), alone)
        if not state:
            part = self._attend(chunk, CacheView(*coded, positions), codec)
        else:
            seen = [
                self._attend_stored(chunk.of_heads(heads), store, own)
                for store, heads, own in self.store.parts(state)
            ]
            part = attention.Partial(
                *(tf.concat(fields, axis=1) for fields in zip(*seen, strict=True))
            )
        mixed = attention.ungroup_output(attention.normalize(part), self.num_heads)
        if state and kv is None:
            before = state["dropped"]
            state = self.store.write(state, positions, *coded, mixed, chunk.exact, also)
            if self.cache.policy.evicts:
                written = (state["dropped"] == before)[:, tf.newaxis]
                asked = Asked(queries, tf.where(written, positions, -1), chunk.scoring)
                state = self._evicting.observe(state, asked)
        return mixed, state, chunk

    def _attend_stored(self, chunk: _Chunk, store: DenseStore, state: State) -> attention.Partial:
        """Attention of a chunk over what is stored, and over itself."""
        codec, positions = store.cache.codec, chunk.positions
        if codec.recent:
            return self._attend_mixed(chunk, store, state)
        part = self._attend(chunk, CacheView(*chunk.coded, positions), codec)
        view = store.seen_by(state, chunk.queries, positions, chunk.alone)
        return attention.merge(self._attend(chunk, view, codec), part)

    def _attend_mixed(self, chunk: _Chunk, store: DenseStore, state: State) -> attention.Partial:
        """Attention where the codec keeps the newest tokens exactly: each token is read from
        one of the two, by its distance from the query."""
        positions, exact, coded = chunk.positions, chunk.exact, chunk.coded
        codec, before = store.cache.codec, first_position(positions)
        main = store.seen_by(state, chunk.queries, positions, chunk.alone)
        kept = store.exact_view(state, before)
        there = store.kept_exactly(state, main.positions)
        asked = _asking(positions, main.positions)
        old = masks.exact(asked, main.positions, codec.recent, codec.sinks)
        near = masks.exact(positions, kept.positions, codec.recent, codec.sinks)
        here = masks.exact(positions, positions, codec.recent, codec.sinks)
        new = CacheView({"codes": exact[0]}, {"codes": exact[1]}, positions)
        parts = [
            self._attend(chunk, main, codec, ~(old & there[..., tf.newaxis, :])),
            self._attend(chunk, kept, _FLOAT32, near),
            self._attend(chunk, new, _FLOAT32, here),
        ]
        if codec.tokens == 1:
            own = CacheView(*coded, positions)
            parts.append(self._attend(chunk, own, codec, ~here))
        return functools.reduce(attention.merge, parts)

    def _positions(
        self,
        x: tf.Tensor,
        positions: tf.Tensor | None,
        state: State | None,
        mask: tf.Tensor | None,
    ) -> tf.Tensor:
        given = tf.ones(tf.shape(x)[:2], tf.bool) if mask is None else tf.cast(mask, tf.bool)
        if positions is None:
            return consecutive_positions(given, state["filled"] if state else 0)
        return tf.where(given, tf.cast(positions, tf.int32), -1)

    def project_in(
        self, x: tf.Tensor, positions: tf.Tensor, kv: KeysValues | None = None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Grouped queries ``[B, K, Q, H]``, keys and values ``[B, K, T, H]``, in float32, of
        ``x [B, T, D]`` at ``positions [B, T]``: as they meet, rotated.

        Raises:
            CacheError: The layer shares keys and values, and `kv` was not given.
        """
        self._check_sharing(kv, return_kv=False)
        names = ("query", "key", "value") if kv is None else ("query",)
        heads = [self._heads_of(name, x) for name in names]
        if self.rope is not None:
            angles = rotary_angles(positions, self.key_dim, self.rope)
            heads[:2] = [rotate(one, *angles) for one in heads[:2]]
        queries = attention.group_queries(heads[0], self.num_key_value_heads, self.query_scale)
        if kv is not None:
            return queries, kv["keys"], kv["values"]
        keys, values = (tf.transpose(one, [0, 2, 1, 3]) for one in heads[1:])
        return queries, keys, values

    def attention_weights(
        self, x: tf.Tensor, positions: tf.Tensor, kv: KeysValues | None = None
    ) -> tf.Tensor:
        """What each token of a text attends to, for pictures: within the policy's window, as if
        nothing was rounded or evicted.

        Args:
            x: ``[B, T, D]``.
            positions: int32 ``[B, T]``; −1 = padding.
            kv: As of `call`.

        Returns:
            float32 ``[B, N, T, T]``, rows summing to 1.
        """
        queries, keys, _ = self.project_in(tf.cast(x, self.compute_dtype), positions, kv)
        policy, stored = self.cache.policy, {"codes": keys}
        scores = _FLOAT32.scores(queries, stored)
        if policy.furthest is not None and self.rope_max_wavelength is not None:
            looking = look_from(queries, positions, policy.furthest, self.rope_max_wavelength)
            sink = (positions < policy.sinks)[:, tf.newaxis, tf.newaxis]
            scores = tf.where(sink, _FLOAT32.scores(looking, stored), scores)
        first_visible = policy.first_visible(positions)
        mask = masks.visible(positions, positions, first_visible, policy.sinks)
        weights = attention.attention_weights(scores, mask)
        width = tf.shape(positions)[1]
        return tf.reshape(weights, [-1, self.num_heads, width, width])

    def _attend(
        self,
        chunk: _Chunk,
        seen: CacheView,
        codec: CacheCodec,
        also: tf.Tensor | bool = True,
    ) -> attention.Partial:
        """Attention of a chunk's queries over some keys and values, where `also` allows it."""
        policy, queries, positions = self.cache.policy, chunk.queries, chunk.positions
        keys, values, at = seen
        asked = _asking(positions, at)
        mask = masks.visible(asked, at, policy.first_visible(asked), policy.sinks) & also
        mask = chunk.scoring.narrow(mask, asked, at)
        scoring = chunk.scoring.between(asked, at)
        if policy.furthest is None or self.rope is None:
            return attention.attend(queries, keys, values, mask, codec, scoring=scoring)
        sink = (at < policy.sinks)[:, tf.newaxis]
        looking = look_from(queries, positions, policy.furthest, self.rope)
        return attention.merge(
            attention.attend(queries, keys, values, mask & ~sink, codec, scoring=scoring),
            attention.attend(looking, keys, values, mask & sink, codec, scoring=scoring),
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "rope_max_wavelength": self.rope_max_wavelength,
            "cache": self.cache.to_config(),
            "capacity": self.capacity,
            "slack": self.slack,
            "rope": None if self.rope is None else dataclasses.asdict(self.rope),
            "alibi_scale": self.alibi_scale,
            "window": self.window,
            "share_kv_with": self.share_kv_with,
        }


def _encoded(codec: Codec, x: tf.Tensor) -> Coded:
    """Codes of a chunk; none where the store knows alone what is coded together."""
    return codec.encode(x) if codec.tokens == 1 else {}


def _fitting(positions: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """The positions of a `Continuation`, for ``x [B, T, D]``.

    Raises:
        CacheError: They are of another number of tokens.
    """
    if x.shape[1] is not None and x.shape[1] != positions.shape[1]:
        raise CacheError(
            f"A layer with a cache must see each token of a chunk: it got {x.shape[1]} in place of "
            f"{positions.shape[1]}. Give it `positions`, or keep the length of the sequence."
        )
    return positions


def _asking(positions: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """``positions [B, T]`` of queries beside those of keys: ``[B, 1, T]`` where KV heads hold
    keys of their own."""
    return positions if keys.shape.rank == 2 else positions[:, tf.newaxis]

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
from tfkv.layers.cache_fit import check_fit
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cache_view import CacheView
from tfkv.layers.codecs import CODECS, CacheCodec, Codec, Coded
from tfkv.layers.codecs.codec import code_of_heads
from tfkv.layers.dense_store import DenseStore
from tfkv.layers.evicting_store import Asked, EvictingStore, Weighing
from tfkv.layers.keras_api import LEGACY, keras
from tfkv.layers.normalization import rms_normalize
from tfkv.layers.positions import consecutive_positions, first_position
from tfkv.layers.ragged_store import RaggedStore
from tfkv.layers.rms_norm import RMSNorm
from tfkv.layers.rotary import look_from, rotary_angles, rotate
from tfkv.layers.scoring import Scoring, grouped_slopes
from tfkv.layers.store import State
from tfkv.layers.stores import make_store

#: How a chunk that was never stored is written.
_FLOAT32 = CODECS["float32"]


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
class CachedMultiHeadAttention(keras.layers.Layer):
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

    Returns:
        ``(output, state)``: ``[B, T, D]`` in the compute dtype, and the state after the
        chunk, of the same spec (empty where none was given). Outputs of padding are
        meaningless.

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
        https://arxiv.org/abs/2104.09864
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
        **kwargs: Any,
    ) -> None:
        # Keras would cast the float tensors of a state to the compute dtype.
        super().__init__(autocast=False, **kwargs)
        _require_tensorflow()
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        self.rope_max_wavelength = rope_max_wavelength
        self.capacity = capacity
        self.slack = slack
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.use_output_bias = use_bias if use_output_bias is None else use_output_bias
        self.rope: Rope | None = read(Rope, rope)
        if self.rope is None and rope_max_wavelength is not None:
            self.rope = Rope(rope_max_wavelength)
        self.alibi_scale = alibi_scale
        self.window = window
        self.soft_cap = soft_cap
        self.query_scale = query_scale or key_dim**-0.5
        self.query_key_epsilon = query_key_epsilon
        self.supports_masking = True
        self._check()
        group = num_heads // self.num_key_value_heads
        self.store = make_store(cache, self.num_key_value_heads, key_dim, capacity, slack, group)
        self.cache = self.store.cache
        check_fit(self.cache, "alibi" if alibi_scale else "rope")

    def _check(self) -> None:
        heads, shared = self.num_heads, self.num_key_value_heads
        for name, value in (("num_heads", heads), ("num_key_value_heads", shared)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"`{name}` must be an integer of at least 1. Received: {name}={value!r}."
                )
        if heads % shared:
            raise ConfigError(
                f"`num_heads` must be a multiple of num_key_value_heads={shared}. "
                f"Received: num_heads={heads}."
            )
        if self.rope_max_wavelength is not None and self.key_dim % 2:
            raise ConfigError(f"`key_dim` must be even for RoPE. Received: key_dim={self.key_dim}.")
        if self.rope is not None:
            self.rope.check(self.key_dim)
        for name in ("alibi_scale", "window", "soft_cap", "query_scale", "query_key_epsilon"):
            if getattr(self, name) < 0:
                value = getattr(self, name)
                raise ConfigError(f"`{name}` must not be below 0. Received: {name}={value!r}.")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        hidden_dim = input_shape[-1]
        head_shape = (None, None, self.num_heads, self.key_dim)
        self.query = self._project("btd,dnh->btnh", head_shape[1:], "nh", "query")
        head_shape_kv = (None, self.num_key_value_heads, self.key_dim)
        self.key = self._project("btd,dkh->btkh", head_shape_kv, "kh", "key")
        self.value = self._project("btd,dkh->btkh", head_shape_kv, "kh", "value")
        output_shape = (None, hidden_dim)
        self.attention_output = self._project(
            "btnh,nhd->btd", output_shape, "d", "attention_output"
        )
        for projection in (self.query, self.key, self.value):
            projection.build((None, None, hidden_dim))
        self.attention_output.build(head_shape)

        if self.query_key_epsilon:
            epsilon = self.query_key_epsilon
            for name in ("query_norm", "key_norm"):
                norm = RMSNorm(epsilon, dtype=self.dtype_policy, name=name)
                norm.build((None, None, None, self.key_dim))
                setattr(self, name, norm)
        self.built = True

    def _project(
        self, equation: str, output_shape: tuple[int | None, ...], bias_axes: str, name: str
    ) -> keras.layers.EinsumDense:
        biased = self.use_output_bias if name == "attention_output" else self.use_bias
        config = keras.initializers.serialize(self.kernel_initializer)
        return keras.layers.EinsumDense(
            equation,
            output_shape=output_shape,
            bias_axes=bias_axes if biased else None,
            kernel_initializer=keras.initializers.deserialize(config),
            dtype=self.dtype_policy,
            name=name,
        )

    def get_state_spec(self, batch_size: int) -> dict[str, tf.TensorSpec]:
        """Shape and dtype of every tensor of the state."""
        return self.store.spec(batch_size)

    def init_state(self, batch_size: int) -> State:
        """The state of empty sessions."""
        return self.store.init(batch_size)

    def call(
        self,
        x: tf.Tensor,
        positions: tf.Tensor | None = None,
        state: State | None = None,
        training: bool = False,
        mask: tf.Tensor | None = None,
        keep: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, State]:
        # Keras models have no place for a None among their outputs, hence the empty state.
        if training and state:
            raise CacheError(
                "`state` must be None in training: codes have no gradient. Received: "
                "training=True and a state. Leave out `state`, or pass training=False."
            )
        # Beside a second tensor argument Keras does not fill in `mask` by itself.
        mask = getattr(x, "_keras_mask", None) if mask is None else mask
        x = tf.cast(x, self.compute_dtype)
        positions = self._positions(x, positions, state, mask)
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
            output, state = self._advance(x[:, piece], positions[:, piece], state, whole, alone)
            if keep is not None:
                whole = (state["dropped"] == before)[:, tf.newaxis]
                hidden = tf.where(
                    whole & ~tf.cast(keep[:, piece], tf.bool), positions[:, piece], -1
                )
                state = self._evicting.hide(state, hidden)
            outputs.append(output)
        return tf.concat(outputs, axis=1), state

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
    ) -> tuple[tf.Tensor, State]:
        """One chunk, for which there is room; written in rows ``also [B]`` alone."""
        mixed, state = self.mixed(x, positions, state, also, alone)
        return self.attention_output(tf.cast(mixed, self.compute_dtype)), state or {}

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
        # A weight of 0 does not silence what is not finite.
        x = tf.where((positions >= 0)[..., tf.newaxis], x, tf.zeros_like(x))
        queries, keys, values = self.project_in(x, positions)
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
        if state:
            before = state["dropped"]
            state = self.store.write(state, positions, *coded, mixed, chunk.exact, also)
            if self.cache.policy.evicts:
                written = (state["dropped"] == before)[:, tf.newaxis]
                asked = Asked(queries, tf.where(written, positions, -1), chunk.scoring)
                state = self._evicting.observe(state, asked)
        return mixed, state

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
        self, x: tf.Tensor, positions: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Grouped queries ``[B, K, Q, H]``, keys and values ``[B, K, T, H]``, in float32, of
        ``x [B, T, D]`` at ``positions [B, T]``: as they meet, rotated."""
        queries, keys, values = (
            tf.cast(projection(x), tf.float32) for projection in (self.query, self.key, self.value)
        )
        if self.query_key_epsilon:
            queries, keys = (
                rms_normalize(x, tf.convert_to_tensor(norm.scale), self.query_key_epsilon)
                for x, norm in ((queries, self.query_norm), (keys, self.key_norm))
            )
        if self.rope is not None:
            angles = rotary_angles(positions, self.key_dim, self.rope)
            queries, keys = rotate(queries, *angles), rotate(keys, *angles)
        return (
            attention.group_queries(queries, self.num_key_value_heads, self.query_scale),
            tf.transpose(keys, [0, 2, 1, 3]),
            tf.transpose(values, [0, 2, 1, 3]),
        )

    def attention_weights(self, x: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """What each token of a text attends to, for pictures: within the policy's window, as if
        nothing was rounded or evicted.

        Args:
            x: ``[B, T, D]``.
            positions: int32 ``[B, T]``; −1 = padding.

        Returns:
            float32 ``[B, N, T, T]``, rows summing to 1.
        """
        queries, keys, _ = self.project_in(tf.cast(x, self.compute_dtype), positions)
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
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "num_key_value_heads": self.num_key_value_heads,
            "rope_max_wavelength": self.rope_max_wavelength,
            "cache": self.cache.to_config(),
            "capacity": self.capacity,
            "slack": self.slack,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "use_output_bias": self.use_output_bias,
            "rope": None if self.rope is None else dataclasses.asdict(self.rope),
            "alibi_scale": self.alibi_scale,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "query_scale": self.query_scale,
            "query_key_epsilon": self.query_key_epsilon,
        }


def _encoded(codec: Codec, x: tf.Tensor) -> Coded:
    """Codes of a chunk; none where the store knows alone what is coded together."""
    return codec.encode(x) if codec.tokens == 1 else {}


def _asking(positions: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
    """``positions [B, T]`` of queries beside those of keys: ``[B, 1, T]`` where KV heads hold
    keys of their own."""
    return positions if keys.shape.rank == 2 else positions[:, tf.newaxis]


def _require_tensorflow() -> None:
    backend = "tensorflow" if LEGACY else keras.backend.backend()
    if backend != "tensorflow":
        raise ConfigError(
            "tfkv layers need Keras on TensorFlow: set KERAS_BACKEND=tensorflow before Keras is "
            f"imported. Received: backend={backend!r}."
        )

"""The decoder as a Keras model: to train, to look into, and to check exports against."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError, ModelSourceError
from tfkv.layers.cache_fit import check_fit
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.cached_multi_head_attention import KeysValues
from tfkv.layers.decoder_block import DecoderBlock
from tfkv.layers.keras_api import KEEPS_DTYPE, keras, serialize_policy
from tfkv.layers.layer_norm import LayerNorm
from tfkv.layers.per_layer import CalibrationTables, layer_caches
from tfkv.layers.positions import consecutive_positions
from tfkv.layers.rms_norm import RMSNorm
from tfkv.layers.scoring import soft_cap
from tfkv.layers.store import State

if TYPE_CHECKING:
    from tfkv.generation import Generator

__all__ = ["AnyCache", "CausalLM"]

#: A cache as `CacheSpec.parse` reads it.
AnyCache = CacheSpec | str | Mapping[str, Any]

#: Canonical name of a layer's weight to the path of the Keras weight inside its block; one that
#: a model's options leave out is not there.
_BLOCK_WEIGHTS = {
    "query": "attention.query.kernel",
    "key": "attention.key.kernel",
    "value": "attention.value.kernel",
    "attention_output": "attention.attention_output.kernel",
    "attention_norm": "attention_norm.scale",
    "feedforward_norm": "feedforward_norm.scale",
    "gate": "gate.kernel",
    "up": "up.kernel",
    "down": "down.kernel",
    "query_bias": "attention.query.bias",
    "key_bias": "attention.key.bias",
    "value_bias": "attention.value.bias",
    "attention_output_bias": "attention.attention_output.bias",
    "query_norm": "attention.query_norm.scale",
    "key_norm": "attention.key_norm.scale",
    "attention_norm_bias": "attention_norm.bias",
    "feedforward_norm_bias": "feedforward_norm.bias",
    "post_attention_norm": "post_attention_norm.scale",
    "post_attention_norm_bias": "post_attention_norm.bias",
    "post_feedforward_norm": "post_feedforward_norm.scale",
    "post_feedforward_norm_bias": "post_feedforward_norm.bias",
    "gate_bias": "gate.bias",
    "up_bias": "up.bias",
    "down_bias": "down.bias",
    "router": "experts.router",
    "expert_gate": "experts.gate",
    "expert_up": "experts.up",
    "expert_down": "experts.down",
    "shared_router": "experts.shared_router",
    "shared_gate": "experts.shared_gate",
    "shared_up": "experts.shared_up",
    "shared_down": "experts.shared_down",
}
_MODEL_WEIGHTS = {
    "token_embedding": "token_embedding.embeddings",
    "position_embedding": "position_embedding",
    "embedding_norm": "embedding_norm.scale",
    "embedding_norm_bias": "embedding_norm.bias",
    "final_norm": "final_norm.scale",
    "final_norm_bias": "final_norm.bias",
    "output": "output_embedding",
}


@keras.saving.register_keras_serializable(package="tfkv")
class CausalLM(keras.Model):
    """A decoder whose blocks continue sessions from KV caches: Llama, and what `DecoderConfig`
    makes of it.

    It trains with `fit` like any Keras model: logits in, no softmax, so the loss is
    ``SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)``. With a state it
    reads and returns one cache for each layer.

    Args:
        config: Architecture; a dict of its fields will do.
        cache: What the cache keeps and how it is written, policy then codec; or one for each
            layer, as of `tfkv.layers.layer_caches`. A layer that shares keys and values has that
            of the layer it shares with.
        capacity: Most tokens of a session, where the policy does not bound them; the
            model's context length where left out.
        slack: Tokens that a window keeps so that as many can be taken back.
        calibration: A `tfkv.calibration.Calibration` of these weights, for a cache that needs one.
            Its fingerprint is for whoever has the weights to check.

    Call arguments:
        token_ids: int32 ``[B, T]``, −1 = padding, on either side.
        positions: int32 ``[B, T]``, absolute; where left out, each row follows on what its
            session holds.
        state: As of `init_state` or of the call before; None = no cache.
        training: Whether the call is part of training, which has no state.

    Returns:
        float32 logits ``[B, T, V]``; with a state ``(logits, state)``.

    Raises:
        ConfigError: The configuration or the cache string does not hold together.
        CacheError: In eager mode, tokens do not continue a session or do not fit.

    Example:
        >>> model = CausalLM(DecoderConfig(64, 2, 32, 4, 2, 8, 48), cache="dense+int8")
        >>> logits, state = model(tf.constant([[1, 2, 3]]), state=model.init_state(1))
    """

    def __init__(
        self,
        config: DecoderConfig | Mapping[str, Any],
        cache: AnyCache | Sequence[AnyCache] = "dense+float32",
        capacity: int | None = None,
        slack: int = 0,
        calibration: CalibrationTables | None = None,
        **kwargs: Any,
    ) -> None:
        # Keras would cast the float tensors of a state to the compute dtype.
        super().__init__(autocast=False, **kwargs)
        if not isinstance(config, DecoderConfig):
            config = DecoderConfig.from_dict(dict(config))
        self.config = config
        self.caches = _of_layers(cache, config, calibration)
        self.capacity = config.context_length if capacity is None else capacity
        self.slack = slack
        self.token_embedding = keras.layers.Embedding(
            config.vocabulary_size,
            config.hidden_dim,
            dtype=self.dtype_policy,
            name="token_embedding",
        )
        sources = [config.kv_source(index) for index in range(config.num_layers)]
        self.caches = [self.caches[source] for source in sources]
        #: Layers whose keys and values others read.
        self.shared_layers = frozenset(n for index, n in enumerate(sources) if n != index)
        self.blocks = [self._block(index) for index in range(config.num_layers)]
        self.final_norm = self._norm(config.final_epsilon, "final_norm")
        if config.norms.embedding:
            self.embedding_norm = self._norm(config.rms_epsilon, "embedding_norm")
        self.build((None, None))

    @classmethod
    def from_weights(
        cls, config: DecoderConfig, weights: Mapping[str, np.ndarray], **kwargs: Any
    ) -> Self:
        """A model with the weights of `export_weights` or of an importer.

        Args:
            config: Architecture.
            weights: As for `assign_weights`.
            **kwargs: To the constructor.
        """
        model = cls(config, **kwargs)
        model.assign_weights(weights)
        return model

    def _norm(self, epsilon: float, name: str) -> RMSNorm | LayerNorm:
        cls = RMSNorm if self.config.norms.kind == "rms" else LayerNorm
        return cls(epsilon, dtype=self.dtype_policy, name=name)

    def _block(self, index: int) -> DecoderBlock:
        config = self.config
        source = config.kv_source(index)
        return DecoderBlock(
            config.num_query_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.intermediate_dim,
            None if config.rope(index) is None else config.rope_max_wavelength,
            config.rms_epsilon,
            self.caches[index],
            self.capacity,
            self.slack,
            config.block_options(index),
            None if source == index else f"block_{source}",
            dtype=self.dtype_policy,
            name=f"block_{index}",
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.token_embedding.built:
            return
        config = self.config
        self.token_embedding.build(input_shape)
        hidden_shape = (*input_shape, config.hidden_dim)
        for block in self.blocks:
            block.build(hidden_shape)
        self.final_norm.build(hidden_shape)
        if config.norms.embedding:
            self.embedding_norm.build(hidden_shape)
        if config.positions.kind == "learned":
            self.position_embedding = self.add_weight(
                name="position_embedding",
                shape=(config.context_length, config.hidden_dim),
                initializer="uniform",
                **KEEPS_DTYPE,
            )
        if not config.tie_embeddings:
            self.output_embedding = self.add_weight(
                name="output_embedding",
                shape=(config.vocabulary_size, config.hidden_dim),
                initializer="glorot_uniform",
                **KEEPS_DTYPE,
            )
        self.built = True

    @property
    def vocabulary_size(self) -> int:
        """Tokens that it knows (axis V)."""
        return self.config.vocabulary_size

    @property
    def most_tokens(self) -> int:
        """Tokens a session may hold; −1 = any number, of which the policies keep a part."""
        limits = [block.attention.store.capacity for block in self.blocks]
        return min((limit for limit in limits if limit >= 0), default=-1)

    def no_hidden(self, batch_size: int) -> tf.Tensor:
        """Stands for the last hidden state before there is one, ``[B, D]``."""
        return tf.zeros([batch_size, self.config.hidden_dim], self.compute_dtype)

    def get_state_spec(self, batch_size: int) -> list[dict[str, tf.TensorSpec]]:
        """Shapes and dtypes of the state of each layer."""
        return [block.get_state_spec(batch_size) for block in self.blocks]

    def init_state(self, batch_size: int) -> list[State]:
        """The state of empty sessions, one for each layer."""
        return [block.init_state(batch_size) for block in self.blocks]

    def evict(self, state: list[State]) -> list[State]:
        """The state with no more entries than the budgets of the layers that evict, as after a
        prompt; other layers stay as they are."""
        return [
            block.attention.evict(own) if cache.policy.evicts else own
            for block, cache, own in zip(self.blocks, self.caches, state, strict=True)
        ]

    def kept_positions(self, state: list[State]) -> list[tf.Tensor]:
        """Which tokens a state holds: for each layer the positions of the entries that it reads,
        int32 ``[B, K, S]``, −1 = empty; S differs where layers do."""
        return [
            block.attention.store.kept_positions(state[self.config.kv_source(index)])
            for index, block in enumerate(self.blocks)
        ]

    def bytes_per_session(self) -> int:
        """Bytes of cache that one session takes, counts and scales included; exact."""
        return sum(block.attention.bytes_per_session() for block in self.blocks)

    def call(
        self,
        token_ids: tf.Tensor,
        positions: tf.Tensor | None = None,
        state: list[State] | None = None,
        training: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, list[State]]:
        hidden, after = self.hidden_states(token_ids, positions, state, training)
        logits = self.logits(hidden)
        return (logits, after) if after else logits

    def hidden_states(
        self,
        token_ids: tf.Tensor,
        positions: tf.Tensor | None = None,
        state: list[State] | None = None,
        training: bool = False,
    ) -> tuple[tf.Tensor, list[State]]:
        """All of `call` but the output matrix, for callers that need few of the logits.

        Returns:
            Hidden states ``[B, T, D]`` after the final norm, and the state (empty where
            none was given).
        """
        token_ids = tf.cast(token_ids, tf.int32)
        if positions is None:
            first = state[0]["filled"] if state else 0
            positions = consecutive_positions(token_ids >= 0, first)
        positions = tf.where(token_ids >= 0, tf.cast(positions, tf.int32), -1)
        x = self.embed(token_ids, positions)
        states = state or [{}] * len(self.blocks)
        after: list[State] = []
        shared: dict[int, KeysValues] = {}
        for index, block in enumerate(self.blocks):
            source = self.config.kv_source(index)
            x, own, *made = block(
                x,
                positions=positions,
                state=states[source],
                training=training,
                kv=shared.get(source),
                return_kv=index in self.shared_layers,
            )
            for kv in made:
                shared[index] = kv
            after.append(own)
        return self.final_norm(x), after if state else []

    def embed(self, token_ids: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """What the first block gets, ``[B, T, D]``, of ``token_ids [B, T]`` at ``positions
        [B, T]``, both −1 where padded."""
        x = self.token_embedding(tf.maximum(token_ids, 0))
        if self.config.embedding_scale != 1:
            x *= tf.cast(self.config.embedding_scale, x.dtype)
        if self.config.positions.kind == "learned":
            table = tf.convert_to_tensor(self.position_embedding)
            x += tf.cast(tf.gather(table, tf.maximum(positions, 0)), x.dtype)
        return self.embedding_norm(x) if self.config.norms.embedding else x

    def logits(self, hidden: tf.Tensor) -> tf.Tensor:
        """Scores of every token, float32 ``[..., V]``, for ``hidden [..., D]``."""
        matrix = tf.cast(tf.convert_to_tensor(self._output_matrix), hidden.dtype)
        rows = tf.reshape(hidden, [-1, self.config.hidden_dim])
        scores = tf.cast(tf.matmul(rows, matrix, transpose_b=True), tf.float32)
        scores = soft_cap(scores, self.config.final_soft_cap)
        shape = tf.concat([tf.shape(hidden)[:-1], [self.config.vocabulary_size]], axis=0)
        scores = tf.reshape(scores, shape)
        return tf.ensure_shape(scores, [*hidden.shape[:-1], self.config.vocabulary_size])

    @functools.cached_property
    def generator(self) -> Generator:
        """What `tfkv.generation.generate` compiled for this model."""
        from tfkv.generation import Generator

        return Generator(self)

    @property
    def _output_matrix(self) -> keras.Variable:
        if self.config.tie_embeddings:
            return self.token_embedding.embeddings
        return self.output_embedding

    def _named_weights(self) -> dict[str, keras.Variable]:
        named = _found(self, _MODEL_WEIGHTS)
        for index, block in enumerate(self.blocks):
            own = _found(block, _BLOCK_WEIGHTS)
            named |= {f"layers/{index}/{name}": weight for name, weight in own.items()}
        return named

    def export_weights(self) -> dict[str, np.ndarray]:
        """All weights by canonical name, in the shapes of `assign_weights`."""
        return {name: np.asarray(weight) for name, weight in self._named_weights().items()}

    def assign_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        """Sets all weights.

        Args:
            weights: By canonical name: ``token_embedding [V, D]``; for each layer
                ``layers/{i}/query [D, N, H]``, ``key`` and ``value [D, K, H]``,
                ``attention_output [N, H, D]``, ``attention_norm`` and
                ``feedforward_norm [D]``, ``gate`` and ``up [D, F]``, ``down [F, D]``;
                ``final_norm [D]``; ``output [V, D]`` if the embeddings are not tied; and those
                of the options that the model has, as in
                `tfkv.export.importers.expected_tensors`.

        Raises:
            ModelSourceError: A weight is missing, unknown or of the wrong shape; none is
                set then.
        """
        named = self._named_weights()
        for problem, names in (
            ("lacks", set(named) - set(weights)),
            ("has an unknown", set(weights) - set(named)),
        ):
            if names:
                raise ModelSourceError(
                    f"`weights` {problem} {sorted(names)[0]!r} ({len(names)} such names). "
                    "Compare them with those of `export_weights`."
                )
        for name, weight in named.items():
            if tuple(weights[name].shape) != tuple(weight.shape):
                raise ModelSourceError(
                    f"`weights[{name!r}]` must have shape {tuple(weight.shape)}. "
                    f"Received: shape={tuple(weights[name].shape)}."
                )
        for name, weight in named.items():
            weight.assign(weights[name])

    def get_config(self) -> dict[str, Any]:
        caches = [cache.to_config() for cache in self.caches]
        return {
            "name": self.name,
            "trainable": self.trainable,
            "dtype": serialize_policy(self.dtype_policy),
            "config": self.config.to_dict(),
            "cache": caches[0] if all(cache == caches[0] for cache in caches) else caches,
            "capacity": self.capacity,
            "slack": self.slack,
        }


def _found(owner: Any, paths: Mapping[str, str]) -> dict[str, keras.Variable]:
    """Weights by name, of those paths that lead somewhere."""
    found = {}
    for name, path in paths.items():
        weight = owner
        for step in path.split("."):
            weight = getattr(weight, step, None)
        if weight is not None:
            found[name] = weight
    return found


def _of_layers(
    cache: AnyCache | Sequence[AnyCache],
    config: DecoderConfig,
    calibration: CalibrationTables | None,
) -> list[CacheSpec]:
    several = cache if isinstance(cache, Sequence) and not isinstance(cache, str) else [cache]
    for one in several:
        check_fit(CacheSpec.parse(one), config.positions.kind)
    if isinstance(cache, (str, CacheSpec, Mapping)):
        layers, heads = config.num_layers, config.num_key_value_heads
        return layer_caches(CacheSpec.parse(cache), layers, heads, (), calibration)
    if len(cache) != config.num_layers:
        raise ConfigError(
            f"`cache` must be one cache, or one for each of {config.num_layers} layers. "
            f"Received: {len(cache)} caches."
        )
    return [CacheSpec.parse(one) for one in cache]

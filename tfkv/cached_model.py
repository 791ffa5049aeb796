"""Generation for Keras models of one's own, whose layers keep caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers import CachedMultiHeadAttention
from tfkv.layers.continuation import Continuation
from tfkv.layers.positions import consecutive_positions
from tfkv.layers.store import State

if TYPE_CHECKING:
    from tfkv.generation import Generator
    from tfkv.samplers import SamplingParams

__all__ = ["CachedModel"]

#: What conditions a generation, by name, each ``[B, ...]``.
Context = Mapping[str, Any]

#: Caches of all layers and the context: ``{"caches": [...], "context": {...}}``.
Sessions = dict[str, Any]

_PROBE = 6


class CachedModel:
    """Runs a Keras model, tokens to logits, from the caches of its attention layers.

    Choose it for a functional or subclassed model that is not a `CausalLM`: with norms,
    feed-forward layers and wiring of its own, trained with `fit` as it is. Its attention layers
    are `CachedMultiHeadAttention` or `DecoderBlock`, and `CachedCrossAttention` for what an
    encoder made, all called without a state; here they find their caches by themselves, each with
    the policy and codec that it was made with.

    Nothing else in the model may look at other tokens: a convolution over time or a
    `keras.layers.MultiHeadAttention` would see a chunk in place of the text. `check` finds out,
    and runs before the first generation.

    Args:
        model: Keras model, or what is called like one.
        call: ``call(tokens, positions, context)`` returns the logits ``[B, T, V]`` of tokens
            ``[B, T]`` at absolute positions ``[B, T]`` (−1 = padding); needed where the model
            takes more than tokens. Where left out, ``model(tokens)``.
        pad_token: What stands for padding in the tokens that the model gets.

    Example:
        >>> cached = CachedModel(model)
        >>> cached.generate([[1, 2, 3], [4]], max_new_tokens=8)
        >>> seq2seq = CachedModel(model, lambda t, p, c: model([c["source"], t]))
        >>> seq2seq.generate([[1]], max_new_tokens=8, context={"source": [[5, 6, 7]]})
    """

    def __init__(
        self,
        model: Any,
        call: Callable[[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]], tf.Tensor] | None = None,
        pad_token: int = 0,
    ) -> None:
        self.model = model
        self.pad_token = pad_token
        self._call = call
        self._begin = tf.function(self._first_states, autograph=False)
        self._vocabulary_size = 0
        self._layers: list[Any] = []
        self._checked = False

    @property
    def vocabulary_size(self) -> int:
        """Width of the logits (axis V)."""
        if not self._vocabulary_size:
            self.begin(1)
        return self._vocabulary_size

    @property
    def layers(self) -> list[Any]:
        """Layers with a cache, in the order of their calls; a layer called twice stands twice."""
        if not self._layers:
            self.begin(1)
        return list(self._layers)

    @property
    def most_tokens(self) -> int:
        """Tokens a session may hold; −1 = any number, of which the policies keep a part."""
        limits = [layer.store.capacity for layer in self._own()]
        return min((limit for limit in limits if limit >= 0), default=-1)

    def bytes_per_session(self) -> int:
        """Bytes of cache that one session takes, counts and scales included; exact."""
        return sum(layer.store.bytes_per_session() for layer in self.layers)

    def _own(self) -> list[Any]:
        """Layers that attend to the text itself."""
        return [layer for layer in self.layers if isinstance(layer, CachedMultiHeadAttention)]

    def begin(self, batch_size: int, context: Context | None = None) -> Sessions:
        """Sessions that hold no token yet, and all that layers keep of the context.

        An encoder runs here, and nowhere else: the model is called once, on padding alone.

        Args:
            batch_size: Sessions (axis B).
            context: What `call` gets beside tokens, each ``[B, ...]``.

        Raises:
            ConfigError: The model has no layer with a cache, or the context has other rows.
        """
        given = {name: tf.convert_to_tensor(value) for name, value in (context or {}).items()}
        for name, value in given.items():
            if value.shape[:1] != (batch_size,):
                raise ConfigError(
                    f"`context[{name!r}]` must have {batch_size} rows, one for each prompt. "
                    f"Received: shape={value.shape}."
                )
        if self._layers and len(self._own()) == len(self._layers):
            caches = [layer.init_state(batch_size) for layer in self._layers]
            return {"caches": caches, "context": given}
        caches = self._begin(tf.fill([batch_size, 1], -1), given)
        if not any("filled" in state for state in caches):
            raise ConfigError(
                "The model called no layer with a cache. Expected CachedMultiHeadAttention or "
                "DecoderBlock of tfkv.layers in it, called without a state. A model of "
                "keras-nlp is exported with `tfkv.export.export`."
            )
        return {"caches": caches, "context": given}

    def _first_states(self, tokens: tf.Tensor, context: dict[str, tf.Tensor]) -> list[State]:
        scope = Continuation(tokens, None, encodes=True)
        with scope:
            logits = self._logits(tokens, tokens, context)
        self._vocabulary_size = logits.shape[-1]
        self._layers = scope.layers
        return scope.after

    def init_state(self, batch_size: int) -> Sessions:
        """As `begin`, without a context."""
        return self.begin(batch_size)

    def no_hidden(self, batch_size: int) -> tf.Tensor:
        """Stands for the last hidden state before there is one, ``[B, V]``."""
        return tf.zeros([batch_size, self.vocabulary_size])

    def hidden_states(
        self,
        token_ids: tf.Tensor,
        positions: tf.Tensor | None = None,
        state: Sessions | None = None,
    ) -> tuple[tf.Tensor, Sessions]:
        """A chunk through the model: its logits, which stand for hidden states here.

        Args:
            token_ids: int32 ``[B, T]``, −1 = padding.
            positions: int32 ``[B, T]``; where left out, each row follows on what it holds.
            state: As of `begin` or of the call before; None = no cache.

        Returns:
            float32 ``[B, T, V]``, and the state after the chunk.
        """
        if state is None:
            places = consecutive_positions(token_ids >= 0)
            return self._logits(token_ids, places, {}), {}
        caches, context = state["caches"], state["context"]
        if positions is None:
            first = next(own["filled"] for own in caches if "filled" in own)
            positions = consecutive_positions(token_ids >= 0, first)
        positions = tf.where(token_ids >= 0, positions, -1)
        scope = Continuation(positions, caches)
        with scope:
            logits = self._logits(token_ids, positions, context)
        return logits, {"caches": scope.after, "context": context}

    def logits(self, hidden: tf.Tensor) -> tf.Tensor:
        """`hidden` as it is: the model has made logits of it already."""
        return hidden

    def _logits(
        self, tokens: tf.Tensor, positions: tf.Tensor, context: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        tokens = tf.where(tokens >= 0, tokens, self.pad_token)
        if self._call is None:
            logits = self.model(tokens, training=False)
        else:
            logits = self._called(tokens, positions, context)
        if getattr(logits, "shape", None) is None or logits.shape.rank != 3:
            raise ConfigError(
                "The model must give logits [B, T, V]. Received: "
                f"{getattr(logits, 'shape', type(logits).__name__)}. Give `call`, which picks "
                "them out of what the model returns."
            )
        return tf.cast(logits, tf.float32)

    def _called(
        self, tokens: tf.Tensor, positions: tf.Tensor, context: dict[str, tf.Tensor]
    ) -> tf.Tensor:
        """The logits as `call` gives them."""
        try:
            return self._call(tokens, positions, context)  # type: ignore[misc]
        except KeyError as error:
            if error.args[0] in context:
                raise
            raise ConfigError(
                f"`call` needs {error} of the context. Received: context has "
                f"{sorted(context) or 'nothing'}. Give it to `generate`; an artifact's calls give "
                "none, so that an encoder-decoder cannot be exported."
            ) from error

    @functools.cached_property
    def generator(self) -> Generator:
        """What is compiled for this model."""
        from tfkv.generation import Generator

        return Generator(self)

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_tokens: Sequence[int] = (),
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        context: Context | None = None,
    ) -> list[list[int]]:
        """Continues each prompt. Prompts and decode steps are compiled once for a batch size.

        Args:
            token_ids: B prompts of any lengths, none of them empty.
            max_new_tokens: Most tokens for each.
            stop_tokens: End a row; the one that did is included. At most 8.
            temperature: 0 = greedy, and what follows does not count then.
            top_k: Most likely tokens kept; 0 = all.
            top_p: Probability mass kept; 1 = all.
            min_p: Least probability, as a share of the top one; 0 = any.
            seed: Random stream of the first row; the next has the number after it.
            context: What `call` gets beside tokens, each ``[B, ...]``, such as an encoder's
                input.

        Returns:
            New tokens of each row.

        Raises:
            ConfigError: An argument is out of range, prompt and answer do not fit the caches, or
                the model does not give the same logits in pieces as at once.
        """
        rows = len(token_ids)
        if not self._checked:
            self.check(context)
        sampling = _sampling(rows, temperature, top_k, top_p, min_p, seed)
        start = self.begin(rows, context)
        return self.generator.generate(token_ids, max_new_tokens, stop_tokens, sampling, start)

    def check(self, context: Context | None = None) -> None:
        """Reads a few tokens at once and one by one, and compares the logits.

        Args:
            context: As of `generate`; its first row is used.

        Raises:
            ConfigError: They differ: something in the model looks at other tokens, or counts
                positions by itself.
        """
        one = {name: tf.convert_to_tensor(value)[:1] for name, value in (context or {}).items()}
        first = self.begin(1, one)
        numbers = [n for n in range(self.vocabulary_size) if n != self.pad_token]
        text = tf.constant([np.resize(numbers[:: max(len(numbers) // _PROBE, 1)], _PROBE)])
        text = tf.cast(text, tf.int32)
        whole, _ = self.hidden_states(text, state=first)
        state, pieces = first, []
        for token in tf.split(text, _PROBE, axis=1):
            logits, state = self.hidden_states(token, state=state)
            pieces.append(logits)
        gap = float(tf.reduce_max(tf.abs(tf.concat(pieces, axis=1) - whole)))
        size = float(tf.reduce_max(tf.abs(whole)))
        if not gap <= _tolerance(self.model) * max(size, 1.0):
            raise ConfigError(
                "A model must give the same logits whether it reads tokens at once or one by "
                f"one. Received: logits up to {size:.3g} that differ by {gap:.3g}. Does a layer "
                "that is not of tfkv.layers look at other tokens, or count positions from 0? Give "
                "`call`, which hands the model absolute positions."
            )
        self._checked = True


def _tolerance(model: Any) -> float:
    """How far logits of the compute dtype may differ by rounding, as a share of the largest."""
    policy = getattr(model, "dtype_policy", None)
    computed = {getattr(policy, "compute_dtype", "float32")}
    computed |= {getattr(layer, "compute_dtype", "float32") for layer in _layers_of(model)}
    return 0.05 if computed & {"bfloat16", "float16"} else 1e-3


def _layers_of(model: Any) -> list[Any]:
    flatten = getattr(model, "_flatten_layers", None)
    return list(flatten()) if flatten is not None else []


def _sampling(
    rows: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> SamplingParams:
    from tfkv.samplers import SamplingParams

    return SamplingParams(
        temperature=tf.fill([rows], float(temperature)),
        top_p=tf.fill([rows], float(top_p)),
        min_p=tf.fill([rows], float(min_p)),
        repetition_penalty=tf.ones([rows]),
        top_k=tf.fill([rows], int(top_k)),
        seed=tf.range(rows, dtype=tf.int64) + tf.constant(seed, tf.int64),
    )

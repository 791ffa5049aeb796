"""Configuration of the decoder and of the engine that serves it.

Standard library only, so that the client can read what an artifact says of
itself without the TensorFlow runtime.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

from tfkv.architecture import (
    Attention,
    BlockOptions,
    Experts,
    FeedForward,
    Norms,
    Positions,
    Rope,
    of_layers,
    read,
    require,
)


def described(cache: object, layer_caches: Iterable[str]) -> str:
    """A cache and its exceptions, for people and as a key."""
    return "; ".join([str(cache), *layer_caches])


#: Fields of `DecoderConfig` that are dataclasses of their own.
_PARTS = {
    "positions": Positions,
    "attention": Attention,
    "norms": Norms,
    "feed_forward": FeedForward,
    "experts": Experts,
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a decoder, independent of where its weights come from.

    The sizes alone describe a Llama; other families differ from it in options, which
    `tfkv.architecture` explains.

    Args:
        vocabulary_size: Rows of the embedding matrix.
        num_layers: Decoder blocks (axis L).
        hidden_dim: Width of the residual stream (axis D).
        num_query_heads: Query heads (axis N).
        num_key_value_heads: Key/value heads (axis K); N is a multiple of K.
        head_dim: Width of a head (axis H); even, where RoPE turns all of it.
        intermediate_dim: Width of the feed-forward layer (axis F).
        rope_max_wavelength: RoPE base ("theta"), where `positions` does not name others.
        rms_epsilon: Added to the mean square, or the variance, in norms.
        context_length: Positions the model was trained on, in tokens.
        tie_embeddings: Whether the output matrix is the embedding matrix.
        positions: How a token's position is known.
        attention: Windows, soft cap, biases and the like.
        norms: Which, and where.
        feed_forward: Its shape.
        experts: Of layers that have several feed-forward layers; None = no layer has.
        parallel_residual: Whether attention and the feed-forward layer read the same input,
            each through its own norm.
        embedding_scale: What embeddings are multiplied by.
        final_soft_cap: Logits are squeezed below it; 0 = they are not.

    Raises:
        ConfigError: A value is out of range, or two do not fit together.
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
    positions: Positions = Positions()
    attention: Attention = Attention()
    norms: Norms = Norms()
    feed_forward: FeedForward = FeedForward()
    experts: Experts | None = None
    parallel_residual: bool = False
    embedding_scale: float = 1.0
    final_soft_cap: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in (*_PARTS, "final_soft_cap") and not isinstance(value, bool):
                require(value > 0, field.name, "must be greater than 0", value)
        require(
            self.num_query_heads % self.num_key_value_heads == 0,
            "num_query_heads",
            f"must be a multiple of num_key_value_heads={self.num_key_value_heads}",
            self.num_query_heads,
        )
        for name, cls in _PARTS.items():
            object.__setattr__(self, name, read(cls, getattr(self, name)))
        require(
            self.final_soft_cap >= 0, "final_soft_cap", "must not be below 0", self.final_soft_cap
        )
        of_layers(self.attention.windows, self.num_layers, "windows")
        of_layers(self.positions.of_layers, self.num_layers, "of_layers")
        for rope in self.ropes:
            rope.check(self.head_dim)
        self._check_shared()
        self._check_experts()

    def _check_shared(self) -> None:
        shared = of_layers(self.attention.share_kv_with, self.num_layers, "share_kv_with")
        turned = self.rope_of_layers
        alike = all(source < 0 or turned[n] == turned[source] for n, source in enumerate(shared))
        rule = "must name layers of the same rotation: keys are shared as they were turned"
        require(alike, "share_kv_with", rule, shared)

    def _check_experts(self) -> None:
        if self.experts is None:
            return
        layers, known = self.experts.layers, range(self.num_layers)
        rule = f"must be numbers of the {self.num_layers} layers"
        require(all(layer in known for layer in layers), "layers", rule, layers)
        plain = FeedForward(self.feed_forward.activation)
        rule = "must be gated and without a bias where there are experts"
        require(self.feed_forward == plain, "feed_forward", rule, self.feed_forward)

    @property
    def query_group_size(self) -> int:
        """Query heads that share one key/value head (axis G)."""
        return self.num_query_heads // self.num_key_value_heads

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by."""
        return self.attention.query_scale or self.head_dim**-0.5

    @property
    def final_epsilon(self) -> float:
        """Epsilon of the last norm."""
        return self.norms.final_epsilon or self.rms_epsilon

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Rotations that layers choose from; none where positions are no rotation."""
        if self.positions.kind != "rope":
            return ()
        return self.positions.ropes or (Rope(self.rope_max_wavelength),)

    @property
    def rope_of_layers(self) -> tuple[int, ...]:
        """Which of `ropes` each layer has; -1 = none."""
        default = 0 if self.ropes else -1
        return self.positions.of_layers or (default,) * self.num_layers

    def rope(self, layer: int) -> Rope | None:
        """Rotation of a layer; None = it has none."""
        number = self.rope_of_layers[layer]
        return self.ropes[number] if number >= 0 else None

    def window(self, layer: int) -> int:
        """Newest tokens that a layer's queries see; 0 = all."""
        return self.attention.windows[layer] if self.attention.windows else 0

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, where it does not share."""
        shared = self.attention.share_kv_with
        return shared[layer] if shared and shared[layer] >= 0 else layer

    def experts_of(self, layer: int) -> Experts | None:
        """Experts of a layer, where it has any."""
        experts = self.experts
        has = experts is not None and (not experts.layers or layer in experts.layers)
        return experts if has else None

    def block_options(self, layer: int) -> BlockOptions:
        """Options of one block."""
        rope, plain = self.rope(layer), Rope(self.rope_max_wavelength)
        return BlockOptions(
            rope=None if rope == plain else rope,
            alibi_scale=self.positions.alibi_scale if self.positions.kind == "alibi" else 0.0,
            window=self.window(layer),
            attention=dataclasses.replace(self.attention, windows=(), share_kv_with=()),
            norms=self.norms,
            feed_forward=self.feed_forward,
            experts=self.experts_of(layer),
            parallel_residual=self.parallel_residual,
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields; options that are off are left out, so that a plain Llama reads as ever."""
        return {
            field.name: value
            for field, value in zip(
                dataclasses.fields(self), dataclasses.asdict(self).values(), strict=True
            )
            if field.name not in OPTIONS or getattr(self, field.name) != field.default
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        return read(cls, data)


#: Fields of `DecoderConfig` that a Llama does without.
OPTIONS = frozenset({*_PARTS, "parallel_residual", "embedding_scale", "final_soft_cap"})


#: What weight matrices of an artifact can be stored as, with the bytes of a number.
WEIGHT_TYPES = {"float32": 4, "bfloat16": 2, "int8": 1}


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
        pool_bytes: Bytes of the page pool; 0 means room for every slot at full capacity. Where
            layers keep different tokens it is shared out so that all slots can be equally long.
        tenant_sessions: Most sessions one tenant may hold; 0 means any number.
        scan_pages: Pages attention reads at once (see docs/decisions).
        head_budgets: Entries of each KV head of each layer, for a policy that evicts and whose
            budget a calibration has shared out; empty = the same for all.
        repeat: Token ids of what asks a model to repeat its text, for a policy that has it do so
            (``kvzip``); the exporter writes them down.
        layer_caches: Layers that have another codec than `cache`, another window, or both, as
            exceptions of `tfkv.layers.layer_caches`: ``("0-7=sliding_window(window=512)",)``.
        weights: What weight matrices are stored as, one of `WEIGHT_TYPES`. ``"int8"``: a scale for
            each output, and activations rounded to 15 bits a token; a quarter of the bytes, the
            fastest. ``"bfloat16"``: half of them, nothing else rounded.
        speculation: Who guesses what a session says next, so that several tokens are checked in
            one step, such as ``prompt_lookup(tokens=7,ngram=3)``; empty = nobody. Tokens are the
            same; see docs/speculation.md for where it pays.
        xla: Whether prefill and decode are compiled with XLA.
        text: Whether the artifact has ``generate_text`` as well, text in and out; some 100 MB.

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
    repeat: tuple[int, ...] = ()
    layer_caches: tuple[str, ...] = ()
    weights: str = "float32"
    speculation: str = ""
    xla: bool = True
    text: bool = False

    def __post_init__(self) -> None:
        require(
            not isinstance(self.layer_caches, str),
            "layer_caches",
            "must be several strings, such as ('0-1=int8',)",
            self.layer_caches,
        )
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        object.__setattr__(self, "repeat", tuple(self.repeat))
        object.__setattr__(self, "layer_caches", tuple(self.layer_caches))
        object.__setattr__(self, "head_budgets", tuple(map(tuple, self.head_budgets)))
        for name in ("slots", "capacity", "page_size", "decode_chunk", "prefill_tokens"):
            require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        require(
            self.weights in WEIGHT_TYPES,
            "weights",
            f"must be one of {', '.join(WEIGHT_TYPES)}",
            self.weights,
        )
        for name in ("max_enqueued_batches", "ttl_ms", "scan_pages", "shared_prefill_tokens"):
            require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        for name in ("batch_timeout_us", "history", "pool_bytes", "tenant_sessions"):
            require(getattr(self, name) >= 0, name, "must not be negative", getattr(self, name))
        sizes = self.batch_sizes
        require(
            bool(sizes) and sizes[0] >= 1 and list(sizes) == sorted(set(sizes)),
            "batch_sizes",
            "must be ascending positive numbers without repeats",
            sizes,
        )

        # A repeated call must find all that it gave and got, and the token before it.
        least = self.prefill_tokens + self.decode_chunk + 1
        require(
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
        return read(cls, data)

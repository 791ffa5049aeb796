"""What decoders differ in beside their sizes: the options of `tfkv.config.DecoderConfig`.

Each option is off unless it is named, and one that is off costs nothing: neither a weight nor
an operation. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from tfkv.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def require(holds: bool, name: str, rule: str, received: Any) -> None:
    """Raises `ConfigError` where a value breaks a rule."""
    if not holds:
        raise ConfigError(f"`{name}` {rule}. Received: {name}={received!r}.")


def read(cls: type, data: Any) -> Any:
    """An instance from a dict of its fields; anything but a dict as it is."""
    if not isinstance(data, dict):
        return data
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(
            f"`{cls.__name__}` has no field {unknown[0]!r}. "
            f"Known fields: {', '.join(sorted(known))}."
        )
    return cls(**data)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: pairs of channels of queries and keys turn with the position.

    Every scaling of RoPE divides the frequencies by numbers that the position does not change;
    `linear`, `llama3` and `yarn` work them out.

    Args:
        max_wavelength: Base of the frequencies ("theta").
        channels: First channels of a head that turn; 0 = all of them.
        divisors: What each pair's frequency is divided by; one number for all, one for each
            pair, or none.
        magnitude: What cosines and sines are multiplied by.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Su et al., RoFormer, https://arxiv.org/abs/2104.09864
    """

    max_wavelength: float = 10000.0
    channels: int = 0
    divisors: tuple[float, ...] = ()
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "divisors", tuple(map(float, self.divisors)))
        require(self.max_wavelength > 0, "max_wavelength", "must be above 0", self.max_wavelength)
        require(self.magnitude > 0, "magnitude", "must be above 0", self.magnitude)
        require(all(d > 0 for d in self.divisors), "divisors", "must be above 0", self.divisors)
        channels = self.channels
        require(channels >= 0 and channels % 2 == 0, "channels", "must be 0 or even", channels)

    def check(self, head_dim: int) -> None:
        """Whether it fits heads of a width.

        Raises:
            ConfigError: It does not.
        """
        turned = self.channels or head_dim
        require(turned % 2 == 0, "head_dim", "must be even for RoPE", head_dim)
        require(turned <= head_dim, "channels", f"must be at most head_dim={head_dim}", turned)
        pairs = turned // 2
        rule = f"must be none, one, or one for each of {pairs} pairs"
        require(len(self.divisors) in (0, 1, pairs), "divisors", rule, self.divisors)

    def linear(self, factor: float) -> Rope:
        """Positions divided by a factor: https://arxiv.org/abs/2306.15595."""
        return self if factor == 1 else dataclasses.replace(self, divisors=(factor,))

    def llama3(
        self, head_dim: int, factor: float, low: float, high: float, original: float
    ) -> Rope:
        """The scaling of Llama 3.1: long wavelengths are divided, short ones are not.

        Args:
            head_dim: Width of a head (axis H).
            factor: What long wavelengths are divided by.
            low: A pair that turns less often than this in `original` positions is divided.
            high: One that turns more often is not; in between it is so in part.
            original: Positions of the first training.

        Reference:
            https://arxiv.org/abs/2407.21783
        """

        def divisor(frequency: float) -> float:
            turns = original * frequency / (2 * math.pi)
            share = min(max((turns - low) / (high - low), 0.0), 1.0)
            return 1 / ((1 - share) / factor + share)

        return dataclasses.replace(self, divisors=tuple(map(divisor, self._frequencies(head_dim))))

    def yarn(
        self,
        head_dim: int,
        factor: float,
        original: float,
        fast: float = 32.0,
        slow: float = 1.0,
        truncate: bool = True,
    ) -> Rope:
        """YaRN: pairs that turn `fast` times in `original` positions stay as they are, those
        that turn `slow` times are divided by `factor`, in between it goes by their number.

        Args:
            head_dim: Width of a head (axis H).
            factor: How much longer the context becomes.
            original: Positions of the first training.
            fast: Turns from which on nothing changes.
            slow: Turns below which all does.
            truncate: Whether the bounds are rounded outwards to whole pairs.

        Reference:
            Peng et al., https://arxiv.org/abs/2309.00071
        """
        width = self.channels or head_dim

        def pair(turns: float) -> float:
            wavelengths = math.log(original / (turns * 2 * math.pi))
            return width * wavelengths / (2 * math.log(self.max_wavelength))

        low, high = pair(fast), pair(slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)

        def divisor(number: int) -> float:
            ramp = min(max((number - low) / max(high - low, 0.001), 0.0), 1.0)
            return 1 / (ramp / factor + 1 - ramp)

        return dataclasses.replace(
            self,
            divisors=tuple(map(divisor, range(width // 2))),
            magnitude=0.1 * math.log(factor) + 1,
        )

    def _frequencies(self, head_dim: int) -> list[float]:
        width = self.channels or head_dim
        return [self.max_wavelength ** (-2 * pair / width) for pair in range(width // 2)]


@dataclasses.dataclass(frozen=True)
class Positions:
    """How a decoder knows where a token stands.

    Args:
        kind: ``"rope"`` turns queries and keys; ``"learned"`` adds a vector of a table to each
            token; ``"alibi"`` lowers scores with the distance.
        ropes: Rotations that layers choose from; where left out, plain RoPE of the model's
            `rope_max_wavelength`.
        of_layers: Which of `ropes` each layer has, −1 = none; where left out, the first.
        alibi_scale: What the slopes of ALiBi are multiplied by.

    Raises:
        ConfigError: A value is out of range, or they contradict each other.

    Reference:
        Press et al., ALiBi, https://arxiv.org/abs/2108.12409; layers without positions:
        Yang et al., https://arxiv.org/abs/2501.18795
    """

    kind: str = "rope"
    ropes: tuple[Rope, ...] = ()
    of_layers: tuple[int, ...] = ()
    alibi_scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ropes", tuple(read(Rope, rope) for rope in self.ropes))
        object.__setattr__(self, "of_layers", tuple(self.of_layers))
        kinds = ("rope", "learned", "alibi")
        require(self.kind in kinds, "kind", f"must be one of {', '.join(kinds)}", self.kind)
        turned = self.kind == "rope" or not (self.ropes or self.of_layers)
        require(turned, "ropes", f"must be left out for {self.kind!r} positions", self.ropes)
        known = range(-1, max(len(self.ropes), 1))
        rule = "must be -1 or the number of one of `ropes`"
        require(all(n in known for n in self.of_layers), "of_layers", rule, self.of_layers)
        alike = len({rope.channels for rope in self.ropes}) <= 1
        require(alike, "ropes", "must turn the same number of channels in all layers", self.ropes)
        require(self.alibi_scale > 0, "alibi_scale", "must be above 0", self.alibi_scale)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Options of attention.

    Args:
        windows: Newest tokens that each layer's queries see, their own included; 0 = all. Where
            left out, all layers see all. It comes on top of what a cache keeps.
        soft_cap: Scores are squeezed below it: ``cap · tanh(score / cap)``; 0 = they are not.
        query_scale: What queries are multiplied by; 0 = 1/√H.
        query_key_epsilon: Queries and keys of each head pass an RMSNorm with this epsilon
            before they are turned; 0 = none.
        bias: Whether query, key and value projections add a bias.
        output_bias: Whether the output projection does.
        share_kv_with: For each layer the earlier one whose keys and values it reads, −1 = it has
            its own. Where left out, all have their own.

    Raises:
        ConfigError: A value is out of range, or a layer shares with a later one, or with one that
            shares itself.

    Reference:
        Keys and values of another layer: Brandon et al., CLA, https://arxiv.org/abs/2405.12981
    """

    windows: tuple[int, ...] = ()
    soft_cap: float = 0.0
    query_scale: float = 0.0
    query_key_epsilon: float = 0.0
    bias: bool = False
    output_bias: bool = False
    share_kv_with: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows))
        shared = tuple(self.share_kv_with)
        object.__setattr__(self, "share_kv_with", shared)
        for layer, source in enumerate(shared):
            rule = f"must give layer {layer} -1, or the number of an earlier layer"
            require(-1 <= source < layer, "share_kv_with", rule, shared)
            rule = f"must give layer {layer} one that has keys and values of its own"
            require(source < 0 or shared[source] < 0, "share_kv_with", rule, shared)
        require(all(w >= 0 for w in self.windows), "windows", "must not be below 0", self.windows)
        for name in ("soft_cap", "query_scale", "query_key_epsilon"):
            value = getattr(self, name)
            require(value >= 0, name, "must not be below 0", value)


@dataclasses.dataclass(frozen=True)
class Norms:
    """Normalisation in and around blocks. A norm before attention and one before the
    feed-forward layer are always there.

    Args:
        kind: ``"rms"``, or ``"layer"``: mean and bias as well.
        post_attention: Whether what attention adds is normalised.
        post_feedforward: Whether what the feed-forward layer adds is normalised.
        embedding: Whether embeddings are normalised.
        final_epsilon: Of the last norm; 0 = as in the blocks.

    Raises:
        ConfigError: A value is out of range.
    """

    kind: str = "rms"
    post_attention: bool = False
    post_feedforward: bool = False
    embedding: bool = False
    final_epsilon: float = 0.0

    def __post_init__(self) -> None:
        require(self.kind in ("rms", "layer"), "kind", "must be 'rms' or 'layer'", self.kind)
        epsilon = self.final_epsilon
        require(epsilon >= 0, "final_epsilon", "must not be below 0", epsilon)


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """The feed-forward layer.

    Args:
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` (its usual approximation) or
            ``"relu"``.
        gated: Whether what is activated multiplies a second product, "up".
        bias: Whether its products add a bias.

    Raises:
        ConfigError: The activation is unknown.
    """

    activation: str = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        rule = f"must be one of {', '.join(ACTIVATIONS)}"
        require(self.activation in ACTIVATIONS, "activation", rule, self.activation)


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of feed-forward layers, of which a router chooses some for each token.

    Args:
        count: Experts (axis E).
        top_k: How many of them a token passes.
        intermediate_dim: Width of an expert (axis F).
        normalize: Whether the weights of those chosen are divided by their sum.
        shared_dim: Width of an expert that every token passes, with a gate of its own; 0 = none.
        layers: Layers that have experts; where left out, all.

    Raises:
        ConfigError: A value is out of range.

    Reference:
        Jiang et al., Mixtral, https://arxiv.org/abs/2401.04088
    """

    count: int
    top_k: int
    intermediate_dim: int
    normalize: bool = False
    shared_dim: int = 0
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("count", "top_k", "intermediate_dim"):
            require(getattr(self, name) >= 1, name, "must be at least 1", getattr(self, name))
        rule = f"must be at most count={self.count}"
        require(self.top_k <= self.count, "top_k", rule, self.top_k)
        require(self.shared_dim >= 0, "shared_dim", "must not be below 0", self.shared_dim)


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """Options of one decoder block.

    Args:
        rope: Rotation of which there is more to say than its base; None = plain RoPE, or none,
            as the block's `rope_max_wavelength` says.
        alibi_scale: What the slopes of ALiBi are multiplied by; 0 = no ALiBi.
        window: Newest tokens that a query sees, its own included; 0 = all.
        attention: The rest of attention's; its tables of layers do not count.
        norms: Which, and where.
        feed_forward: Shape of the feed-forward layer.
        experts: Of a block that has several; their `layers` do not count.
        parallel_residual: Whether attention and the feed-forward layer read the same input.
    """

    rope: Rope | None = None
    alibi_scale: float = 0.0
    window: int = 0
    attention: Attention = Attention()
    norms: Norms = Norms()
    feed_forward: FeedForward = FeedForward()
    experts: Experts | None = None
    parallel_residual: bool = False

    def __post_init__(self) -> None:
        parts = {
            "rope": Rope,
            "attention": Attention,
            "norms": Norms,
            "feed_forward": FeedForward,
            "experts": Experts,
        }
        for name, cls in parts.items():
            object.__setattr__(self, name, read(cls, getattr(self, name)))


def of_layers(values: Iterable[int], layers: int, name: str) -> tuple[int, ...]:
    """A table of layers, which must be as long as there are layers, or empty.

    Raises:
        ConfigError: It is not.
    """
    table = tuple(values)
    rule = f"must be left out or have one number for each of {layers} layers"
    require(len(table) in (0, layers), name, rule, table)
    return table

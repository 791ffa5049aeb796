"""Drafts of what a session says next, taken from what it holds already."""

from __future__ import annotations

import dataclasses
from typing import Self

import tensorflow as tf

from tfkv.config import EngineConfig
from tfkv.errors import ConfigError
from tfkv.export.layer_groups import LayerGroups
from tfkv.layers.named_calls import known, lookup, read_sum
from tfkv.layers.shapes import shape_of


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Guesses that a session goes on as it did after the newest place that ends like it.

    Worth its while where answers repeat their prompts: editing, extracting, quoting, code. It
    costs no memory and no model. Nothing is guessed where nothing is found, and a batch without
    a guess takes the step that it would take without speculation.

    Args:
        tokens: Most tokens guessed at once (axis G).
        ngram: Most tokens at the end of a session that are looked for.
        shortest: Fewest of them that make a guess.

    Raises:
        ConfigError: An argument is out of range.

    Example:
        >>> str(PromptLookup.parse("prompt_lookup(tokens=7)"))
        'prompt_lookup(tokens=7,ngram=3,shortest=2)'

    Reference:
        - [Saxena, 2023](https://github.com/apoorvumang/prompt-lookup-decoding)
        - [Yang et al., 2023](https://arxiv.org/abs/2304.04487)
    """

    tokens: int = 7
    ngram: int = 3
    shortest: int = 2

    name = "prompt_lookup"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"`{field.name}` of {self.name!r} must be an integer of at least 1. Received: "
                    f"{field.name}={value!r}."
                )
        if self.shortest > self.ngram:
            raise ConfigError(
                f"`shortest` of {self.name!r} must not exceed ngram={self.ngram}. Received: "
                f"shortest={self.shortest}."
            )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Reads ``prompt_lookup(tokens=7,ngram=3,shortest=2)``; None of an empty text.

        Raises:
            ConfigError: The text is malformed, or a name is unknown; it suggests one.
        """
        if not text.strip():
            return None
        form = "prompt_lookup(name=value,...), for example 'prompt_lookup(tokens=7,ngram=3)'"
        calls = read_sum(text, "speculation", form)
        if len(calls) > 1:
            raise ConfigError(f"`speculation` must read {form}. Received: speculation={text!r}.")
        ((name, arguments),) = calls
        found = lookup({cls.name: cls}, name, "speculation")
        return found(**known(arguments, name, [field.name for field in dataclasses.fields(cls)]))

    def check_fit(self, groups: LayerGroups, engine: EngineConfig) -> None:
        """Refuses an artifact whose steps cannot read guesses.

        Raises:
            ConfigError: A call samples fewer tokens than a guess and the one behind it, or the
                policy selects what each token reads.
        """
        if self.tokens >= engine.decode_chunk:
            raise ConfigError(
                f"`tokens` of {self.name!r} must be below decode_chunk={engine.decode_chunk}, the "
                f"tokens that a call samples. Received: tokens={self.tokens}."
            )
        policy = groups.first.cache.policy
        if policy.selects:
            raise ConfigError(
                f"{policy.name!r} selects pages for one token at a time, and speculation reads "
                f"several at once. Choose 'dense', a window or a policy that evicts with it, or "
                f"{policy.name!r} without speculation. Received: cache={engine.cache!r}, "
                f"speculation={engine.speculation!r}."
            )

    def __str__(self) -> str:
        pairs = (f"{key}={value}" for key, value in dataclasses.asdict(self).items())
        return f"{self.name}({','.join(pairs)})"

    def guess(self, text: tf.Tensor, length: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What comes next in each row.

        The longest end that is found counts, and of equally long ones the newest. Where it lies
        so near the end that the text behind it is shorter than a guess, that text is repeated.

        Args:
            text: int32 ``[B, S]``, the newest S tokens at most; the one at position p has place
                ``p mod S``.
            length: int32 ``[B]``, tokens so far, all of which count, the forgotten ones too.

        Returns:
            int32 ``[B, G]``, and bool ``[B]``, whether anything was found.
        """
        size = shape_of(text)[1]
        last = length[:, tf.newaxis] - 1
        back = tf.math.floormod(last - tf.range(size), size)  # how far each place is from the end
        oldest = tf.minimum(last, size - 1)
        alike, goes_on = tf.zeros_like(text), tf.ones_like(text, tf.bool)
        for step in range(self.ngram):
            end = tf.gather(text, tf.math.floormod(last - step, size), batch_dims=1)
            goes_on &= (tf.roll(text, step, axis=1) == end) & (back + step <= oldest)
            alike += tf.cast(goes_on, tf.int32)
        alike = tf.where(back > 0, alike, 0)
        best = tf.reduce_max(alike, axis=1)
        ends = alike == best[:, tf.newaxis]
        nearest = tf.reduce_min(tf.where(ends & (back > 0), back, size), axis=1)[:, tf.newaxis]
        places = last - nearest + 1 + tf.range(self.tokens) % nearest
        guessed = tf.gather(text, tf.math.floormod(places, size), batch_dims=1)
        return guessed, best >= self.shortest

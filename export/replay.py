"""A session's text repeated, for a policy that keeps what it takes to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.export.attention_mass import Questions
from tfkv.export.decoder import PackedDecoder, Reading
from tfkv.export.exact_tail import Tails
from tfkv.export.kept_tokens import Evicted
from tfkv.export.layer_pools import Layer
from tfkv.export.packed_blocks import Weights
from tfkv.export.page_pool import Parts
from tfkv.layers import attention
from tfkv.layers.attention import Partial
from tfkv.prefix_compression import CHUNK, LEAD

#: Slots and absolute positions ``[..., n]`` to the tokens that are there.
TokensAt = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


class Replay:
    """Lets a model repeat the text of a session to itself, a chunk at a time, and has what the
    repetition looks at for the mass of the text.

    It is what `tfkv.prefix_compression.PrefixCompressor` does in a Keras model. What is said
    lies behind the session's own tokens and nowhere else than in the computation: no page is
    taken for it, and nothing of it stays but the mass. It is read exactly where the codec keeps
    the newest tokens so.

    Args:
        decoder: Over its pool.
        repeat: Token ids of what asks for the repetition.
        piece: Tokens read at once.
        history: Tokens that a session remembers.

    Raises:
        ConfigError: A session forgets what it would have to repeat.
    """

    def __init__(
        self, decoder: PackedDecoder, repeat: Sequence[int], piece: int, history: int
    ) -> None:
        least = min(decoder.groups.entries, decoder.config.context_length)
        if decoder.kept.repeats and history < least:
            raise ConfigError(
                f"`history` must be 0 or at least {least} where a policy has a text repeated, so "
                f"that all of it is remembered. Received: history={history}."
            )
        self._decoder = decoder
        self._repeat = tuple(repeat)
        self._piece = piece
        self._pieces = -(-(len(self._repeat) + LEAD + CHUNK) // piece)

    def __call__(
        self,
        weights: Weights,
        parts: Parts,
        rows: Evicted,
        tails: Tails,
        tokens_at: TokensAt,
        due: tf.Tensor,
    ) -> Parts:
        """The cache in which rows that are ``due [B]``, and have not evicted yet, have the mass of
        their repetition; the same cache where the policy does not ask for one.

        Args:
            weights: Of `read_weights`.
            parts: The cache.
            rows: Fields ``[B, ...]``; all their tokens are on pages.
            tails: Fields ``[B]``.
            tokens_at: What the sessions said.
            due: bool ``[B]``.
        """
        if not self._decoder.kept.repeats:
            return parts
        due = due & (rows.floor == 0)
        order = tf.argsort(tf.cast(~due, tf.int32), stable=True)

        def body(index: tf.Tensor, mass: dict[str, tf.Tensor]) -> tuple:
            which = tf.gather(order, index)
            row = Evicted(*(tf.gather(field, which) for field in rows))
            own = Tails(*(tf.gather(field, which)[tf.newaxis] for field in tails))
            said = self._of_row(weights.of_row(which), {**parts, "mass": mass}, row, own, tokens_at)
            return index + 1, said["mass"]

        times = tf.reduce_sum(tf.cast(due, tf.int32))
        state = (tf.constant(0), dict(parts["mass"]))
        _, mass = tf.while_loop(lambda index, _: index < times, body, state)
        return {**parts, "mass": mass}

    def _of_row(
        self, weights: Weights, parts: Parts, row: Evicted, tails: Tails, tokens_at: TokensAt
    ) -> Parts:
        """The cache with the mass of one row's repetition."""
        decoder, config, piece = self._decoder, self._decoder.config, self._piece
        table, start, floor = (x[tf.newaxis] for x in (row.table, row.start, row.floor))
        # Layers are alike where tokens are evicted: one group.
        scans = decoder.scan((table,), start, floor, tf.constant([True]))
        shape = [1, config.num_key_value_heads, self._pieces * piece, config.head_dim]
        nothing = tf.zeros([config.num_layers, *shape])
        column = tf.range(self._pieces * piece)

        def body(
            item: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, mass: dict[str, tf.Tensor]
        ) -> tuple:
            chunk, nth = item // self._pieces, item % self._pieces
            tokens, place = self._said(chunk, nth * piece + tf.range(piece), row, tokens_at)
            positions = tf.where(place >= 0, row.start + place, -1)[tf.newaxis]
            before = tf.where(column < nth * piece, row.start + column, -1)[tf.newaxis]
            reading = Reading(parts, positions, scans, tails, alone=False)
            here, back = decoder.looks(positions, positions), decoder.looks(positions, before)

            def attend(layer: Layer, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor) -> Partial:
                old_k, old_v = ({"codes": side[layer.number]} for side in (keys, values))
                seen = attention.merge(
                    decoder.attend_fresh(layer, q, old_k, old_v, back),
                    decoder.attend_fresh(layer, q, {"codes": k}, {"codes": v}, here),
                )
                return decoder.attend_cache(reading, layer, q, seen)

            # Learned positions end with the trained context, and a repetition may lie behind it.
            last = config.context_length - 1
            x = decoder.embed(weights, tokens[tf.newaxis], tf.minimum(positions, last))
            _, fresh = decoder.layers(weights, x, positions, attend)
            since = tf.where(item == 0, 0, start)  # what was read before counts for nothing
            asked = Questions(
                row.slot[tf.newaxis], table, floor, start, since, positions, fresh.queries
            )
            added = decoder.mass.add({**parts, "mass": mass}, asked)
            written = (column // piece == nth)[:, tf.newaxis]
            keys, values = (
                tf.where(written, tf.tile(new, [1, 1, 1, self._pieces, 1]), old)
                for new, old in ((fresh.keys, keys), (fresh.values, values))
            )
            return item + 1, keys, values, added["mass"]

        state = (tf.constant(0), nothing, nothing, dict(parts["mass"]))
        items = self._items(row.start)
        *_, mass = tf.while_loop(lambda item, *_: item < items, body, state)
        return {**parts, "mass": mass}

    def _items(self, length: tf.Tensor) -> tf.Tensor:
        """Pieces of the repetition of so many tokens: all those of whole chunks, and of the last
        one those that have a token."""
        whole = tf.maximum(length - 1, 0) // CHUNK
        rest = len(self._repeat) + tf.where(whole > 0, LEAD, 0) + length - whole * CHUNK
        return whole * self._pieces + (rest + self._piece - 1) // self._piece

    def _said(
        self, chunk: tf.Tensor, place: tf.Tensor, row: Evicted, tokens_at: TokensAt
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Tokens at ``place [T]`` of what is said for a chunk, and the places; −1 = none there."""
        asks = len(self._repeat)
        begin = chunk * CHUNK
        at = begin - tf.minimum(LEAD, begin) + place - asks
        live = at < tf.minimum(begin + CHUNK, row.start)
        tokens = tokens_at(row.slot, tf.where(live, tf.maximum(at, 0), 0))
        if asks:
            asking = tf.gather(tf.constant(self._repeat, tf.int32), tf.minimum(place, asks - 1))
            tokens = tf.where(place < asks, asking, tokens)
        return tf.where(live, tokens, 0), tf.where(live, place, -1)

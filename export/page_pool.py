"""Keys and values of all sessions, on pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfkv.config import DecoderConfig
from tfkv.export.transient import TransientVariable
from tfkv.layers import page_bounds
from tfkv.layers.codecs import CacheCodec, Codec, Coded

#: Parts of pools by side ("keys", "values"; see `PagePool`) and part name; what else is in it,
#: such as an `ExactTail` under "exact", goes through as it is.
Parts = dict[str, dict[str, tf.Tensor]]

_Scatter = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


class PagePool:
    """The store behind every policy of an artifact, of the layers of a group that share a codec
    and read alike: mostly all.

    Each part of a code is one variable, ``[pages · L, K, ..., C]`` of keys and
    ``[pages · L, K, C, ...]`` of values: the layouts that both products of attention read
    fastest. Row ``page · L + layer`` holds a page of a layer, so that a whole page is
    contiguous over its layers; here L and ``layer`` count the pool's own layers. Page 0 is
    nobody's: rows that must not be stored are written there.

    The pool is read as plain tensors inside one computation and assigned back at its end:
    XLA then updates it in place.

    Args:
        config: Architecture.
        codec: How numbers are written.
        layers: Whose, ascending.
        pages: Pages, page 0 included (axis P).
        page_size: Tokens a page (axis C).
        number: Of the pool, among those of an engine.
        selects: Whether its layers select pages, by bounds of the keys on each: float16
            ``[pages · L, K, 2H]``.
        group: Number of its layers' group; see `LayerGroups`.

    Attributes:
        sides: What its keys and its values are called in `Parts`.
        bounds: What its bounds are called there.
    """

    def __init__(
        self,
        config: DecoderConfig,
        codec: CacheCodec,
        layers: Sequence[int],
        pages: int,
        page_size: int,
        number: int = 0,
        selects: bool = False,
        group: int = 0,
    ) -> None:
        self.config = config
        self.group = group
        self.codec = codec
        self.layers = tuple(layers)
        self.pages = pages
        self.page_size = page_size
        self.selects = selects
        self.sides = ("keys", "values") if number == 0 else (f"keys_{number}", f"values_{number}")
        self.bounds = f"bounds_{number}"
        lead = (pages * len(self.layers), config.num_key_value_heads)
        codec.check(config.head_dim)
        keys, values = self.sides
        codecs = zip(self.sides, codec.sides().values(), strict=True)
        spec = {side: one.spec(config.head_dim) for side, one in codecs}
        shapes = {
            keys: {n: (*lead, *p.shape, page_size // p.tokens) for n, p in spec[keys].items()},
            values: {n: (*lead, page_size // p.tokens, *p.shape) for n, p in spec[values].items()},
        }
        self.variables = {
            side: {
                name: TransientVariable(f"pool_{side}_{name}", shape, spec[side][name].dtype)
                for name, shape in parts.items()
            }
            for side, parts in shapes.items()
        }
        if selects:
            bounds = TransientVariable(
                f"pool_{self.bounds}", (*lead, 2 * config.head_dim), page_bounds.DTYPE
            )
            self.variables[self.bounds] = {"keys": bounds}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return sum(variable.nbytes for variable in self._all())

    def read(self) -> Parts:
        """All parts as tensors."""
        return {
            side: {name: v.read() for name, v in parts.items()}
            for side, parts in self.variables.items()
        }

    def assign(self, parts: Parts) -> None:
        """Publishes what a computation wrote."""
        for side, variables in self.variables.items():
            for name, variable in variables.items():
                variable.assign(parts[side][name])

    def gather(self, parts: Parts, pages: tf.Tensor, layer: tf.Tensor) -> tuple[Coded, Coded]:
        """Coded keys ``[A, K, ..., C]`` and values ``[A, K, C, ...]`` of ``pages [A]`` in the
        pool's own ``layer``."""
        rows = pages * len(self.layers) + layer
        keys, values = (
            {name: tf.gather(part, rows) for name, part in parts[side].items()}
            for side in self.sides
        )
        return keys, values

    def gather_heads(self, parts: Parts, units: tf.Tensor) -> tuple[Coded, Coded]:
        """As `gather` of single KV heads, ``[A, 1, ...]``.

        Args:
            parts: The pool.
            units: int32 ``[A]``, ``(page · L + layer) · K + head``, in the pool's own layers.
        """
        keys, values = (
            {
                name: tf.gather(tf.reshape(part, [-1, *part.shape[2:]]), units)[:, tf.newaxis]
                for name, part in parts[side].items()
            }
            for side in self.sides
        )
        return keys, values

    def gather_bounds(self, parts: Parts, pages: tf.Tensor, layer: tf.Tensor) -> tf.Tensor:
        """Bounds ``[B, K, P, 2H]`` of ``pages [B, P]`` in the pool's own ``layer``."""
        found = tf.gather(parts[self.bounds]["keys"], pages * len(self.layers) + layer)
        return tf.transpose(found, [0, 2, 1, 3])

    @property
    def codec_of_layers(self) -> CacheCodec:
        """The codec of its layers, all of them at once."""
        if len(self.layers) == self.config.num_layers:
            return self.codec
        return self.codec.of_layers(tf.constant(self.layers))

    def own(self, x: tf.Tensor, axis: int = 0) -> tf.Tensor:
        """Of something of all layers, that of the pool's."""
        if len(self.layers) == self.config.num_layers:
            return x
        return tf.gather(x, self.layers, axis=axis)

    def copy(self, parts: Parts, sources: tf.Tensor, targets: tf.Tensor) -> Parts:
        """Copies whole pages.

        Args:
            parts: The pool.
            sources: int32, any shape; 0 = nothing to copy.
            targets: int32, same shape.
        """
        sources, targets = tf.reshape(sources, [-1]), tf.reshape(targets, [-1])
        count = tf.reduce_sum(tf.cast(sources > 0, tf.int32))
        layers = tf.range(len(self.layers))

        def compact() -> tf.Tensor:
            return tf.argsort(tf.cast(sources == 0, tf.int32), stable=True)

        order = tf.cond(count > 0, compact, lambda: tf.zeros_like(sources))

        def body(index: tf.Tensor, parts: Parts) -> tuple[tf.Tensor, Parts]:
            pair = tf.gather(order, index)
            source = tf.gather(sources, pair) * len(self.layers) + layers
            target = tf.gather(targets, pair) * len(self.layers) + layers
            copied = {
                side: {
                    name: tf.tensor_scatter_nd_update(
                        part, target[:, tf.newaxis], tf.gather(part, source)
                    )
                    for name, part in parts[side].items()
                }
                for side in self.variables
            }
            return index + 1, {**parts, **copied}

        return tf.while_loop(lambda index, _: index < count, body, (tf.constant(0), parts))[1]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all its layers and parts."""
        return self.nbytes // self.pages

    def read_raw(self, pages: tf.Tensor) -> list[tf.Tensor]:
        """Pages as they are stored, uint8 ``[B, n]``: keys before values before bounds,
        parts in the codec's order, layers in theirs."""
        rows = self._rows_of(pages)
        taken = []
        for variable in self._all():
            part = tf.bitcast(tf.gather(variable.read(), rows), tf.uint8)
            taken.append(tf.reshape(part, [tf.size(pages), variable.nbytes // self.pages]))
        return taken

    def write_raw(self, pages: tf.Tensor, numbers: tf.Tensor) -> None:
        """Puts back what `read_raw` gave, without touching any other page.

        Args:
            pages: int32 ``[B]``; 0 = nowhere.
            numbers: uint8 ``[B, page_bytes]``.
        """
        rows = self._rows_of(pages)
        sizes = [variable.nbytes // self.pages for variable in self._all()]
        for variable, part in zip(self._all(), tf.split(numbers, sizes, axis=1), strict=True):
            shape = [tf.size(pages), len(self.layers), *variable.shape[1:]]
            width = variable.dtype.size
            part = tf.reshape(part, shape if width == 1 else [*shape, width])
            tf.raw_ops.ResourceScatterUpdate(
                resource=variable.resource_handle,
                indices=rows,
                updates=tf.bitcast(part, variable.dtype),
            )

    def _all(self) -> list[TransientVariable]:
        """Every part, in one order."""
        return [variable for parts in self.variables.values() for variable in parts.values()]

    def _rows_of(self, pages: tf.Tensor) -> tf.Tensor:
        """Rows of the parts, int32 ``[B, L]``."""
        layers = len(self.layers)
        return pages[:, tf.newaxis] * layers + tf.range(layers)

    def write(
        self,
        parts: Parts,
        pages: tf.Tensor,
        offsets: tf.Tensor,
        keys: tf.Tensor,
        values: tf.Tensor,
    ) -> Parts:
        """Stores tokens of its layers, but for keys that are coded together: see
        `page_groups.write_key_groups`.

        Args:
            parts: The pool.
            pages: int32 ``[M]``, page of each token; 0 = nowhere.
            offsets: int32 ``[M]``, place within the page.
            keys: float ``[L, M, K, H]``, of all layers.
            values: Likewise.

        Returns:
            The pool with the tokens in it.
        """
        rows, offsets = rows_of_tokens(self.config, pages, offsets, layers=len(self.layers))
        of_keys, of_values = self.sides

        def side(name: str, codec: Codec, x: tf.Tensor, scatter: _Scatter) -> dict[str, tf.Tensor]:
            coded = self._encode(codec, self.own(x))
            return {n: scatter(part, rows, offsets, coded[n]) for n, part in parts[name].items()}

        codec = self.codec_of_layers
        written = {of_values: side(of_values, codec.values, values, scatter_rows)}
        if codec.keys.tokens == 1:
            written[of_keys] = side(of_keys, codec.keys, keys, scatter_columns)
        return {**parts, **written}

    def _encode(self, codec: Codec, x: tf.Tensor) -> Coded:
        """Codes of ``x [L, M, K, H]``, parts ``[L, M, K, ...]``."""
        if not self.codec.needs_calibration:
            return codec.encode(x)
        # Tables of each head want heads before tokens.
        coded = codec.encode(tf.transpose(x, [0, 2, 1, 3]))
        return {name: tf.transpose(part, [0, 2, 1, 3]) for name, part in coded.items()}


def rows_of_tokens(
    config: DecoderConfig,
    owners: tf.Tensor,
    offsets: tf.Tensor,
    heads: int | None = None,
    layers: int | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Where tokens lie in a part ``[owners · L, K, ...]``, in all its layers and KV heads.

    Args:
        config: Architecture.
        owners: int32 ``[M]``, pages, or slots.
        offsets: int32 ``[M]``, place of each token there.
        heads: Heads of the part; KV heads where left out.
        layers: Layers of the part; those of the model where left out.

    Returns:
        int32 ``[L · M · K]``: rows of the first two axes taken together, and places.
    """
    heads = config.num_key_value_heads if heads is None else heads
    layers = config.num_layers if layers is None else layers
    of_layer = tf.range(layers)[:, tf.newaxis, tf.newaxis]
    rows = owners[tf.newaxis, :, tf.newaxis] * layers + of_layer
    rows = rows * heads + tf.range(heads)
    offsets = tf.broadcast_to(offsets[tf.newaxis, :, tf.newaxis], tf.shape(rows))
    return tf.reshape(rows, [-1]), tf.reshape(offsets, [-1])


def scatter_rows(
    part: tf.Tensor, rows: tf.Tensor, offsets: tf.Tensor, updates: tf.Tensor
) -> tf.Tensor:
    """Writes tokens ``[M, ...]`` to ``part [R, K, C, ...]``; XLA does it in place.

    Args:
        part: A part of the pool.
        rows: int32 ``[M]``, rows of its first two axes taken together.
        offsets: int32 ``[M]``, places within the page.
        updates: The tokens, in any shape.
    """
    size, *inner = part.shape[2:]
    flat = tf.reshape(part, [part.shape[0] * part.shape[1] * size, *inner])
    places = (rows * size + offsets)[:, tf.newaxis]
    flat = tf.tensor_scatter_nd_update(flat, places, tf.reshape(updates, [-1, *inner]))
    return tf.reshape(flat, part.shape)


def scatter_columns(
    part: tf.Tensor, rows: tf.Tensor, offsets: tf.Tensor, updates: tf.Tensor
) -> tf.Tensor:
    """Writes tokens ``[M, X]`` to columns of ``part [R, K, X, C]``; see `scatter_rows`."""
    flat, places = _columns(part, rows, offsets)
    places = tf.reshape(places, [-1, 2])
    flat = tf.tensor_scatter_nd_update(flat, places, tf.reshape(updates, [-1]))
    return tf.reshape(flat, part.shape)


def gather_columns(part: tf.Tensor, rows: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    """Tokens ``[M, X]`` that `scatter_columns` would write."""
    return tf.gather_nd(*_columns(part, rows, offsets))


def _columns(part: tf.Tensor, rows: tf.Tensor, offsets: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """``part [R, K, X, C]`` as a matrix, and int32 ``[M, X, 2]`` where tokens lie in it."""
    inner, size = part.shape[2:]
    flat = tf.reshape(part, [part.shape[0] * part.shape[1] * inner, size])
    lines = rows[:, tf.newaxis] * inner + tf.range(inner)
    columns = tf.broadcast_to(offsets[:, tf.newaxis], tf.shape(lines))
    return flat, tf.stack([lines, columns], axis=-1)

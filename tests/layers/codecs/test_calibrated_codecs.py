"""Codecs with tables of a calibration against NumPy, on random numbers and on those of SmolLM2."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import reference
import tensorflow as tf

from tfkv import sample_text
from tfkv.causal_lm import CausalLM
from tfkv.errors import ConfigError
from tfkv.export import model_text
from tfkv.export.importers import load
from tfkv.layers import CacheSpec, DenseStore
from tfkv.layers.codecs import CacheCodec
from tfkv.layers.codecs.packing import codes_together, pack, unpack
from tfkv.moments import Moments, allocate

LAYER, TOKENS, HEADS, WIDTH = 12, 192, 3, 64
CACHES = (
    "low_rank(rank=24,bits=16)",
    "low_rank(rank=32,bits=8)",
    "low_rank(rank=32,bits=4)",
    "block_gtq(bits=3)",
    "block_gtq(bits=4,sensitivity='sum')",
    "block_gtq(bits=4.5,segment=32)",
)


@dataclasses.dataclass
class Text:
    """What attention sees: queries ``[K, G·T, H]``, keys and values ``[K, T, H]``, kernels of the
    output projection ``[K, G, H, D]``, all float64."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    kernels: np.ndarray

    def outputs(self) -> np.ndarray:
        """Causal attention of all queries, ``[K, G·T, H]``."""
        scores = self.queries @ self.keys.swapaxes(1, 2) * WIDTH**-0.5
        tokens = self.keys.shape[1]
        at = np.arange(scores.shape[1])[:, None] % tokens
        scores = np.where(np.arange(tokens) <= at, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ self.values

    def moments(self) -> Moments:
        def mean_product(x: np.ndarray) -> np.ndarray:
            return (x.swapaxes(1, 2) @ x / x.shape[1])[np.newaxis]

        readers = np.einsum("kgid,kgjd->kij", self.kernels, self.kernels)
        return Moments(
            mean_product(self.queries),
            mean_product(self.keys),
            mean_product(self.outputs()),
            readers[np.newaxis],
            self.keys.mean(1)[np.newaxis],
        )


@pytest.fixture(scope="module")
def real() -> Text:
    """SmolLM2 on a real text, in one layer."""
    source = load("smollm2")
    text = model_text.encode(source, sample_text.language_reference()[:4000])[:TOKENS]
    model = CausalLM.from_weights(source.config, source.weights)
    x = model.token_embedding(text[np.newaxis])
    for block in model.blocks[:LAYER]:
        x, _ = block(x)
    block = model.blocks[LAYER]
    positions = tf.range(TOKENS)[tf.newaxis]
    found = block.attention.project_in(block.attention_norm(x), positions)
    queries, keys, values = (one.numpy()[0].astype(np.float64) for one in found)
    kernels = source.weights[f"layers/{LAYER}/attention_output"].reshape(HEADS, 3, WIDTH, -1)
    return Text(queries * WIDTH**0.5, keys, values, kernels.astype(np.float64))


@pytest.fixture(scope="module")
def random() -> Text:
    rng = np.random.default_rng(5)
    stretch = rng.uniform(0.1, 4, size=(HEADS, 1, WIDTH))
    queries, keys, values = (
        rng.normal(size=(HEADS, rows, WIDTH)) * stretch for rows in (150, 50, 50)
    )
    return Text(queries, keys + 2 * stretch, values, rng.normal(size=(HEADS, 3, WIDTH, 20)))


@pytest.fixture(params=["random", "real"])
def text(request) -> Text:
    return request.getfixturevalue(request.param)


def bound(cache: str, text: Text) -> CacheCodec:
    return CacheSpec.parse(cache).codec.bind(text.moments(), 0)


def read_back(codec: CacheCodec, side: str, x: np.ndarray) -> np.ndarray:
    return codec.sides()[side].round_trip(tf.constant(x[np.newaxis], tf.float32)).numpy()[0]


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("cache", CACHES)
def test_equals_the_reference(text: Text, cache: str, side: str):
    codec = bound(cache, text)
    x = getattr(text, side)
    tables = {n: np.asarray(tf.convert_to_tensor(t), np.float64) for n, t in codec.tables.items()}
    arguments = {"bits": str(codec.bits), "widths": str(getattr(codec, "widths", ""))}
    arguments["widths"] = arguments["widths"].replace(" ", "")
    by_token = np.swapaxes(x, 0, 1)
    expected = reference.stored_by_head(by_token, codec.name, side, arguments, tables)
    apart = np.abs(read_back(codec, side, x) - np.swapaxes(expected, 0, 1))
    # A code differs by one where float32 and float64 fall to different sides of a tie, or, of
    # float16, by a last bit: in few tokens.
    assert (apart.max(axis=-1) > 2e-3 * np.abs(x).max()).mean() < 0.01


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("cache", CACHES)
def test_folded_dots_equal_dots_of_decoded_numbers(random: Text, cache: str, columns: bool):
    codec = bound(cache, random)
    queries = tf.constant(random.queries[np.newaxis, :, :6] / 8, tf.float32)
    keys, values = (tf.constant(x[np.newaxis], tf.float32) for x in (random.keys, random.values))
    coded = codec.keys.encode(keys)
    expected = tf.matmul(queries, codec.keys.decode(coded), transpose_b=True)
    stored = {n: tf.linalg.matrix_transpose(t) for n, t in coded.items()} if columns else coded
    scores = codec.scores(codec.prepare(queries), stored, columns)
    np.testing.assert_allclose(scores, expected, atol=2e-5 * np.abs(expected).max())
    coded, weights = codec.values.encode(values), tf.nn.softmax(expected / 8)
    mixed = codec.finish(codec.mix(weights, coded))
    expected = tf.matmul(weights, codec.values.decode(coded))
    np.testing.assert_allclose(mixed, expected, atol=2e-5 * np.abs(values).max())


def test_low_rank_loses_of_scores_what_no_map_of_its_rank_can_save(text: Text):
    """The mean square error of scores is the sum of the eigenvalues that are left out (Eckart and
    Young); directions of the keys alone lose more."""
    rank, moments = 40, text.moments()
    tables = moments.low_rank(rank, 0)
    centred = text.keys - text.keys.mean(1, keepdims=True)
    lost = centred - centred @ tables["keys/down"] @ tables["keys/up"].swapaxes(1, 2)
    error = ((text.queries @ lost.swapaxes(1, 2)) ** 2).mean(axis=(1, 2))
    covariance = centred.swapaxes(1, 2) @ centred / centred.shape[1]
    product = np.linalg.eigvals(moments.queries[0] @ covariance).real
    least = np.sort(product)[:, : WIDTH - rank].sum(axis=1)
    # Small eigenvalues of what is inverted are raised: a ten-thousandth of the greatest.
    np.testing.assert_allclose(error, least, rtol=0.1)
    _, own = np.linalg.eigh(covariance)
    plain = centred - centred @ own[..., -rank:] @ own[..., -rank:].swapaxes(1, 2)
    assert (error < ((text.queries @ plain.swapaxes(1, 2)) ** 2).mean(axis=(1, 2))).all()


def test_low_rank_values_lose_least_behind_the_output_projection(real: Text):
    tables = real.moments().low_rank(32, 0)
    down, up = tables["values/down"], tables["values/up"]
    _, own = np.linalg.eigh(real.values.swapaxes(1, 2) @ real.values)
    mixed = real.outputs()

    def lost(kept: np.ndarray) -> float:
        gone = np.einsum("ktj,kgjd->kgtd", mixed - kept, real.kernels)
        return float((gone**2).mean())

    ours = lost(mixed @ down @ up.swapaxes(1, 2))
    assert ours < 0.5 * lost(mixed @ own[..., -32:] @ own[..., -32:].swapaxes(1, 2))


@pytest.mark.parametrize("total", [8, 13, 24, 64])
def test_bits_go_where_they_lower_the_error_most(total: int):
    sensitivity = np.array([5.0, 300.0, 0.2, 40.0, 1.0, 1.0, 7.0, 0.01])
    widths = np.array(allocate(sensitivity, total))
    assert widths.sum() == total and widths.min() >= 1 and widths.max() <= 8
    error = sensitivity * 4.0**-widths
    # No bit could be moved to lower the sum.
    for giver in np.flatnonzero(widths > 1):
        for taker in np.flatnonzero(widths < 8):
            if giver != taker:
                assert 3 * error[giver] >= 0.75 * error[taker] - 1e-12
    with pytest.raises(ConfigError, match="from 1 to 8 in the mean"):
        allocate(sensitivity, 65)


def test_channels_come_by_what_scores_lose_on_them_and_rope_turns_them_together(real: Text):
    moments = real.moments()
    centred = real.keys - real.keys.mean(1, keepdims=True)
    asked = (real.queries**2).mean(1).reshape(HEADS, 2, 32).sum(1)
    for kind in ("product", "sum"):
        stored = (centred**2 if kind == "product" else real.keys**2).mean(1)
        stored = stored.reshape(HEADS, 2, 32).sum(1)
        worth = asked * stored if kind == "product" else (asked + stored) / 2
        _, tables = moments.block_gtq(4, 16, kind, 0)
        for head in range(HEADS):
            segments = tables["order"][head].reshape(4, 2, 8)
            np.testing.assert_array_equal(segments[:, 0] + 32, segments[:, 1])
            ranked = worth[head][segments[:, 0].ravel()]
            assert (np.diff(ranked) <= 1e-6 * ranked[0]).all()


def test_scores_of_real_keys_lose_less_than_with_as_many_bits_for_each_channel(real: Text):
    def error(cache: str) -> float:
        lost = real.keys - read_back(bound(cache, real), "keys", real.keys)
        return float(((real.queries @ lost.swapaxes(1, 2)) ** 2).mean())

    given = error("block_gtq(bits=3)")
    assert given < 0.5 * error("block_gtq(bits=3,widths=(3,3,3,3))")
    assert given < error("block_gtq(bits=3,sensitivity='sum')")


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_codes_come_back(bits: int, axis: int):
    count = 3 * codes_together(bits)
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, 7, count)).astype(np.uint8)
    packed = pack(tf.constant(codes), bits)
    assert packed.shape == (5, 7, count * bits // 8)
    turned = tf.linalg.matrix_transpose(packed) if axis == -2 else packed
    back = unpack(turned, bits, axis).numpy()
    np.testing.assert_array_equal(back.swapaxes(1, 2) if axis == -2 else back, codes)


@pytest.mark.parametrize("cache", CACHES)
def test_bytes_are_known_before_a_calibration(random: Text, cache: str):
    plain, codec = CacheSpec.parse(cache).codec, bound(cache, random)
    assert plain.bytes_per_token(WIDTH) == codec.bytes_per_token(WIDTH)
    for side, x in (("keys", random.keys), ("values", random.values)):
        coded = codec.sides()[side].encode(tf.constant(x[np.newaxis], tf.float32))
        assert {n: (t.shape[3:], t.dtype) for n, t in coded.items()} == {
            n: (part.shape, part.dtype) for n, part in plain.sides()[side].spec(WIDTH).items()
        }


def test_tables_come_back_from_a_configuration(random: Text):
    spec = CacheSpec.parse("sliding_window+block_gtq(bits=3)")
    spec = dataclasses.replace(spec, codec=spec.codec.bind(random.moments(), 0))
    again = CacheSpec.parse(spec.to_config())
    assert again == spec and str(again) == str(spec)
    other = dataclasses.replace(random, keys=random.keys * 2)
    assert spec.codec != spec.codec.bind(other.moments(), 0)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("low_rank(rank=32)", "'low_rank' needs tables of a calibration.*`tfkv calibrate`"),
        ("block_gtq(bits=3)", "'block_gtq' needs tables of a calibration.*`tfkv calibrate`"),
        ("low_rank(rank=0)", "`rank` must be at least 1"),
        ("low_rank(rank=65)", "`rank` must be at most head_dim=64"),
        ("low_rank(bits=5)", "`bits` must be 4, 8 or 16"),
        ("low_rank(rnk=3)", "Did you mean 'rank'.*rank, bits, recent, sinks"),
        ("block_gtq(bits=9)", "`bits` must be from 1 to 8"),
        ("block_gtq(segment=12)", "`segment` must be a multiple of 8"),
        ("block_gtq(bits=3.3)", "add up to a whole number"),
        ("block_gtq(sensitivity='max')", "must be one of 'product', 'sum'"),
        ("block_gtq(bits=3,widths=(4,4))", "`widths` must be bits=3 in the mean"),
        ("block_gtq(bits=3,widths=(4,2))", "the bits of 4 segments"),
    ],
)
def test_what_cannot_be_is_refused(cache: str, message: str):
    with pytest.raises(ConfigError, match=message):
        DenseStore(cache, HEADS, WIDTH, capacity=32)

"""Codecs of few bits against NumPy, and against the types of ml_dtypes bit by bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import reference
import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers.codecs import CODECS, Float4Codec, IntegerBlocks
from tfkv.layers.codecs.block_codec import hadamard
from tfkv.layers.codecs.float4 import E2M1, decode_e4m3, encode_e2m1, encode_e4m3
from tfkv.layers.codecs.packing import pack, unpack

NAMES = ("int4", "k8v4", "k6v4", "k4v4", "nvfp4", "mxfp4", "int8_symmetric")
SIDES = [(name, side) for name in NAMES for side in ("keys", "values")]


def _numbers(shape=(2, 3, 50, 64)) -> np.ndarray:
    x = np.random.default_rng(7).normal(size=shape)
    x[..., 3] *= 20  # an outlier channel, as keys have
    return x.astype(np.float32)


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize(("name", "side"), SIDES)
def test_equals_the_reference(name: str, side: str, xla: bool):
    x, codec = _numbers(), CODECS[name].sides()[side]
    stored = tf.function(codec.round_trip, jit_compile=xla)(tf.constant(x)).numpy()
    expected = reference.stored(x.astype(np.float64), name, side)
    apart = np.abs(stored - expected) > 1e-4 * np.abs(x).max()
    # A code differs by one where float32 and float64 fall to different sides of a tie: at 64
    # codes of up to 2**8 levels, 2**-24 of each, that is less than 0.1 % of the tokens for
    # one rounding; quotient, rotation and scale round a few times each.
    assert apart.any(axis=-1).mean() < 0.01


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("name", "side"), SIDES)
def test_folded_dots_equal_dots_of_decoded_numbers(name: str, side: str, columns: bool):
    codec = CODECS[name].sides()[side]
    queries = tf.constant(np.random.default_rng(1).normal(size=(2, 3, 4, 64)), tf.float32)
    weights = tf.nn.softmax(tf.random.stateless_normal([2, 3, 4, 50], [1, 1]))
    coded = codec.encode(tf.constant(_numbers()))
    numbers = codec.decode(coded)
    scores = tf.einsum("akqh,aksh->akqs", queries, numbers).numpy()
    stored = {n: tf.linalg.matrix_transpose(t) for n, t in coded.items()} if columns else coded
    # Only `int8_symmetric` quantises the query: half a code of each channel.
    step = np.abs(queries).max() / 127 / 2 * np.abs(numbers).sum(-1).max()
    room = step if name == "int8_symmetric" else 3e-4
    np.testing.assert_allclose(
        codec.scores(codec.prepare(queries), stored, columns), scores, atol=room
    )
    mixed = tf.einsum("akqs,aksh->akqh", weights, numbers)
    np.testing.assert_allclose(codec.finish(codec.mix(weights, coded)), mixed, atol=2e-4)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("head_dim", [8, 32, 96, 128])
def test_blocks_and_bytes_need_not_divide_each_other(bits: int, head_dim: int):
    codec = IntegerBlocks(bits)
    queries = tf.random.stateless_normal([1, 1, 2, head_dim], [1, 2])
    coded = codec.encode(tf.constant(_numbers((1, 1, 7, head_dim))))
    numbers = codec.decode(coded)
    scores = tf.matmul(queries, numbers, transpose_b=True)
    np.testing.assert_allclose(codec.scores(queries, coded), scores, atol=3e-4)
    weights = tf.nn.softmax(scores)
    np.testing.assert_allclose(codec.mix(weights, coded), tf.matmul(weights, numbers), atol=3e-4)


@pytest.mark.parametrize("bits", [2, 4, 6, 8])
@pytest.mark.parametrize("axis", [-1, -2])
def test_packed_codes_come_back(bits: int, axis: int):
    codes = np.random.default_rng(0).integers(0, 2**bits, (5, 7, 16)).astype(np.uint8)
    packed = pack(tf.constant(codes), bits)
    assert packed.shape == (5, 7, 16 * bits // 8)
    turned = tf.linalg.matrix_transpose(packed) if axis == -2 else packed
    back = unpack(turned, bits, axis).numpy()
    np.testing.assert_array_equal(np.swapaxes(back, 1, 2) if axis == -2 else back, codes)


def test_e2m1_is_that_of_its_definition_at_every_tie_and_beyond():
    x = np.concatenate([np.linspace(-8, 8, 12_801), np.array([0.0, -0.0])]).astype(np.float32)
    expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    levels = np.array([*E2M1, *(-level for level in E2M1)], np.float32)
    np.testing.assert_array_equal(levels[encode_e2m1(tf.constant(x)).numpy()], expected)


@pytest.mark.parametrize("xla", [False, True])
def test_e4m3_is_that_of_its_definition_bit_by_bit(xla: bool):
    every = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    between = (every[1:] + every[:-1]) / 2
    ulp = np.float32(1 + 2.0**-20)
    x = np.concatenate([every, between, between * ulp, between / ulp]).astype(np.float32)
    codes = tf.function(encode_e4m3, jit_compile=xla)(tf.constant(x)).numpy()
    np.testing.assert_array_equal(codes, x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    np.testing.assert_array_equal(decode_e4m3(tf.constant(np.arange(127, dtype=np.uint8))), every)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_scales_are_bytes_of_the_standard(name: str):
    x = _numbers() * 10.0 ** np.random.default_rng(2).integers(-4, 2, (2, 3, 50, 1))
    x = x.astype(np.float32)
    block = {"nvfp4": 16, "mxfp4": 32}[name]
    most = np.abs(x.reshape(2, 3, 50, -1, block)).max(-1)
    if name == "nvfp4":
        wanted = np.clip(most / np.float32(6 / 16), 2.0**-9, 448)
        expected = wanted.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        expected = (np.floor(np.log2(most)) - 2 + 127).astype(np.uint8)
    np.testing.assert_array_equal(Float4Codec(name).encode(tf.constant(x))["scales"], expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_equal_numbers_stay_what_they_are(name: str, value: float):
    for codec in CODECS[name].sides().values():
        stored = codec.round_trip(tf.fill([1, 1, 1, 64], value))
        # float16 rounds scale and lowest number by 2**-11 each; a rotated constant is one
        # channel of √64 times its size; e4m3 rounds a scale by 2**-4.
        share = {"nvfp4": 2.0**-4}.get(name, 2 * 8 * 2.0**-11)
        np.testing.assert_allclose(stored, value, atol=share * abs(value))


def test_a_rotation_spreads_an_outlier_channel():
    x = tf.constant(_numbers())
    plain, turned = IntegerBlocks(4), IntegerBlocks(4, rotate=True)
    error = [float(tf.reduce_mean((c.round_trip(x) - x) ** 2)) for c in (plain, turned)]
    assert error[1] < error[0] / 2


@pytest.mark.parametrize("size", [1, 2, 64, 80, 96])
def test_the_rotation_is_its_own_inverse(size: int):
    matrix = np.array(hadamard(size))
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)


def test_a_head_that_blocks_do_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"multiple of 32.*head_dim=80.*int8"):
        IntegerBlocks(4).check(80)
    with pytest.raises(ConfigError, match="head_dim=6"):
        IntegerBlocks(6).spec(6)

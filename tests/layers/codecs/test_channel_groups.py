"""Keys coded by channel over groups of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import tensorflow as tf

from tfkv.errors import ConfigError
from tfkv.layers import CachedMultiHeadAttention
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.codecs import CODECS, ChannelGroups
from tfkv.layers.codecs.grouping import touched_groups


def _numbers(tokens: int = 64) -> np.ndarray:
    x = np.random.default_rng(7).normal(size=(2, 3, tokens, 64))
    x[..., 3] *= 20  # an outlier channel, as keys have
    return x.astype(np.float32)


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("bits", [4, 2])
def test_equals_the_reference(bits: int, xla: bool):
    x, codec = _numbers(), ChannelGroups(bits)
    stored = tf.function(codec.round_trip, jit_compile=xla)(tf.constant(x)).numpy()
    by_token = np.moveaxis(x.astype(np.float64), 2, 0)
    expected = np.moveaxis(reference.channel_groups(by_token, bits, 32), 0, 2)
    apart = np.abs(stored - expected) > 1e-4 * np.abs(x).max()
    # Of 32 numbers a code falls to the other side of a tie where float32 rounds: see
    # test_block_codecs.
    assert apart.mean() < 1e-3
    # Half a step of the channel's own range, and what float16 rounds of scale and zero.
    split = x.reshape(2, 3, 2, 32, 64)
    span = np.repeat(np.ptp(split, axis=3), 32, axis=2).reshape(x.shape)
    assert (np.abs(stored - x) <= span / (2**bits - 1) * 0.52 + 2e-3 * np.abs(x).max()).all()


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bits", [4, 2])
def test_folded_dots_equal_dots_of_decoded_numbers(bits: int, columns: bool):
    codec = ChannelGroups(bits)
    queries = tf.constant(np.random.default_rng(1).normal(size=(2, 3, 4, 64)), tf.float32)
    coded = codec.encode(tf.constant(_numbers()))
    numbers = codec.decode(coded)
    scores = tf.einsum("akqh,aksh->akqs", queries, numbers).numpy()
    stored = {n: tf.linalg.matrix_transpose(t) for n, t in coded.items()} if columns else coded
    # Sums of 64 products of up to 4 · 80, rounded in another order.
    np.testing.assert_allclose(codec.scores(queries, stored, columns), scores, atol=1e-3)
    weights = tf.nn.softmax(tf.random.stateless_normal([2, 3, 4, 64], [1, 1]))
    mixed = tf.einsum("akqs,aksh->akqh", weights, numbers)
    np.testing.assert_allclose(codec.mix(weights, coded), mixed, atol=1e-4)


def test_what_is_still_to_come_does_not_widen_a_group():
    x, codec = _numbers(32), ChannelGroups(4)
    there = np.arange(32) < 5
    garbage = np.where(there[:, None], x, 1e6).astype(np.float32)
    coded = codec.encode_groups(tf.constant(garbage), tf.constant(there))
    alone = codec.encode_groups(tf.constant(np.where(there[:, None], x, x[:, :, :1])), there)
    np.testing.assert_array_equal(coded["affine"], alone["affine"])
    stored = codec.decode(coded).numpy()[:, :, :5]
    assert np.abs(stored - x[:, :, :5]).max() < np.ptp(x[:, :, :5], axis=2).max() / 15


def test_new_tokens_touch_whole_groups():
    positions = tf.constant([[6, 7, 8, -1], [3, -1, -1, -1], [-1, -1, -1, -1]])
    touched = touched_groups(positions, 4)
    assert touched.positions.numpy().tolist() == [
        [4, 5, 6, 7, 8, -1, -1, -1],
        [0, 1, 2, 3, -1, -1, -1, -1],
        [-1] * 8,
    ]
    assert touched.fresh.numpy()[0].tolist() == [False, False, *[True] * 3, *[False] * 3]
    assert touched.fresh.numpy()[1].tolist() == [False] * 3 + [True] + [False] * 4
    assert touched.sources.numpy()[0, 2:5].tolist() == [0, 1, 2]


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("group", [32, 64])
def test_lengths_about_the_residual_and_the_group_are_right(group: int, extra: int):
    cache, length = f"kivi4(recent=64,sinks=0,group={group})", 64 + group + extra
    layer = CachedMultiHeadAttention(
        2, 32, 1, rope_max_wavelength=100.0, cache=cache, capacity=256, name="attention"
    )
    layer.build((None, None, 24))
    random = np.random.default_rng(0)
    layer.set_weights([random.normal(size=w.shape) * 24**-0.5 for w in layer.get_weights()])
    x = random.normal(size=(1, length, 24)).astype(np.float32)
    state, outputs = layer.init_state(1), []
    for token in range(length):
        output, state = layer(tf.constant(x[:, token : token + 1]), state=state)
        outputs.append(output.numpy()[0, 0])
    names = ("query", "key", "value", "output")
    weights = dict(zip(names, layer.get_weights(), strict=True))
    expected = reference.attention(x[0], weights, cache, base=100.0)
    apart = np.abs(np.array(outputs) - expected)
    # While nothing is read from a code it is exact; after that a code may fall the other way,
    # one of 15 steps of a range of 8, for one of so many tokens.
    assert apart[:64].max() < 2e-6
    assert apart.max() < 8 / 15 and np.quantile(apart, 0.99) < 1e-4
    coarse = reference.attention(x[0], weights, "float32", base=100.0)
    assert (np.abs(coarse - expected)[64:].max(axis=1) > 1e-4).all()


def test_a_group_is_coded_from_exact_numbers_however_it_was_filled():
    layer = CachedMultiHeadAttention(
        1, 32, 1, rope_max_wavelength=100.0, cache="kivi4(recent=64)", capacity=128
    )
    x = np.random.default_rng(3).normal(size=(1, 90, 24)).astype(np.float32)
    states = []
    for cuts in ([1] * 90, [33, 33, 24], [90]):
        state, first = layer.init_state(1), 0
        for width in cuts:
            _, state = layer(tf.constant(x[:, first : first + width]), state=state)
            first += width
        states.append(state)
    for state in states[1:]:
        for name, groups in (("keys/affine", 2), ("keys/codes", 64)):
            same = state[name].numpy()[:, :, :groups] == states[0][name].numpy()[:, :, :groups]
            # Projections of chunks of other widths round their last bit in another way.
            assert same.mean() > 0.99


@pytest.mark.parametrize(
    ("cache", "match"),
    [
        ("snapkv(budget=64)+kivi4", "keeps tokens one by one.*'int4'"),
        ("kivi4(recent=16)", "`recent` must be at least 32"),
        ("kivi4(group=1)", "`group` must be at least 2"),
        ("kivi4(goup=64)", "Did you mean 'group'"),
    ],
)
def test_what_cannot_work_is_refused(cache: str, match: str):
    with pytest.raises(ConfigError, match=match):
        CacheSpec.parse(cache)


def test_the_group_is_part_of_the_cache_string():
    text = "dense+kivi4(sinks=0,group=64)"
    spec = CacheSpec.parse(text)
    assert spec.codec.tokens == 64 and str(spec) == text
    # 32 bytes of codes a side, 4 · 64 / 64 of scales of keys, 8 of values.
    assert spec.codec.bytes_per_token(64) == 32 + 4 + 32 + 8
    assert CODECS["kivi4"].bytes_per_token(64) == 32 + 8 + 32 + 8
    with pytest.raises(ConfigError, match="multiple of 8"):
        CODECS["kivi4"].check(12)

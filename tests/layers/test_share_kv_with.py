from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from keras_weights import by_path

from tfkv.errors import CacheError, ConfigError
from tfkv.layers import CachedMultiHeadAttention, DecoderBlock
from tfkv.layers.keras_api import keras

HIDDEN = 24
#: A cache, and whether XLA compiles what reads it.
CACHES = [
    ("dense", False),
    ("dense", True),
    ("sliding_window(window=4,sinks=1)", False),
    ("int8", False),
    ("k8v4(recent=3,sinks=1)", True),
]


def _pair(cache: str = "dense", size: int = 8, **kwargs):
    """A layer, and one that reads its keys and values."""
    keras.utils.set_random_seed(3)
    options = {"rope_max_wavelength": 100.0, "capacity": 16, "cache": cache, **kwargs}
    first = CachedMultiHeadAttention(4, size, 2, name="first", **options)
    second = CachedMultiHeadAttention(4, size, 2, share_kv_with=first, name="second", **options)
    for layer in (first, second):
        layer.build((None, None, HIDDEN))
    return first, second


def _inputs(length: int = 9) -> list[tf.Tensor]:
    return [tf.random.stateless_normal([2, length, HIDDEN], [1, n]) for n in (2, 3)]


def test_equals_a_layer_with_those_projections():
    first, second = _pair()
    x, _ = _inputs()
    _, key, value, _ = first.get_weights()
    query, output = second.get_weights()
    whole = CachedMultiHeadAttention(4, 8, 2, 100.0, capacity=16)
    whole.build((None, None, HIDDEN))
    whole.set_weights([query, key, value, output])
    kv = first(x, return_kv=True)[2]
    np.testing.assert_allclose(second(x, kv=kv)[0], whole(x)[0], atol=2e-6)


def test_has_no_projection_of_keys_and_values_and_no_cache():
    first, second = _pair(query_key_epsilon=1e-5, use_bias=True)
    assert {path: tuple(w.shape) for path, w in by_path(second).items()} == {
        "second/query/kernel": (HIDDEN, 4, 8),
        "second/query/bias": (4, 8),
        "second/attention_output/kernel": (4, 8, HIDDEN),
        "second/attention_output/bias": (HIDDEN,),
        "second/query_norm/scale": (8,),
    }
    assert second.init_state(2) == second.get_state_spec(2) == {}
    assert second.bytes_per_session() == 0 < first.bytes_per_session()


@pytest.mark.parametrize(("cache", "xla"), CACHES)
def test_chunks_equal_the_whole(cache: str, xla: bool):
    first, second = _pair(cache, size=32)
    x, y = _inputs()

    def step(x: tf.Tensor, y: tf.Tensor, state: dict) -> tuple[tf.Tensor, dict]:
        _, after, kv = first(x, state=state, return_kv=True)
        output, own = second(y, state=state, kv=kv)
        assert own == {}
        return output, after

    step = tf.function(step, jit_compile=xla)
    expected, _ = step(x, y, first.init_state(2))
    state, pieces = first.init_state(2), []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        output, state = step(x[:, start:end], y[:, start:end], state)
        pieces.append(output)
    np.testing.assert_allclose(tf.concat(pieces, 1), expected, atol=5e-6)
    if cache == "dense":
        kv = first(x, return_kv=True)[2]
        np.testing.assert_allclose(second(y, kv=kv)[0], expected, atol=5e-6)


def test_padding_is_that_of_the_layer_it_shares_with():
    first, second = _pair()
    x, y = _inputs()
    mask = tf.constant([[True] * 9, [False] * 3 + [True] * 6])
    kv = first(x, mask=mask, return_kv=True)[2]
    output, _ = second(y, kv=kv)
    kv = first(x[1:, 3:], return_kv=True)[2]
    np.testing.assert_allclose(output[1:, 3:], second(y[1:, 3:], kv=kv)[0], atol=2e-6)


def test_refuses_layers_that_do_not_fit():
    first, second = _pair()
    with pytest.raises(ConfigError, match="shares those of 'first'. Name that one"):
        CachedMultiHeadAttention(4, 8, 2, share_kv_with=second)
    with pytest.raises(ConfigError, match="`num_key_value_heads` must be that of 'first'"):
        CachedMultiHeadAttention(4, 8, 4, share_kv_with=first)
    with pytest.raises(ConfigError, match="`cache` must be that of 'first'"):
        CachedMultiHeadAttention(4, 8, 2, 100.0, "int8", 16, share_kv_with=first)
    for cache in ("snapkv(budget=64)", "kivi4"):
        with pytest.raises(ConfigError, match="needs a cache that reads any chunk at once"):
            CachedMultiHeadAttention(4, 32, 2, cache=cache, share_kv_with="first")


def test_refuses_calls_that_do_not_fit():
    first, second = _pair()
    x, _ = _inputs()
    kv = first(x, return_kv=True)[2]
    with pytest.raises(CacheError, match="`kv` and `share_kv_with` belong together"):
        second(x)
    with pytest.raises(CacheError, match="`kv` and `share_kv_with` belong together"):
        first(x, kv=kv)
    with pytest.raises(CacheError, match="Pass on those that 'first' returned"):
        second(x, kv=kv, return_kv=True)
    with pytest.raises(CacheError, match="2 KV heads of width 8. Received: \\(1, 8\\)"):
        second(x, kv={name: value[:, :1] for name, value in kv.items()})


def test_trains_in_a_functional_model_and_comes_back_from_a_file(tmp_path):
    dtype = "mixed_bfloat16"
    keras.utils.set_random_seed(3)
    tokens = keras.Input([7], dtype="int32")
    x = keras.layers.Embedding(11, HIDDEN, mask_zero=True, dtype=dtype)(tokens)
    first = CachedMultiHeadAttention(4, 8, 2, 100.0, dtype=dtype, name="first")
    second = CachedMultiHeadAttention(
        4, 8, 2, 100.0, share_kv_with="first", dtype=dtype, name="second"
    )
    y, _, kv = first(x, return_kv=True)
    x = x + y
    x = x + second(x, kv=kv)[0]
    model = keras.Model(tokens, keras.layers.Dense(11, dtype="float32")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    text = (np.arange(256)[:, np.newaxis] + np.arange(8)) % 10 + 1
    before = model.get_weights()
    losses = model.fit(text[:, :7], text[:, 1:], epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert all(np.any(old != new) for old, new in zip(before, model.get_weights(), strict=True))
    path = str(tmp_path / "shared.keras")
    model.save(path)
    expected = model.predict(text[:4, :7], verbose=0)
    for other in (keras.models.load_model(path), keras.models.clone_model(model)):
        other.set_weights(model.get_weights())
        np.testing.assert_allclose(other.predict(text[:4, :7], verbose=0), expected, atol=1e-5)


def test_blocks_share_as_their_attention_does():
    keras.utils.set_random_seed(3)
    first = DecoderBlock(4, 2, 8, 40, capacity=16, name="first")
    second = DecoderBlock(4, 2, 8, 40, capacity=16, share_kv_with="first", name="second")
    for block in (first, second):
        block.build((None, None, HIDDEN))
    x, y = _inputs()
    kv = first(x, return_kv=True)[2]
    attended, _ = second.attention(second.attention_norm(y), kv=kv)
    expected = y + attended
    expected += second.feed_forward(expected)
    np.testing.assert_allclose(second(y, kv=kv)[0], expected, atol=2e-6)
    assert second.get_config()["share_kv_with"] == "first"

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from keras_weights import by_path

from tfkv.errors import CacheError, ConfigError
from tfkv.layers import CachedCrossAttention, CachedMultiHeadAttention
from tfkv.layers.keras_api import keras

HIDDEN, ENCODED = 24, 20
#: Rows of 7 and of 3 encoded tokens; the padding of the second is in front.
MASK = tf.constant([[True] * 7, [False] * 4 + [True] * 3])


def _layer(heads: int = 4, kv_heads: int | None = 2, **kwargs) -> CachedCrossAttention:
    keras.utils.set_random_seed(3)
    layer = CachedCrossAttention(heads, 8, kv_heads, **{"capacity": 9, **kwargs})
    layer(_queries(), _encoded())
    return layer


def _queries(length: int = 5) -> tf.Tensor:
    return tf.random.stateless_normal([2, length, HIDDEN], [1, 2])


def _encoded(length: int = 7) -> tf.Tensor:
    return tf.random.stateless_normal([2, length, ENCODED], [3, 4])


@pytest.mark.parametrize("use_bias", [False, True])
def test_equals_keras_multi_head_attention(use_bias: bool):
    layer = _layer(4, None, use_bias=use_bias)
    other = keras.layers.MultiHeadAttention(4, 8, use_bias=use_bias)
    other(_queries(), _encoded())
    weights = [np.random.default_rng(n).normal(size=w.shape) for n, w in enumerate(layer.weights)]
    layer.set_weights(weights)
    other.set_weights(weights)
    expected = other(_queries(), _encoded(), attention_mask=MASK[:, tf.newaxis])
    output, state = layer(_queries(), _encoded(), encoded_mask=MASK)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=2e-5)
    assert state == {}


@pytest.mark.parametrize(("kv_heads", "xla"), [(4, False), (2, False), (1, False), (2, True)])
def test_steps_that_read_the_cache_equal_one_pass(kv_heads: int, xla: bool):
    layer = _layer(4, kv_heads, soft_cap=3.0, query_key_epsilon=1e-5, query_scale=0.4)
    expected, _ = layer(_queries(), _encoded(), encoded_mask=MASK)

    @tf.function(jit_compile=xla)
    def steps(x: tf.Tensor, encoded: tf.Tensor) -> tf.Tensor:
        first, state = layer(x[:, :2], encoded, layer.init_state(2), encoded_mask=MASK)
        rest = []
        for n in range(2, 5):
            output, state = layer(x[:, n : n + 1], state=state)
            rest.append(output)
        return tf.concat([first, *rest], axis=1)

    np.testing.assert_allclose(steps(_queries(), _encoded()), expected, atol=2e-6)


def test_shares_of_query_heads_are_those_of_repeated_heads():
    """GQA is attention whose KV heads are repeated."""
    few, many = _layer(4, 2), _layer(4, 4)
    query, key, value, output = few.get_weights()
    many.set_weights([query, key.repeat(2, axis=1), value.repeat(2, axis=1), output])
    np.testing.assert_allclose(
        few(_queries(), _encoded())[0], many(_queries(), _encoded())[0], atol=2e-6
    )


def test_padding_is_not_there_whatever_it_holds():
    layer = _layer()
    alone, _ = layer(_queries(), _encoded()[:, 4:])
    ruined = tf.where(MASK[..., tf.newaxis], _encoded(), np.nan)
    for state in (None, layer.init_state(2)):
        output, _ = layer(_queries(), ruined, state, encoded_mask=MASK)
        np.testing.assert_allclose(output[1], alone[1], atol=2e-6)


def test_takes_the_mask_that_a_layer_before_has_put_on():
    layer = _layer()
    padded = tf.where(MASK[..., tf.newaxis], _encoded(), 0.0)
    expected, _ = layer(_queries(), padded, encoded_mask=MASK)
    output, _ = layer(_queries(), keras.layers.Masking()(padded))
    np.testing.assert_allclose(output, expected, atol=2e-6)
    assert not np.allclose(layer(_queries(), padded)[0], expected, atol=1e-3)


def test_a_row_without_a_token_sees_nothing():
    layer = _layer(use_output_bias=True)
    layer.set_weights([*layer.get_weights()[:-1], np.arange(HIDDEN)])
    none = tf.constant([[True] * 7, [False] * 7])
    output, state = layer(_queries(), _encoded(), layer.init_state(2), encoded_mask=none)
    np.testing.assert_allclose(output[1], np.tile(np.arange(HIDDEN), [5, 1]))
    np.testing.assert_allclose(layer(_queries(), state=state)[0], output, atol=2e-6)


@pytest.mark.parametrize(
    ("cache", "gap"), [("bfloat16", 2e-2), ("int8", 2e-2), ("k4v4(recent=0,sinks=0)", 0.2)]
)
def test_a_codec_writes_what_is_kept(cache: str, gap: float):
    size = 32 if "k4" in cache else 8
    keras.utils.set_random_seed(3)
    layer = CachedCrossAttention(2, size, 1, cache, capacity=7)
    exact, _ = layer(_queries(), _encoded())
    call = tf.function(layer.__call__, jit_compile=True)
    first, state = call(_queries(), _encoded(), layer.init_state(2))
    assert {n: t.dtype for n, t in state.items()} == {
        n: s.dtype for n, s in layer.get_state_spec(2).items()
    }
    again, _ = call(_queries(), state=state)
    np.testing.assert_allclose(again, first, atol=2e-6)
    assert 1e-6 < np.abs(first - exact).max() < gap
    held = sum(tensor.numpy().nbytes for tensor in state.values())
    full = CachedCrossAttention(2, size, 1, capacity=7).store
    assert held == 2 * layer.store.bytes_per_session() < 2 * full.bytes_per_session()


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_compute_dtype_leaves_the_cache_as_its_codec_says(dtype: str):
    layer, exact = _layer(dtype=dtype), _layer()
    exact.set_weights(layer.get_weights())
    output, state = layer(_queries(), _encoded(), layer.init_state(2))
    assert output.dtype == layer.compute_dtype
    assert state["keys/codes"].dtype == tf.float32
    expected, _ = exact(_queries(), _encoded())
    np.testing.assert_allclose(tf.cast(output, tf.float32), expected, atol=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": "sliding_window(window=4)"}, "policy must be 'dense'"),
        ({"cache": "snapkv(budget=64)"}, "policy must be 'dense'"),
        ({"cache": "int4"}, "'k4v4\\(recent=0,sinks=0\\)'"),
        ({"cache": "kivi4"}, "needs newest tokens"),
        ({"capacity": 0}, "`capacity` must be an integer of at least 1"),
        ({"kv_heads": 3}, "`num_heads` must be a multiple of num_key_value_heads=3"),
    ],
)
def test_refuses_what_is_not_possible(arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        _layer(**arguments)


def test_refuses_calls_that_make_no_sense():
    layer = _layer()
    with pytest.raises(CacheError, match="`encoded` must be given where there is no state"):
        layer(_queries())
    with pytest.raises(CacheError, match="must fit `capacity`=9 tokens. Received: 10 tokens"):
        layer(_queries(), _encoded(10), layer.init_state(2))
    with pytest.raises(CacheError, match="`state` must be None in training"):
        layer(_queries(), _encoded(), layer.init_state(2), training=True)


VOCABULARY, LENGTH = 9, 5


@keras.saving.register_keras_serializable(package="test")
class _Positions(keras.layers.Layer):
    """Adds a learned vector to the token at each position."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.table = self.add_weight(name="table", shape=(LENGTH, shape[-1]), initializer="uniform")
        self.supports_masking = True
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + tf.cast(tf.convert_to_tensor(self.table), x.dtype)[: tf.shape(x)[1]]


def _reverser(dtype: str = "float32") -> keras.Model:
    """A functional encoder-decoder for texts of `LENGTH`; 0 is padding."""
    keras.utils.set_random_seed(5)
    source = keras.Input([LENGTH], dtype="int32", name="source")
    target = keras.Input([LENGTH], dtype="int32", name="target")
    embedding = keras.layers.Embedding(VOCABULARY, 32, mask_zero=True, dtype=dtype)
    encoded = _Positions(dtype=dtype, name="source_positions")(embedding(source))
    encoded = keras.layers.Dense(32, activation="gelu", dtype=dtype, name="encoder")(encoded)
    x = _Positions(dtype=dtype, name="target_positions")(embedding(target))
    x = x + CachedMultiHeadAttention(2, 16, capacity=LENGTH, dtype=dtype, name="own")(x)[0]
    cross = CachedCrossAttention(2, 16, capacity=LENGTH, dtype=dtype, name="cross")
    x = x + cross(x, encoded)[0]
    x = keras.layers.LayerNormalization(dtype=dtype)(x)
    logits = keras.layers.Dense(VOCABULARY, dtype="float32", name="logits")(x)
    return keras.Model([source, target], logits)


def _texts(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sources of 3 to 5 tokens, what the decoder gets, and what it should say: the reverse."""
    rng = np.random.default_rng(seed)
    source = rng.integers(2, VOCABULARY, [count, LENGTH]).astype(np.int32)
    source *= np.arange(LENGTH) < rng.integers(3, LENGTH + 1, [count, 1])
    wanted = np.zeros_like(source)
    for row, text in zip(wanted, source, strict=True):
        words = text[text > 0]
        row[: len(words)] = words[::-1]
    given = np.where(wanted > 0, np.pad(wanted, [[0, 0], [1, 0]], constant_values=1)[:, :-1], 0)
    return source, given.astype(np.int32), wanted


def _steps(model: keras.Model, source: np.ndarray) -> np.ndarray:
    """Greedy answers, each token from the caches: the encoder runs once."""
    layer = {one.name: one for one in model.layers}
    embedding = next(one for one in model.layers if isinstance(one, keras.layers.Embedding))
    norm = next(x for x in model.layers if isinstance(x, keras.layers.LayerNormalization))
    encoded = layer["encoder"](layer["source_positions"](embedding(source)))
    own = layer["own"].init_state(len(source))
    cross, token, said = layer["cross"].init_state(len(source)), np.ones(len(source)), []
    table = tf.convert_to_tensor(layer["target_positions"].table)
    for step in range(LENGTH):
        x = embedding(token[:, np.newaxis].astype(np.int32)) + table[step]
        output, own = layer["own"](x, state=own)
        x = x + output
        again = None if step else encoded
        output, cross = layer["cross"](x, again, cross, encoded_mask=None if step else source > 0)
        token = np.argmax(layer["logits"](norm(x + output))[:, 0], axis=-1)
        said.append(token)
    return np.stack(said, axis=1)


def test_learns_to_reverse_in_fit_and_answers_from_its_caches(tmp_path):
    model = _reverser()
    source, given, wanted = _texts(4096, 0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(optimizer, loss)
    model.fit([source, given], wanted, batch_size=128, epochs=4, verbose=0)
    source, given, wanted = _texts(64, 1)
    said = _steps(model, source)
    right = (said == wanted) | (wanted == 0)
    assert right.mean() > 0.98, right.mean()
    expected = np.argmax(model.predict([source, given], verbose=0), axis=-1)
    agree = (said == expected) | (wanted == 0)
    assert agree[right.all(axis=1)].all()

    path = str(tmp_path / "reverser.keras")
    model.save(path)
    for other in (keras.models.load_model(path), keras.models.clone_model(model)):
        other.set_weights(model.get_weights())
        np.testing.assert_allclose(
            other.predict([source, given], verbose=0),
            model.predict([source, given], verbose=0),
            atol=1e-5,
        )
        cross = other.get_layer("cross")
        assert cross.get_config() == model.get_layer("cross").get_config()


def test_trains_in_mixed_precision():
    model = _reverser("mixed_float16")
    source, given, wanted = _texts(256, 0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile("adam", loss)
    before = model.get_layer("cross").get_weights()
    losses = model.fit([source, given], wanted, epochs=2, verbose=0).history["loss"]
    assert np.isfinite(losses).all() and losses[1] < losses[0]
    for old, new in zip(before, model.get_layer("cross").get_weights(), strict=True):
        assert np.abs(new - old).max() > 0


def test_weights_are_named_and_shaped_as_those_of_self_attention():
    layer = _layer(name="cross")
    assert {path: tuple(w.shape) for path, w in by_path(layer).items()} == {
        "cross/query/kernel": (HIDDEN, 4, 8),
        "cross/key/kernel": (ENCODED, 2, 8),
        "cross/value/kernel": (ENCODED, 2, 8),
        "cross/attention_output/kernel": (4, 8, HIDDEN),
    }

from __future__ import annotations

import numpy as np
import pytest
import reference
import tensorflow as tf
from cache_conformance import CAPACITY, CacheCase, make_input, make_layer, run

from tfkv import sample_text
from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig
from tfkv.errors import CacheError, ConfigError
from tfkv.export import model_text
from tfkv.export.importers import load
from tfkv.generation import generate
from tfkv.layers import CachedMultiHeadAttention, CacheSpec, layer_caches
from tfkv.layers.page_bounds import bounds_of
from tfkv.layers.policies import Quest, RandomPages, RecentPages

CODECS = ("float32", "int8", "k4v4(recent=3,sinks=1)", "kivi4(recent=5,sinks=1,group=4)")


def layer_of(cache: str, codec: str = "float32") -> CachedMultiHeadAttention:
    return make_layer(CacheCase(cache, None, 0, 0, CAPACITY, bounded=False), codec)


@pytest.mark.parametrize("codec", CODECS)
def test_pages_for_everything_are_the_dense_cache(codec: str):
    """Token 19 is on the fifth page: four before it, of which one is newest as well."""
    x, cuts = make_input(20), [6] + [1] * 14
    dense, _ = run(layer_of("dense", codec), x, cuts)
    enough, _ = run(layer_of("quest(pages=3,page_size=4,recent=2)", codec), x, cuts)
    np.testing.assert_allclose(enough, dense, atol=1e-6)
    fewer, _ = run(layer_of("quest(pages=2,page_size=4,recent=2)", codec), x, cuts)
    np.testing.assert_allclose(fewer[:, :16], dense[:, :16], atol=1e-6)
    assert np.abs(fewer[:, 16:] - dense[:, 16:]).max() > 0.01


def test_no_key_scores_above_the_bound_of_its_page():
    random = np.random.default_rng(0)
    keys = random.normal(size=(2, 3, 5, 4, 8)).astype(np.float32)
    queries = random.normal(size=(2, 3, 2, 8)).astype(np.float32)
    bounds = bounds_of(tf.constant(keys), tf.ones([5, 4], tf.bool))
    worth = Quest().worth(tf.constant(queries), bounds, tf.zeros([2, 5], tf.int32)).numpy()
    scores = np.einsum("bkgh,bkpch->bkpgc", queries, keys).max(axis=(-1, -2))
    # Half precision, times the 8 channels of a query.
    assert (worth >= scores - 0.01).all()
    by_definition = np.maximum(
        queries[:, :, :, None] * keys.max(3)[:, :, None],
        queries[:, :, :, None] * keys.min(3)[:, :, None],
    )
    np.testing.assert_allclose(worth, by_definition.sum(-1).max(2), atol=0.01)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("back", [1, 5, 8])
def test_bounds_forget_what_was_taken_back(codec: str, back: int):
    """Keys that would bound every page from above were there, and are gone."""
    layer, x = layer_of("quest(pages=1,page_size=4,first=0,recent=1)", codec), make_input(20)
    straight, _ = run(layer, x, [12 - back, 4, *[1] * (4 + back)])
    _, state = run(layer, x, [12 - back])
    _, state = layer(tf.constant(20 * x[:, : back + 2]), state=state)
    first = 12 - back
    found = []
    for begin, width in ((first, 4), *((at, 1) for at in range(first + 4, 20))):
        positions = np.broadcast_to(np.arange(begin, begin + width, dtype=np.int32), [3, width])
        output, state = layer(
            tf.constant(x[:, begin : begin + width]), positions=positions, state=state
        )
        found.append(output.numpy())
    if "recent" not in codec:  # else tokens that were read exactly are read from codes now
        np.testing.assert_allclose(np.concatenate(found, axis=1), straight[:, first:], atol=1e-6)
    decoded = layer.cache.codec.keys.decode(layer.store._side(state, "keys")).numpy()
    pages = decoded.reshape(3, 2, 5, 4, 8)
    wanted = np.concatenate([pages.max(3), pages.min(3)], axis=-1)
    np.testing.assert_allclose(state["bounds"], wanted, rtol=1e-3, atol=1e-3)


def test_rows_without_a_token_are_left_alone():
    layer, x = layer_of("quest(pages=1,page_size=4,first=0,recent=1)"), make_input(14)
    _, state = run(layer, x, [13])
    given = np.array([[True], [False], [True]])
    output, after = layer(tf.constant(x[:, 13:]), state=state, mask=given)
    assert after["filled"].numpy().tolist() == [14, 13, 14]
    for name in set(after) - {"filled", "reached"}:
        np.testing.assert_array_equal(after[name][1], state[name][1])
    alone, _ = layer(tf.constant(x[:, 13:]), state=state)
    np.testing.assert_allclose(output[::2], alone[::2], atol=1e-6)


def test_rows_move_with_their_bounds():
    layer, x = layer_of("quest(pages=1,page_size=4,first=0,recent=1)"), make_input(18)
    straight, _ = run(layer, x, [14, 1, 1, 1, 1])
    _, state = run(layer, x, [14])
    rows = [2, 2, 0]
    moved, _ = run(layer, x[rows][:, 14:], [1] * 4, state=layer.store.reorder(state, rows))
    np.testing.assert_allclose(moved, straight[rows][:, 14:], atol=2e-6)


def test_a_width_that_is_not_known_is_refused():
    layer = layer_of("quest(page_size=4)")
    step = tf.function(lambda x, state: layer(x, state=state), autograph=False)
    with pytest.raises(CacheError, match="static width where the policy selects"):
        step.get_concrete_function(tf.TensorSpec([3, None, 24]), layer.get_state_spec(3))


@pytest.mark.parametrize(
    ("cache", "match"),
    [
        ("quest(pages=0)", "`pages` must be at least 1"),
        ("quest(page_size=1)", "`page_size` must be at least 2"),
        ("quest(recent=0)", "`recent` must be at least 1"),
        ("quest(pages=1,first=2)", "`first` pages are among `pages`"),
        ("quest(page_size=16)+kivi4", "must be a multiple of the 32 tokens that 'kivi4'"),
    ],
)
def test_what_cannot_be_is_refused(cache: str, match: str):
    with pytest.raises(ConfigError, match=match):
        CacheSpec.parse(cache)


def test_the_first_layers_of_a_model_read_everything():
    caches = layer_caches("quest(page_size=4)+int8", 4, 2)
    assert [cache.policy.selects for cache in caches] == [False, False, True, True]
    config = DecoderConfig(64, 4, 32, 4, 2, 8, 48)
    of_model = [
        CausalLM(config, cache=f"{cache}+int8", capacity=24).bytes_per_session()
        for cache in ("quest(page_size=4)", "dense")
    ]
    # Two layers, two heads, six pages: the greatest and the least of 8 channels in float16.
    assert of_model[0] - of_model[1] == 2 * 2 * 6 * 2 * 8 * 2


def test_generated_tokens_are_those_of_single_steps():
    config = DecoderConfig(64, 3, 32, 4, 2, 8, 48, tie_embeddings=False)
    model = CausalLM(config, cache="quest(pages=1,page_size=4,first=0,recent=1)", capacity=48)
    random = np.random.default_rng(3)
    model.assign_weights(
        {
            n: 3 * random.normal(size=w.shape) / w.shape[0] ** 0.5
            for n, w in model.export_weights().items()
        }
    )
    prompt = random.integers(0, 64, 21).tolist()
    found = generate(model, [prompt], 16)[0]
    logits, state = model(tf.constant([prompt]), state=model.init_state(1))
    wanted = [int(tf.argmax(logits[0, -1]))]
    while len(wanted) < 16:
        logits, state = model(tf.constant([wanted[-1:]]), state=state)
        wanted.append(int(tf.argmax(logits[0, -1])))
    assert found == wanted


def test_baselines_read_as_many_pages():
    numbers = tf.tile(tf.range(12)[tf.newaxis], [2, 1])
    random = np.random.default_rng(4)
    queries = tf.constant(random.normal(size=(2, 3, 2, 8)).astype(np.float32))
    bounds = tf.zeros([2, 3, 12, 16], tf.float16)
    at = tf.constant([47, 30])
    same = {"pages": 3, "page_size": 4, "recent": 2}
    recent = RecentPages(**same).choose(queries, bounds, at, numbers).numpy()
    assert {tuple(sorted(head)) for head in recent[0]} == {(0, 8, 9, 10, 11)}
    plain = Quest(**same).choose(queries, bounds, at, numbers).numpy()
    assert all({0, 10, 11} < set(head) for head in plain[0])
    # Session 1 holds no more than its own page, the eighth.
    held = tf.where(numbers <= at[:, tf.newaxis] // 4, numbers, -1)
    recent = RecentPages(**same).choose(queries, bounds, at, held).numpy()
    assert {tuple(sorted(head)) for head in recent[1]} == {(0, 4, 5, 6, 7)}
    chance = RandomPages(**same).choose(queries, bounds, at, held).numpy()
    assert all(len(set(head)) == 5 and {10, 11} < set(head) for head in chance[0])
    assert all({6, 7} < set(head) and max(head) == 7 for head in chance[1])
    assert len({tuple(sorted(head)) for head in chance[0]}) > 1
    np.testing.assert_array_equal(RandomPages(**same).choose(queries, bounds, at, held), chance)
    other = RandomPages(**same, seed=1).choose(queries, bounds, at, held)
    assert (np.asarray(other) != chance).any()


@pytest.mark.parametrize("first", [0, 1])
def test_pages_of_a_real_text_are_the_papers(first: int):
    """Keys and queries of SmolLM2 in one layer, where pages differ for a reason."""
    tokens, prompt, layer = 192, 160, 12
    source = load("smollm2")
    text = model_text.encode(source, sample_text.language_reference()[:4000])[:tokens]
    model = CausalLM.from_weights(source.config, source.weights)
    x = model.token_embedding(text[np.newaxis])
    for block in model.blocks[:layer]:
        x, _ = block(x)
    x = model.blocks[layer].attention_norm(x)
    whole = model.blocks[layer].attention
    cache = f"quest(pages=3,page_size=8,first={first},recent=2)"
    some = CachedMultiHeadAttention.from_config({**whole.get_config(), "cache": cache})
    some.build(x.shape)
    some.set_weights(whole.get_weights())
    found, _ = run(some, x.numpy(), [prompt, *[1] * (tokens - prompt)])
    weights = dict(zip(("query", "key", "value", "output"), some.get_weights(), strict=True))
    base = source.config.rope_max_wavelength
    wanted = reference.attention(
        x[0].numpy(), weights, base=base, selects=(3, 8, 2, first), alone=range(prompt, tokens)
    )
    np.testing.assert_allclose(found[0], wanted, atol=5e-5)
    assert np.abs(found[0] - whole(x)[0][0].numpy()).max() > 100 * 5e-5

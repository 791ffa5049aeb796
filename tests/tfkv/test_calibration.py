from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from tfkv.calibration import Calibration, calibrate, fingerprint_of
from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError
from tfkv.evaluation import ModelReader
from tfkv.layers.per_layer import layer_caches
from tfkv.prefix_compression import PrefixCompressor

CONFIG = DecoderConfig(64, 3, 32, 4, 2, 8, 48, context_length=256)
TEXT = np.random.default_rng(0).integers(0, 64, 96)
REPEAT = [3, 1, 2]


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    tf.random.set_seed(1)
    return CausalLM(CONFIG).export_weights()


@pytest.fixture(scope="module")
def made(weights) -> Calibration:
    return calibrate(CONFIG, weights, [TEXT[:48], TEXT[48:]], REPEAT)


def test_tables_say_how_many_of_the_kept_entries_each_head_has(made):
    for name, table in made.tables.items():
        for shares in table.values():
            shares = np.array(shares)
            assert shares.shape == (3, 2) and (shares >= 0).all()
            # Rounded to 4 digits.
            mean = shares.mean(axis=1) if name in ("ada_kv", "defensive_kv") else shares.mean()
            np.testing.assert_allclose(mean, 1, atol=2e-4)


def test_the_kvzip_table_is_that_of_scores_taken_by_hand(weights, made):
    """Highest attention of a repetition, counted over all heads of the model."""
    model = CausalLM.from_weights(
        CONFIG, weights, cache="kvzip(budget=40,recent=32,sinks=4)", capacity=200
    )
    kept = np.zeros([3, 2])
    for passage in (TEXT[:48], TEXT[48:]):
        state = PrefixCompressor(model, REPEAT, chunk=48, xla=False).weigh(passage)
        scores = np.stack([own["mass"].numpy()[0, :, :48] for own in state])
        scores[:, :, :4] = scores[:, :, 16:] = np.inf  # sinks, and the newest 32
        order = np.argsort(-scores, axis=None, kind="stable")[: round(0.5 * scores.size)]
        kept += np.bincount(order // 48, minlength=6).reshape(3, 2) / 24
    np.testing.assert_allclose(made.tables["kvzip"]["0.5"], kept / 2, atol=1e-4)


@pytest.mark.parametrize(("budget", "guarded"), [(64, 5), (40, 40), (100, 36), (7, 0)])
def test_budgets_add_up_to_the_entry_and_guard_every_head(made, budget: int, guarded: int):
    budgets = np.array(made.budgets("kvzip", budget, guarded))
    assert budgets.sum() == budget * budgets.size
    assert budgets.min() >= guarded


def test_heads_that_look_further_get_more():
    shares = [[0.5, 1.5], [0.25, 1.75]]
    table = Calibration("f", 100, 1, {"t": {"0.5": shares}})
    # 100 times 0.8 of the share, and 0.2 for all.
    assert table.budgets("t", 100, 10) == [[60, 140], [40, 160]]
    # One is raised to what is guarded, at the expense of what the others have beyond it.
    assert table.budgets("t", 100, 60) == [[60, 131], [60, 149]]


def test_a_table_of_repetitions_is_taken_as_it_is():
    table = Calibration("f", 100, 1, {"kvzip": {"0.5": [[0.1, 1.9]]}})
    assert table.budgets("kvzip", 50, 5) == [[5, 95]]


def test_the_ratio_nearest_to_the_budget_counts():
    table = Calibration("f", 1000, 1, {"t": {"0.125": [[0.0, 2.0]], "0.5": [[2.0, 0.0]]}})
    assert table.shares("t", 200) == [[0.0, 2.0]]
    assert table.shares("t", 300) == [[2.0, 0.0]]
    assert table.shares("t", 9000) == [[2.0, 0.0]]


def test_a_calibration_comes_back_from_its_file_and_knows_its_weights(made, weights, tmp_path):
    made.save(tmp_path / "calibration.json")
    again = Calibration.load(tmp_path / "calibration.json")
    assert again == made
    again.check(fingerprint_of(CONFIG, weights))
    other = {**weights, "final_norm": weights["final_norm"] * 1.001}
    with pytest.raises(ConfigError, match="made with other weights"):
        again.check(fingerprint_of(CONFIG, other))
    with pytest.raises(ConfigError, match="no table 'kvzap'. It has: kvzip"):
        again.budgets("kvzap", 64, 0)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a file of `tfkv calibrate`"):
        Calibration.load(tmp_path / "broken.json")
    with pytest.raises(ConfigError, match="one length of at least 16"):
        calibrate(CONFIG, weights, [TEXT[:8]], REPEAT)


def test_moments_are_those_of_the_whole_text(weights, made):
    """Read in pieces with a cache; here in one, without, and by float64."""
    model = CausalLM.from_weights(CONFIG, weights)
    sums = {"queries": 0.0, "keys": 0.0, "outputs": 0.0, "key_means": 0.0}
    for passage in (TEXT[:48], TEXT[48:]):
        x, positions = model.token_embedding(passage[np.newaxis]), tf.range(48)[tf.newaxis]
        for block in model.blocks[:2]:
            normal = block.attention_norm(x)
            queries, keys, values = (
                one.numpy()[0].astype(np.float64)
                for one in block.attention.project_in(normal, positions)
            )
            x, _ = block(x)
        scores = queries @ keys.swapaxes(1, 2)  # the queries come scaled
        scores = np.where(np.arange(48) <= np.arange(96)[:, None] % 48, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        outputs = shares / shares.sum(-1, keepdims=True) @ values
        for name, rows in (("queries", queries * 8**0.5), ("keys", keys), ("outputs", outputs)):
            sums[name] = sums[name] + rows.swapaxes(1, 2) @ rows / rows.shape[1] / 2
        sums["key_means"] = sums["key_means"] + keys.mean(1) / 2
    for name, expected in sums.items():
        found = getattr(made.moments, name)[1]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    kernel = weights["layers/1/attention_output"].reshape(2, 2, 8, 32)
    readers = np.einsum("kgid,kgjd->kij", kernel, kernel)
    np.testing.assert_allclose(made.moments.readers[1], readers, rtol=1e-4, atol=1e-5)


def test_a_file_of_before_there_were_moments_still_shares_budgets_out(made, tmp_path):
    path = tmp_path / "old.json"
    made.save(path)
    old = json.loads(path.read_text())
    del old["moments"]
    path.write_text(json.dumps(old))
    again = Calibration.load(path)
    assert again.budgets("kvzip", 64, 5) == made.budgets("kvzip", 64, 5)
    with pytest.raises(ConfigError, match="Run `tfkv calibrate` anew"):
        CausalLM(CONFIG, cache="block_gtq", calibration=again)


@pytest.mark.parametrize(
    "cache",
    [
        "low_rank(rank=8,bits=16,recent=0,sinks=0)",
        "block_gtq(bits=8,recent=0,sinks=0)",
        "snapkv(budget=48,caps='kvzip')+low_rank(rank=8)",
    ],
)
def test_a_model_reads_through_a_codec_of_a_calibration(made, weights, cache: str):
    """All directions in float16, and all keys in 8 bits, are next to the full cache; layers and
    heads each by their own tables."""
    model = CausalLM.from_weights(CONFIG, weights, cache=cache, calibration=made, capacity=128)
    assert len({str(c.codec.tables) for c in model.caches}) == 3
    again = CausalLM.from_config(model.get_config())
    assert again.caches == model.caches
    full = CausalLM.from_weights(CONFIG, weights)
    state, plain = model.init_state(1), full.init_state(1)
    for first in (0, 24):
        ids = tf.constant(TEXT[np.newaxis, first : first + 24], tf.int32)
        logits, state = model(ids, state=state)
        expected, plain = full(ids, state=plain)
    room = 0.02 if "bits=16" in cache else 0.3
    assert np.abs(logits - expected).max() < room * np.abs(expected).max()


def test_layers_differ_by_exceptions_and_by_calibration(made):
    caches = layer_caches(
        "snapkv(budget=64,caps='kvzip')+int8", 3, 2, ["0=dense", "1-2=k8v4"], made
    )
    assert str(caches[0]) == "dense+int8"
    assert [cache.codec.name for cache in caches] == ["int8", "k8v4", "k8v4"]
    assert caches[1].policy.budgets == tuple(made.budgets("kvzip", 64, 36)[1])
    pyramid = layer_caches("pyramid_kv(budget=100)", 3, 2)
    assert [cache.policy.budget for cache in pyramid] == [188, 100, 12]
    windows = ["0=sliding_window(window=8)", "2=sliding_window(window=16)"]
    assert [str(c.policy) for c in layer_caches("int8", 3, 2, windows)] == [
        "sliding_window(window=8)",
        "dense",
        "sliding_window(window=16)",
    ]


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("int8", "Expected layers=cache"),
        ("a=int8", "Expected layers=cache"),
        ("2-1=int8", "layers 0 to 2"),
        ("1-3=int8", "layers 0 to 2. Received: layers '1-3'"),
        ("1=int9", "Did you mean 'int8'"),
    ],
)
def test_an_exception_that_cannot_be_read_is_refused(exception: str, message: str):
    with pytest.raises(ConfigError, match=message):
        layer_caches("dense", 3, 2, [exception])


def test_a_table_without_a_calibration_is_refused():
    with pytest.raises(ConfigError, match="`tfkv calibrate`"):
        CausalLM(CONFIG, cache="ada_kv(budget=64)")


def test_duo_attention_keeps_whole_the_heads_that_look_furthest(made):
    caches = layer_caches("duo_attention(budget=128,sinks=2,recent=8,share=0.5)", 3, 2, (), made)
    budgets = np.array([cache.policy.budgets for cache in caches])
    shares = np.array(made.shares("kvzip", 128))
    assert sorted(budgets.ravel()) == [10] * 3 + [128] * 3
    assert shares[budgets == 128].min() >= shares[budgets == 10].max()


@pytest.mark.parametrize("cache", ["snapkv(budget=40)", "kvzip(budget=64,caps='kvzip')+int8"])
def test_models_whose_layers_differ_read_and_come_back(made, weights, cache: str, tmp_path):
    caches = layer_caches(cache, 3, 2, ["0=sliding_window(window=80)"], made)
    model = CausalLM.from_weights(CONFIG, weights, cache=caches, capacity=128)
    twin = CausalLM.from_config(model.get_config())
    assert twin.caches == model.caches
    reader = ModelReader(model)
    state = reader.state_after(TEXT, 32)
    after = model.evict(state)
    assert [int(own["filled"][0]) for own in after] == [96] * 3
    held = model.bytes_per_session()
    assert held == sum(x.numpy().nbytes for own in model.init_state(1) for x in own.values())


def test_a_compressed_prefix_keeps_its_budget_and_goes_on(weights):
    model = CausalLM.from_weights(CONFIG, weights, cache="kvzip(budget=40)", capacity=200)
    compressor = PrefixCompressor(model, REPEAT, chunk=32, piece=16)
    state = compressor.compress(TEXT)
    for block, own in zip(model.blocks, state, strict=True):
        positions = block.attention.store.view(own).positions.numpy()[0]
        assert ((positions >= 0).sum(-1) == 40).all()
        assert (positions[:, :4] == np.arange(4)).all()
        assert int(own["filled"][0]) == 96
    logits, _ = model(tf.constant([[5]]), state=state)
    assert np.isfinite(logits).all()
    with pytest.raises(ConfigError, match="from 1 to 157 tokens"):
        compressor.compress(np.zeros(158, np.int32))
    with pytest.raises(ConfigError, match="adds up attention"):
        PrefixCompressor(CausalLM(CONFIG), REPEAT)


def test_a_budget_for_the_whole_prefix_loses_nothing(weights):
    """Nothing is evicted, so the logits are those of the full cache."""
    plain = CausalLM.from_weights(CONFIG, weights)
    model = CausalLM.from_weights(CONFIG, weights, cache="kvzip(budget=96)", capacity=200)
    state = PrefixCompressor(model, REPEAT, chunk=32, piece=16).compress(TEXT)
    token = tf.constant([[7]])
    actual, _ = model(token, state=state)
    expected, _ = plain(token, state=ModelReader(plain).state_after(TEXT, 32))
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_fingerprints_follow_architecture_and_weights(weights):
    one = fingerprint_of(CONFIG, weights)
    assert one == fingerprint_of(CONFIG, dict(reversed(weights.items())))
    assert one != fingerprint_of(dataclasses.replace(CONFIG, rms_epsilon=1e-6), weights)

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import ConfigError
from tfkv.evaluation import ModelReader, compare_caches, teacher_forced_logits
from tfkv.export import Engine
from tfkv.export.engine_reader import EngineReader

CONFIG = DecoderConfig(64, 2, 32, 4, 2, 8, 48, context_length=128)
TEXT = np.random.default_rng(0).integers(0, 64, 96)


class Fixed:
    """Gives the same logits whatever it reads."""

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits.astype(np.float32)

    def start(self) -> None:
        pass

    def read(self, tokens: np.ndarray, position: int) -> tf.Tensor:
        del position
        return tf.constant(np.tile(self.logits, [len(tokens), 1]))


@pytest.fixture(scope="module")
def model() -> CausalLM:
    tf.random.set_seed(1)
    return CausalLM(CONFIG)


def through(model: CausalLM, cache: str) -> ModelReader:
    return ModelReader(
        CausalLM.from_weights(CONFIG, model.export_weights(), cache=cache, slack=16), xla=False
    )


def engine_reader(model: CausalLM, cache: str) -> EngineReader:
    config = EngineConfig(cache=cache, slots=1, capacity=128, page_size=16, prefill_tokens=64)
    return EngineReader(Engine(CONFIG, model.export_weights(), config))


def test_kl_against_numpy() -> None:
    rng = np.random.default_rng(3)
    p, q = rng.normal(size=(2, 50))
    found = compare_caches(Fixed(p), Fixed(q), [range(7), range(8)], piece=4)
    softmax = [np.exp(x) / np.exp(x).sum() for x in (p, q)]
    expected = np.sum(softmax[0] * np.log(softmax[0] / softmax[1]))
    np.testing.assert_allclose(found.kl, np.full(12, expected), rtol=1e-4)
    np.testing.assert_allclose(found.gap, np.full(12, np.abs(p - q).max()), rtol=1e-5)
    assert found.tokens == 12
    assert found.top1_percent == (100.0 if p.argmax() == q.argmax() else 0.0)


def test_equal_caches_differ_by_nothing() -> None:
    logits = 10 * np.random.default_rng(4).normal(size=50)
    found = compare_caches(Fixed(logits), Fixed(logits), [range(4)], piece=4)
    assert found.mean_kl == pytest.approx(0, abs=1e-9)
    assert (found.top1_percent, found.gap.max()) == (100.0, 0.0)


def test_pieces_read_what_one_pass_reads(model: CausalLM) -> None:
    whole = np.asarray(model(TEXT[np.newaxis]))[0]
    for reader in (through(model, "dense"), engine_reader(model, "dense")):
        pieces = np.concatenate([x.numpy() for x in teacher_forced_logits(reader, TEXT, 16)])
        np.testing.assert_allclose(pieces, whole, atol=2e-5)


def test_a_second_text_starts_anew(model: CausalLM) -> None:
    for reader in (through(model, "dense"), engine_reader(model, "dense")):
        runs = [list(teacher_forced_logits(reader, TEXT[:32], 16)) for _ in range(2)]
        np.testing.assert_allclose(*map(np.concatenate, runs), atol=1e-6)


def test_both_readers_find_the_same_loss_of_int8(model: CausalLM) -> None:
    kls = [
        compare_caches(make(model, "dense"), make(model, "dense+int8"), [TEXT], 16).mean_kl
        for make in (through, engine_reader)
    ]
    assert 0 < kls[0] < 1e-3
    assert kls[1] == pytest.approx(kls[0], rel=0.2)


@pytest.mark.parametrize(
    "policy",
    ["dense", "sliding_window(window=80,sinks=3)", "streaming_llm(window=70,sinks=3)"],
)
@pytest.mark.parametrize("codec", ["int8(recent=64)", "k4v4(recent=64,sinks=2)"])
def test_pages_read_exactly_what_layers_do(model: CausalLM, policy: str, codec: str) -> None:
    """The newest tokens and the sinks exact, the rest from codes; whatever the cut."""
    text = np.random.default_rng(1).integers(0, 64, 128)
    cache = f"{policy}+{codec}"

    def logits(reader: EngineReader | ModelReader, piece: int) -> np.ndarray:
        return np.concatenate([x.numpy() for x in teacher_forced_logits(reader, text, piece)])

    layers = logits(through(model, cache), 16)
    coded = logits(through(model, f"{policy}+{codec.partition('(')[0]}(recent=0,sinks=0)"), 16)
    noise = np.abs(coded - layers).max()
    for piece in (8, 16, 64):
        gap = np.abs(logits(engine_reader(model, cache), piece) - layers)
        # A code that falls the other way moves what is computed from it, here and there.
        assert np.quantile(gap, 0.95) < 1e-4
        assert gap.max() < noise / 2


def test_what_fills_no_piece_is_refused() -> None:
    with pytest.raises(ConfigError, match="must fill a piece"):
        compare_caches(Fixed(np.zeros(3)), Fixed(np.zeros(3)), [[1, 2]], piece=4)
    with pytest.raises(ConfigError, match="at least one text"):
        compare_caches(Fixed(np.zeros(3)), Fixed(np.zeros(3)), [])

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.causal_lm import CausalLM
from tfkv.config import DecoderConfig
from tfkv.errors import ConfigError
from tfkv.generation import Generator, generate, generate_without_cache, greedy_params
from tfkv.layers.keras_api import keras

CONFIG = DecoderConfig(37, 2, 24, 4, 2, 6, 40, rope_max_wavelength=100.0, context_length=64)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11], [12, 13, 14, 15]]


def _model(cache: str = "dense+float32") -> CausalLM:
    keras.utils.set_random_seed(6)
    model = CausalLM(CONFIG, cache=cache)
    # As they are drawn, weights of a small model repeat one token for ever.
    model.assign_weights({name: w * 3 for name, w in model.export_weights().items()})
    return model


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return _model()


@pytest.fixture(scope="module")
def generator(model: CausalLM) -> Generator:
    return Generator(model, prefill_chunk=4, decode_chunk=5)


@pytest.fixture(scope="module")
def expected(model: CausalLM) -> list[list[int]]:
    return generate_without_cache(model, PROMPTS, 12)


def test_equals_generation_without_a_cache(generator: Generator, expected: list[list[int]]):
    assert generator.generate(PROMPTS, 12) == expected
    assert len({token for row in expected for token in row}) > 5


def test_a_row_gets_what_it_gets_alone(generator: Generator, expected: list[list[int]]):
    """keras-hub #2274: prompts of different lengths in one batch."""
    assert [generator.generate([prompt], 12)[0] for prompt in PROMPTS] == expected


def test_compiles_twice_whatever_the_lengths(model: CausalLM):
    """keras-hub #779, transformers #46424: generate recompiles for each length."""
    generator = Generator(model, prefill_chunk=4, decode_chunk=5, xla=False)
    for length, new in ((1, 1), (3, 7), (4, 5), (5, 16), (17, 2)):
        rows = generator.generate([list(range(length)), [2]], new, stop_tokens=[36])
        assert all(len(row) <= new for row in rows)
    assert generator.traces == 2


def test_without_xla_the_tokens_are_the_same(model: CausalLM, expected: list[list[int]]):
    assert Generator(model, xla=False).generate(PROMPTS, 12) == expected
    assert generate_without_cache(model, PROMPTS[1:2], 3, xla=False)[0] == expected[1][:3]


@pytest.mark.parametrize("cache", ["sliding_window(window=6)+float32", "dense+bfloat16"])
def test_other_caches(cache: str):
    """A window forgets the same with and without a cache, past its ring and past a chunk."""
    model = _model(cache)
    rows = Generator(model, prefill_chunk=8, decode_chunk=4).generate(PROMPTS, 12)
    same = np.mean(np.array(rows) == np.array(generate_without_cache(model, PROMPTS, 12)))
    assert same == 1 if "float32" in cache else same > 0.5


def test_a_stop_token_ends_its_row_alone(generator: Generator, expected: list[list[int]]):
    stop = expected[0][3]
    rows = generator.generate(PROMPTS, 12, stop_tokens=[stop])
    for row, whole in zip(rows, expected, strict=True):
        end = whole.index(stop) + 1 if stop in whole else 12
        assert row == whole[:end]
    assert len(rows[0]) <= 4


def test_no_new_tokens(generator: Generator):
    assert generator.generate(PROMPTS, 0) == [[], [], []]


def test_sampled_tokens_follow_the_seed_and_not_the_batch(generator: Generator):
    def hot(seeds: list[int]):
        params = greedy_params(len(seeds))
        return params._replace(
            temperature=tf.fill([len(seeds)], 1.5), seed=tf.constant(seeds, tf.int64)
        )

    together = generator.generate(PROMPTS, 8, sampling=hot([7, 8, 9]))
    assert generator.generate(PROMPTS, 8, sampling=hot([7, 8, 9])) == together
    assert generator.generate(PROMPTS[1:2], 8, sampling=hot([8])) == together[1:2]
    assert generator.generate(PROMPTS, 8, sampling=hot([1, 2, 3])) != together


def test_a_fine_tuned_model_generates_what_it_learnt():
    """keras-hub #2330, #1629: train, then generate, with nothing compiled anew."""
    keras.utils.set_random_seed(6)
    model = CausalLM(CONFIG)
    before = generate(model, [[0, 1, 2]], 6)
    text = np.tile(np.arange(7, dtype=np.int32), [4, 3])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    model.fit(text[:, :-1], text[:, 1:], epochs=30, verbose=0)
    assert generate(model, [[0, 1, 2]], 6) == [[3, 4, 5, 6, 0, 1]] != before
    assert model.generator.traces == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": []}, "at least one token each"),
        ({"token_ids": [[1], []]}, "at least one token each"),
        ({"token_ids": [[1], [37]]}, "must be from 0 to 36"),
        ({"token_ids": [[1], [-1]]}, "must be from 0 to 36"),
        ({"max_new_tokens": -1}, "must not be negative.*max_new_tokens=-1"),
        ({"stop_tokens": range(9)}, "at most 8 tokens.*9 stops"),
        ({"max_new_tokens": 64}, "must fit `capacity`=64.*of 65 together"),
    ],
)
def test_arguments_out_of_range(generator: Generator, arguments: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        generator.generate(**{"token_ids": [[1]], "max_new_tokens": 1, **arguments})


@pytest.mark.parametrize("name", ["prefill_chunk", "decode_chunk"])
def test_chunks_out_of_range(model: CausalLM, name: str):
    with pytest.raises(ConfigError, match=f"`{name}` must be at least 1"):
        Generator(model, **{name: 0})

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfkv.layers.codecs import CODECS, FloatCodec


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("bfloat16", 8), ("float16", 11)])
def test_error_is_half_a_unit_of_the_mantissa(dtype: str, bits: int):
    x = np.random.default_rng(0).normal(size=(1, 1, 200, 8)).astype(np.float32)
    error = np.abs(FloatCodec(dtype).round_trip(tf.constant(x)) - x)
    assert (error <= np.abs(x) * 2.0**-bits + 2.0**-25).all()


@pytest.mark.parametrize("name", [n for n, codec in CODECS.items() if not codec.needs_calibration])
def test_spec_says_what_encode_makes(name: str):
    total = 0
    for codec in CODECS[name].sides().values():
        coded = codec.encode(tf.ones([2, 3, 64, 8]))
        assert {n: (t.shape[3:], t.dtype) for n, t in coded.items()} == {
            n: (part.shape, part.dtype) for n, part in codec.spec(8).items()
        }
        total += sum(t.numpy().nbytes for t in coded.values())
    assert CODECS[name].bytes_per_token(8) * 2 * 3 * 64 == total

from __future__ import annotations

import pytest

from tfkv.errors import ConfigError
from tfkv.layers import CacheSpec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dense", "dense+float32"),
        ("int8", "dense+int8"),
        (" dense + bfloat16 ", "dense+bfloat16"),
        ("sliding_window", "sliding_window+float32"),
        ("sliding_window(window=512, sinks=4)+int8", "sliding_window(window=512,sinks=4)+int8"),
        ("sliding_window(window=1024)+int8", "sliding_window+int8"),
    ],
)
def test_reads_and_writes(text: str, canonical: str):
    spec = CacheSpec.parse(text)
    assert str(spec) == canonical
    assert str(CacheSpec.parse(canonical)) == canonical
    assert CacheSpec.parse(spec) is spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "slidng_window+int8",
            r"Unknown cache policy 'slidng_window'\. Did you mean 'sliding_window'\?",
        ),
        ("int7", r"Unknown cache policy or codec 'int7'\. Did you mean 'int8'\?"),
        ("dense+int7", r"Unknown cache codec 'int7'\. Did you mean 'int8'\?"),
        ("dense+fp4", r"Unknown cache codec 'fp4'\. Did you mean 'nvfp4'\?"),
        ("dense+zip", r"Unknown cache codec 'zip'\. Known: float32, bfloat16, float16, int8"),
        ("dense(", r"must read policy\(name=value,...\)\+codec"),
        ("", r"must read policy"),
        ("sliding_window(512)", r"Expected name=value, received '512'"),
        ("sliding_window(window=)", r"must read policy\(name=value"),
        ("sliding_window(windw=5)", r"has no 'windw'\. Did you mean 'window'\?"),
        ("dense(window=5)", r"'dense' has no 'window'.*no arguments"),
        ("sliding_window(window=0)", r"`window` must be at least 1\. Received: window=0"),
        ("sliding_window(window=4,sinks=-1)", r"`sinks` must be at least 0"),
        ("sliding_window(window='a')", r"`window` must be at least 1\. Received: window='a'"),
    ],
)
def test_says_what_is_wrong(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        CacheSpec.parse(text)


@pytest.mark.parametrize(
    ("codec", "expected"), [("float32", 46_080), ("bfloat16", 23_040), ("int8", 12_240)]
)
def test_bytes_of_smollm2(codec: str, expected: int):
    """int8 is under a third of float32: 30 layers, keys and values, 3 heads of 64 numbers."""
    assert CacheSpec.parse(codec).bytes_per_token(30, 3, 64) == expected

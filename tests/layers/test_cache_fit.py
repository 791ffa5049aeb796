from __future__ import annotations

import pytest

from tfkv.errors import ConfigError
from tfkv.layers import CachedMultiHeadAttention, CacheSpec
from tfkv.layers.cache_fit import check_fit


@pytest.mark.parametrize(
    "cache", ["dense+int8", "sliding_window(window=8,sinks=2)", "tova(budget=64)"]
)
@pytest.mark.parametrize("positions", ["rope", "learned", "alibi"])
def test_what_does_not_ask_how_queries_turn_fits_all(cache, positions):
    check_fit(CacheSpec.parse(cache), positions)


@pytest.mark.parametrize(
    ("cache", "positions", "message"),
    [
        ("streaming_llm", "alibi", "looks at the first tokens from elsewhere.*'sliding_window'"),
        ("streaming_llm", "learned", "looks at the first tokens from elsewhere"),
        ("expected_attention", "alibi", "goes by scores without ALiBi.*'snapkv'"),
        ("quest", "alibi", "goes by scores without ALiBi"),
    ],
)
def test_what_does_is_refused_where_they_do_not(cache, positions, message):
    check_fit(CacheSpec.parse(cache), "rope")
    with pytest.raises(ConfigError, match=message):
        check_fit(CacheSpec.parse(cache), positions)


def test_a_layer_checks_itself():
    with pytest.raises(ConfigError, match="'streaming_llm'"):
        CachedMultiHeadAttention(2, 8, cache="streaming_llm", alibi_scale=1.0)

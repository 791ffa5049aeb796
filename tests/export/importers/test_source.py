import dataclasses

import numpy as np
import pytest

from tfkv.errors import ModelSourceError
from tfkv.export.importers import ModelSource, expected_tensors, load


def test_a_complete_source_is_valid(tiny_source):
    source = tiny_source()
    source.validate()
    assert load(source) is source


def test_the_output_matrix_is_expected_only_where_it_is_not_tied(tiny_source):
    config = tiny_source().config
    untied = dataclasses.replace(config, tie_embeddings=False)
    extra = set(expected_tensors(untied)) - set(expected_tensors(config))
    assert extra == {("output", (config.vocabulary_size, config.hidden_dim))}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layers/1/key", np.zeros((12, 3, 4), np.float32), r"layers/1/key.*\(12, 1, 4\).*\(12, 3"),
        ("final_norm", np.zeros(12, np.float64), "final_norm.*float32.*float64"),
        ("layers/0/up", np.full((12, 10), np.nan, np.float32), "layers/0/up.*120.*not finite"),
        ("output", np.zeros((11, 12), np.float32), "output.*no place"),
        ("final_norm", [1.0] * 12, "final_norm.*list"),
    ],
)
def test_a_wrong_weight_is_named(tiny_source, name, value, message):
    source = tiny_source()
    source.weights[name] = value
    with pytest.raises(ModelSourceError, match=message):
        source.validate()


def test_a_missing_weight_is_named(tiny_source):
    source = tiny_source()
    del source.weights["layers/0/down"]
    with pytest.raises(ModelSourceError, match=r"layers/0/down.*missing.*\(10, 12\)"):
        source.validate()


@pytest.mark.parametrize("token", [-1, 11])
def test_stop_tokens_lie_within_the_vocabulary(tiny_source, token):
    source = dataclasses.replace(tiny_source(), stop_tokens=(1, token))
    with pytest.raises(ModelSourceError, match="stop_tokens"):
        source.validate()


def test_load_refuses_what_it_does_not_know():
    with pytest.raises(ModelSourceError, match=r"Received: builtins\.int"):
        load(3)
    with pytest.raises(ModelSourceError, match=r"\.gguf.*'smollm3'"):
        load("smollm3")


def test_sources_are_compared_by_identity(tiny_source):
    # Comparing arrays field by field would raise.
    assert tiny_source() != tiny_source()
    assert isinstance(tiny_source(), ModelSource)

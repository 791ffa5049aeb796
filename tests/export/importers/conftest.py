"""Sources for the tests: the real SmolLM2 and tiny models written on the spot."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Mapping

import gguf
import numpy as np
import pytest
import tokenizers

sys.path.append(str(pathlib.Path(__file__).parent))

from tfkv.config import DecoderConfig
from tfkv.export.importers import ModelSource, expected_tensors, load

TINY = DecoderConfig(
    vocabulary_size=11,
    num_layers=2,
    hidden_dim=12,
    num_query_heads=3,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_dim=10,
    rope_max_wavelength=5000.0,
    context_length=64,
)

Writer = Callable[..., pathlib.Path]


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    return load("smollm2")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: ModelSource) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(smollm2.tokenizer_json)


@pytest.fixture
def tiny_source() -> Callable[..., ModelSource]:
    def make(config: DecoderConfig = TINY) -> ModelSource:
        draw = np.random.default_rng(0)
        return ModelSource(
            config=config,
            weights={
                name: draw.normal(size=shape).astype(np.float32)
                for name, shape in expected_tensors(config)
            },
        )

    return make


@pytest.fixture
def gguf_metadata() -> dict[str, object]:
    """What a complete file of `TINY` says of itself, to be changed by a test."""
    return {
        "llama.block_count": TINY.num_layers,
        "llama.context_length": TINY.context_length,
        "llama.embedding_length": TINY.hidden_dim,
        "llama.feed_forward_length": TINY.intermediate_dim,
        "llama.attention.head_count": TINY.num_query_heads,
        "llama.attention.head_count_kv": TINY.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": TINY.rms_epsilon,
        "llama.rope.freq_base": TINY.rope_max_wavelength,
        "llama.vocab_size": TINY.vocabulary_size,
    }


@pytest.fixture
def gguf_tensors() -> dict[str, np.ndarray]:
    """Tensors of a complete file of `TINY`, rows first as stored, to be changed by a test."""
    width, inner = TINY.hidden_dim, TINY.intermediate_dim
    kv = TINY.num_key_value_heads * TINY.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (TINY.vocabulary_size, width)}
    for layer in range(TINY.num_layers):
        for name, shape in {
            "attn_q": (width, width),
            "attn_k": (kv, width),
            "attn_v": (kv, width),
            "attn_output": (width, width),
            "attn_norm": (width,),
            "ffn_norm": (width,),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    shapes["output_norm.weight"] = (width,)
    draw = np.random.default_rng(1)
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def write_gguf(tmp_path: pathlib.Path) -> Writer:
    def write(
        metadata: Mapping[str, object],
        tensors: Mapping[str, np.ndarray],
        architecture: str = "llama",
    ) -> pathlib.Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in metadata.items():
            add[type(value)](key, value)
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write

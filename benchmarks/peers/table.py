"""Which environments there are, with their pins, and which systems are run."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
#: Environments, and the weights that were made for them.
BUILD = ROOT / "build" / "peers"

#: The environment that this project's own systems run in: the one that runs the driver.
OWN = "tfkv"


@dataclasses.dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Args:
        pins: What pip installs.
        compiles_llama_cpp: Whether llama.cpp is compiled, with its server, from the sources
            that llama-cpp-python brings; see `benchmarks.peers.environments`.
        leave_out: Taken out again: asked for by a package, not needed, and not importable
            beside the others.
    """

    pins: tuple[str, ...]
    compiles_llama_cpp: bool = False
    leave_out: tuple[str, ...] = ()


LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"

#: By name. A release of PyTorch that is not named takes a CUDA build of gigabytes along.
ENVIRONMENTS = {
    "transformers": Environment(
        ("torch==2.13.0", "transformers==5.23.0", "safetensors==0.8.0", "optimum-quanto==0.2.7")
    ),
    "llama-cpp": Environment((LLAMA_CPP_PYTHON,), compiles_llama_cpp=True),
    "openvino": Environment(
        ("torch==2.13.0", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0"),
        leave_out=("torchvision",),
    ),
    "vllm": Environment(("vllm==0.33.0",)),
}


@dataclasses.dataclass(frozen=True)
class System:
    """One line of the comparison.

    Args:
        module: Of this package; what is run.
        environment: Key of `ENVIRONMENTS`, or `OWN`.
        weights: Key of `benchmarks.peers.weights.FORMS`.
        weight_bits: Bits of a weight as stored, scales included.
        cache_bits: Bits of a number in the cache, scales included.
        settings: What the module reads.
        server: Whether its rows are callers of a server, each for itself.
    """

    module: str
    environment: str
    weights: str
    weight_bits: float = 32
    cache_bits: float = 32
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    server: bool = False


def _llama(weights: str, cache: str, server: bool = False) -> System:
    # Blocks of 32 numbers with a scale of 16 bits.
    bits = {"f32": 32, "f16": 16, "q8_0": 8.5, "q4_0": 4.5}
    return System(
        "llamacpp_server" if server else "llamacpp",
        "llama-cpp",
        f"gguf-{weights}",
        bits[weights],
        bits[cache],
        {"cache": cache},
        server,
    )


#: By name, ours first; what all others are compared with is `REFERENCE`.
SYSTEMS = {
    "tfkv": System("tfkv_artifact", OWN, "artifact-f32"),
    "tfkv int8": System("tfkv_artifact", OWN, "artifact-int8", 8, 8),
    "tfkv gRPC": System("tfkv_server", OWN, "artifact-f32", server=True),
    "tfkv gRPC int8": System("tfkv_server", OWN, "artifact-int8", 8, 8, server=True),
    "keras-nlp": System("keras_nlp", OWN, "source"),
    "no cache": System("no_cache", OWN, "source"),
    "transformers dynamic": System(
        "torch_transformers", "transformers", "hugging-face", settings={"cache": "dynamic"}
    ),
    "transformers static": System(
        "torch_transformers", "transformers", "hugging-face", settings={"cache": "static"}
    ),
    "transformers quantized": System(
        "torch_transformers",
        "transformers",
        "hugging-face",
        cache_bits=4.5,
        settings={"cache": "quantized"},
    ),
    "llama.cpp f32, KV f32": _llama("f32", "f32"),
    "llama.cpp f32, KV f16": _llama("f32", "f16"),
    "llama.cpp f32, KV q8_0": _llama("f32", "q8_0"),
    "llama.cpp q8_0, KV q8_0": _llama("q8_0", "q8_0"),
    "llama.cpp q4_0, KV q8_0": _llama("q4_0", "q8_0"),
    "OpenVINO f32, KV f32": System(
        "openvino_pipeline", "openvino", "openvino-fp32", settings={"cache": "f32"}
    ),
    "OpenVINO int8, KV u8": System(
        "openvino_pipeline", "openvino", "openvino-int8", 8, 8, {"cache": "u8"}
    ),
    "llama.cpp server f32, KV f32": _llama("f32", "f32", server=True),
    "llama.cpp server q8_0, KV q8_0": _llama("q8_0", "q8_0", server=True),
}
#: Peers that no module runs, since they cannot be had here: name to environment. What comes of
#: asking for that is the reason in the report.
PROBED = {"vLLM": "vllm"}
REFERENCE = "tfkv"

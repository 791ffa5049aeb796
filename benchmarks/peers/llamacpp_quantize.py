"""``python -m benchmarks.peers.llamacpp_quantize FROM TO TYPE``: a GGUF file in blocks of few bits.

Every matrix is of that type, the embeddings that are the output matrix, too; what llama.cpp
would write more exactly by itself is not.
"""

from __future__ import annotations

import sys

import llama_cpp

_TYPES = {
    "q8_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, llama_cpp.GGML_TYPE_Q8_0),
    "q4_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, llama_cpp.GGML_TYPE_Q4_0),
}


def quantize(source: str, target: str, kind: str) -> None:
    """Writes the file.

    Raises:
        RuntimeError: llama.cpp says that it could not.
    """
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, whole = _TYPES[kind]
    settings.output_tensor_type = settings.token_embedding_type = whole
    settings.pure = True
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), settings)
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code} for {kind}.")


if __name__ == "__main__":
    quantize(*sys.argv[1:4])

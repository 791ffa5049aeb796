"""The same weights in the forms that systems read: ``python -m benchmarks.peers.weights FORM PATH``
writes one that our own environment makes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import sys
from typing import Any

import numpy as np

from benchmarks.peers.environments import python_of, run, variables
from benchmarks.peers.table import BUILD, OWN, ROOT
from benchmarks.registry import Say


@dataclasses.dataclass(frozen=True)
class Form:
    """How a form is made.

    Args:
        environment: Whose Python makes it.
        command: Behind that Python: ``{path}`` is what is to be made, ``{of}`` where the form that
            it is made from lies.
        of: That form.
        file: Whether it is one file.
    """

    environment: str
    command: tuple[str, ...]
    of: str = ""
    file: bool = False


def _quantised(kind: str) -> Form:
    module = ("-m", "benchmarks.peers.llamacpp_quantize")
    return Form("llama-cpp", (*module, "{of}", "{path}", kind), "gguf-f32", file=True)


def _openvino(bits: str) -> Form:
    export = ("-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", "{of}")
    task = ("--task", "text-generation-with-past", "--weight-format", bits, "{path}")
    return Form("openvino", (*export, *task), "hugging-face")


_OWN = ("-m", "benchmarks.peers.weights")

#: By name. What `keras-nlp` reads, ``source``, is in the package that our importer reads.
FORMS = {
    "facts": Form(OWN, (*_OWN, "facts", "{path}"), file=True),
    "hugging-face": Form(OWN, (*_OWN, "hugging-face", "{path}")),
    "gguf-f32": Form(OWN, (*_OWN, "gguf-f32", "{path}"), file=True),
    "gguf-q8_0": _quantised("q8_0"),
    "gguf-q4_0": _quantised("q4_0"),
    "openvino-fp32": _openvino("fp32"),
    "openvino-int8": _openvino("int8"),
}
#: Engines of `benchmarks.artifacts`, which knows when they are out of date.
_ARTIFACTS = {"artifact-f32": "wide", "artifact-int8": "wide-int8"}


def path_of(form: str, say: Say) -> pathlib.Path:
    """Where a form lies, made unless it is there.

    Raises:
        Absent: It cannot be made.
    """
    if form in _ARTIFACTS:
        name = _ARTIFACTS[form]
        say(f"exporting {name}, unless it has been done ...")
        prepare = f"from benchmarks.artifacts import prepare; prepare({name!r})"
        run([sys.executable, "-c", prepare], BUILD / f"{form}.log", variables(OWN, 1))
        return ROOT / "artifacts" / f"bench-{name}"
    if form == "source":
        return ROOT
    made = FORMS[form]
    path = BUILD / "weights" / (f"{form}.gguf" if form.startswith("gguf") else form)
    if path.exists():
        return path
    of = path_of(made.of, say) if made.of else path
    say(f"writing the weights as {form} ...")
    unfinished = path.with_name(f"unfinished-{path.name}")
    _remove(unfinished)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    words = [word.format(of=of, path=unfinished) for word in made.command]
    python = python_of(made.environment, say)
    run([python, *words], BUILD / f"{form}.log", variables(made.environment, 1))
    unfinished.rename(path)
    return path


def _remove(path: pathlib.Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def write_facts(path: pathlib.Path) -> None:
    """Token ids of the text, and what a token costs, as JSON."""
    from benchmarks import texts

    source = texts.model()
    model = source.config
    heads = model.num_query_heads * model.head_dim
    pairs = model.num_key_value_heads * model.head_dim
    matrices = model.hidden_dim * (2 * heads + 2 * pairs + 3 * model.intermediate_dim)
    weights = sum(array.nbytes for array in source.weights.values())
    facts = {
        "weight_bytes": weights,
        "cache_bytes_per_token": 2 * model.num_layers * pairs * 4,
        "flop_per_token": 2 * model.num_layers * matrices,
        "flop_per_token_and_position": 4 * model.num_layers * heads,
        "text": texts.real_text().tolist(),
    }
    path.write_text(json.dumps(facts), encoding="utf-8")


def write_hugging_face(folder: pathlib.Path) -> None:
    """A folder that transformers reads: Llama in float32."""
    from safetensors.numpy import save_file

    from benchmarks import texts

    source = texts.model()
    model = source.config
    folder.mkdir(parents=True)
    tensors = {
        _hugging_face_name(name): np.ascontiguousarray(_rows(name, array))
        for name, array in source.weights.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        dtype="float32",
        vocab_size=model.vocabulary_size,
        hidden_size=model.hidden_dim,
        intermediate_size=model.intermediate_dim,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_query_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        hidden_act="silu",
        max_position_embeddings=model.context_length,
        rms_norm_eps=model.rms_epsilon,
        rope_theta=model.rope_max_wavelength,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_max_wavelength},
        tie_word_embeddings=model.tie_embeddings,
    )
    _write(folder / "generation_config.json", do_sample=False)
    (folder / "tokenizer.json").write_text(source.tokenizer_json or "", encoding="utf-8")
    _write(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def _write(path: pathlib.Path, **values: Any) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")


_NAMES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "feedforward_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "token_embedding": "embed_tokens",
    "final_norm": "norm",
}


def _hugging_face_name(name: str) -> str:
    if name == "output":
        return "lm_head.weight"
    *layer, leaf = name.split("/")
    return ".".join(["model", *layer, _NAMES[leaf], "weight"])


def _rows(name: str, array: np.ndarray) -> np.ndarray:
    """A weight with a row for each output, as PyTorch has it."""
    from tfkv.export.importers.source import is_matrix, matrix_shape

    if not is_matrix(name) or name in ("token_embedding", "output"):
        return array
    outputs, inputs = matrix_shape(name, array.shape)
    return array.reshape(inputs, outputs).T


def write_gguf(path: pathlib.Path) -> None:
    """The file that our importer reads, with every tensor in float32."""
    import gguf

    from tfkv.export.importers.gguf import find_smollm2

    reader = gguf.GGUFReader(find_smollm2())
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = int(gguf.LlamaFileType.ALL_F32)
        items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_WRITERS = {"facts": write_facts, "hugging-face": write_hugging_face, "gguf-f32": write_gguf}


if __name__ == "__main__":
    _WRITERS[sys.argv[1]](pathlib.Path(sys.argv[2]))

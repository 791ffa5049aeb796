"""A server of the contract with a toy model, and with faults on demand.

It speaks real gRPC on a real socket and keeps to the rules that an artifact's graph keeps to:
calls are declarative, what is stored is answered from history, a refused row changes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import Finish, Status
from tfkv.manifest import MANIFEST_PATH, STATS, TOKENIZER_PATH, Manifest, signature_table
from tfkv.serving import Client, Retry, wire
from tfkv.serving.contract import Contract

VOCABULARY = 300
LAYERS, HEADS, ENTRIES = 3, 4, 64
STOP = 1
FAST = Retry(first_wait=0.001, longest_wait=0.01, attempt_timeout=0.4)
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_next(history: Sequence[int], row: Mapping[str, Any]) -> int:
    """The toy model: the next token depends on every token before it, and on the seed."""
    seed = int(row["seed"]) if row["temperature"] > 0 else 0
    return 2 + zlib.crc32(np.array([*history, seed], np.int64).tobytes()) % (VOCABULARY - 2)


def toy_logprob(history: Sequence[int]) -> float:
    return -float(zlib.crc32(np.array(history, np.int64).tobytes()) % 1000) / 100.0


@dataclasses.dataclass
class Held:
    tokens: list[int] = dataclasses.field(default_factory=list)
    kinds: list[str] = dataclasses.field(default_factory=list)

    def append(self, token: int, kind: str) -> None:
        self.tokens.append(token)
        self.kinds.append(kind)


def toy_logits(history: Sequence[int]) -> np.ndarray:
    logits = np.zeros(VOCABULARY, np.float32)
    logits[toy_next(history, {"temperature": 0.0, "seed": 0})] = 5.0
    return logits


class Refused(Exception):
    def __init__(self, status: Status, detail: int = 0) -> None:
        super().__init__(status.name)
        self.status, self.detail = status, detail


class FakeServer:
    """See the module's docstring.

    ``faults`` is consumed one a Predict call: None, "unavailable", "exhausted", "lost" (applied,
    reply lost), "slow" (applied, reply late), "late" (reply late, applied after that), "epoch"
    (forgets all first), "busy", "full", "partial" (a third of the prefill), "none" (no prefill).
    """

    def __init__(self, engine: EngineConfig | None = None, stop_tokens: tuple[int, ...] = (STOP,)):
        self.engine = engine or EngineConfig(decode_chunk=4, prefill_tokens=8)
        self.stop_tokens = stop_tokens
        self.table = signature_table(self.engine, stop_tokens)
        self.contract = Contract.of_engine(self.engine, stop_tokens)
        self.next_token: Callable[[Sequence[int], Mapping[str, Any]], int] = toy_next
        self.faults: collections.deque[str | None] = collections.deque()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.sessions: dict[tuple[bytes, bytes], Held] = {}
        self.epoch = 1
        self.rollback: int | None = None
        self.slots = 1000
        self.logits: Callable[[Sequence[int]], np.ndarray] = toy_logits
        self.predictions = 0
        self.limit = 100_000
        self.metadata_allowed = True
        self.computed = 0
        self._lock = threading.Lock()
        self._port = 0
        self._server: grpc.Server | None = None

    # Life

    def start(self) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((self._handlers(),))
        for _ in range(100):
            try:
                self._port = server.add_insecure_port(f"127.0.0.1:{self._port}")
                break
            except RuntimeError:
                time.sleep(0.05)
        server.start()
        self._server = server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()

    def forget(self) -> None:
        self.sessions.clear()
        self.epoch += 1

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            wire.PREDICT: (self._predict, wire.PredictRequest),
            wire.GET_MODEL_METADATA: (self._metadata, wire.GetModelMetadataRequest),
            wire.GET_MODEL_STATUS: (self._model_status, wire.GetModelStatusRequest),
        }

        class Handler(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                if details.method not in methods:
                    return None
                function, request = methods[details.method]
                return grpc.unary_unary_rpc_method_handler(
                    function, request.FromString, lambda reply: reply.SerializeToString()
                )

        return Handler()

    # Calls

    def _predict(self, request: Any, context: Any) -> Any:
        if request.model_spec.name != "tfkv":
            name = request.model_spec.name
            context.abort(
                grpc.StatusCode.NOT_FOUND, f"Servable not found for request: Latest({name})"
            )
        signature = request.model_spec.signature_name
        inputs = {name: wire.to_array(proto) for name, proto in request.inputs.items()}
        self._check_names(signature, inputs, context)
        with self._lock:
            fault = self.faults.popleft() if self.faults else None
            if fault == "epoch":
                self.forget()
        self._fail_before(fault, context)
        with self._lock:
            answer = self._rows(signature, inputs, fault)
        if fault == "lost":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if fault == "slow":
            time.sleep(0.6)
        reply = wire.PredictResponse()
        for name, array in answer.items():
            reply.outputs[name].CopyFrom(wire.to_proto(array))
        return reply

    def _check_names(self, signature: str, inputs: Mapping[str, Any], context: Any) -> None:
        if signature not in self.table:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f'Serving signature key "{signature}" not found.',
            )
        expected = set(self.table[signature].inputs)
        if set(inputs) != expected:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"input size does not match signature: {len(inputs)}!={len(expected)} Sent extra: "
                f"{set(inputs) - expected}. Missing but required: {expected - set(inputs)}.",
            )
        for name, spec in self.table[signature].inputs.items():
            wanted = np.dtype(object if spec.dtype == "string" else spec.dtype)
            if inputs[name].dtype != wanted:
                context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"Expects {name} to be {spec.dtype} but {inputs[name].dtype} is provided",
                )

    def _fail_before(self, fault: str | None, context: Any) -> None:
        if fault == "unavailable":
            context.abort(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
        if fault == "exhausted":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Server Threadpool Exhausted")
        if fault == "late":
            time.sleep(0.6)

    def _rows(
        self, signature: str, inputs: Mapping[str, np.ndarray], fault: str | None
    ) -> dict[str, np.ndarray]:
        count = len(inputs["session_id"])
        self.predictions += 1
        answers = []
        for index in range(count):
            row = {name: array[index] for name, array in inputs.items()}
            self.calls.append((signature, row))
            answers.append(self._row(signature, row, fault))
        return {
            name: np.array([answer[name] for answer in answers], spec.dtype)
            for name, spec in self.table[signature].outputs.items()
        }

    def _row(self, signature: str, row: dict[str, Any], fault: str | None) -> dict[str, Any]:
        answer: dict[str, Any] = {"status": 0, "detail": 0, "epoch": self.epoch, "position": 0}
        for name, spec in self.table[signature].outputs.items():
            if name not in answer:
                sizes = {"V": VOCABULARY, "heads": HEADS, "entries": ENTRIES}
                shape = [sizes.get(str(size), size) for size in spec.shape]
                answer[name] = np.full(shape, -1 if name == "tokens" else 0, spec.dtype)
        try:
            if fault == "busy":
                raise Refused(Status.BUSY)
            if fault == "full":
                raise Refused(Status.FULL, 5)
            answer.update(getattr(self, f"_{signature}")(row, fault))
        except Refused as refused:
            answer.update(status=refused.status, detail=refused.detail)
        return answer

    def _hold(self, row: dict[str, Any], fault: str | None, kind: str) -> tuple[Held, int, bool]:
        """Makes the session hold the row's tokens; says where they end and whether they do."""
        key, position, length = self._key(row), int(row["position"]), int(row["length"])
        given = [int(token) for token in row["tokens"][:length]]
        for token in given:
            if not 0 <= token < VOCABULARY:
                raise Refused(Status.INVALID, 2)
        held = self.sessions.get(key)
        if held is None:
            if position > 0:
                raise Refused(Status.UNKNOWN)
            if not given:
                raise Refused(Status.EMPTY)
            held = Held()
        if position > len(held.tokens):
            raise Refused(Status.GAP, len(held.tokens))
        if position + length > self.limit:
            raise Refused(Status.OVERFLOW, self.limit)
        for index, (old, new) in enumerate(zip(held.tokens[position:], given, strict=False)):
            if old != new:
                raise Refused(Status.CONFLICT, position + index)
        missing = given[len(held.tokens) - position :]
        if key not in self.sessions and len(self.sessions) >= self.slots:
            raise Refused(Status.FULL, 5)
        taken = {"partial": (len(missing) + 2) // 3, "none": 0}.get(str(fault), len(missing))
        if taken or key in self.sessions:
            self.sessions[key] = held
        for token in missing[:taken]:
            held.append(token, kind)
        self.computed += taken
        return held, position + length, taken == len(missing)

    def _generate(self, row: dict[str, Any], fault: str | None) -> dict[str, Any]:
        if not np.isfinite(row["temperature"]) or row["temperature"] < 0:
            raise Refused(Status.INVALID, 6)
        wanted = min(int(row["max_new_tokens"]), self.engine.decode_chunk)
        key, end = self._key(row), int(row["position"] + row["length"])
        before = self.sessions.get(key)
        if wanted and before and len(before.tokens) > end and before.kinds[end] == "given":
            raise Refused(Status.CONFLICT, end)
        held, end, whole = self._hold(row, fault, "given")
        if not whole or not wanted or fault == "none":
            return {"position": len(held.tokens), "count": 0}
        stops = {int(token) for token in row["stop_tokens"] if token >= 0}
        finish, sampled = Finish.LENGTH, []
        while len(sampled) < wanted:
            at = end + len(sampled)
            if at >= len(held.tokens):
                if at >= self.limit:
                    finish = Finish.CAPACITY
                    break
                held.append(self.next_token(held.tokens, row), "sampled")
                self.computed += 1
            elif held.kinds[at] == "given":
                break
            sampled.append(held.tokens[at])
            if sampled[-1] in stops:
                finish = Finish.STOP
                break
        tokens = np.full(self.engine.decode_chunk, -1, np.int32)
        tokens[: len(sampled)] = sampled
        logprobs = np.zeros(self.engine.decode_chunk, np.float32)
        for index in range(len(sampled)):
            logprobs[index] = toy_logprob(held.tokens[: end + index + 1])
        return {
            "tokens": tokens,
            "count": len(sampled),
            "logprobs": logprobs,
            "finish": finish,
            "position": len(held.tokens),
        }

    def _decode(self, row: dict[str, Any], fault: str | None) -> dict[str, Any]:
        held, end, _ = self._hold(row, fault, "given")
        return {"logits": self.logits(held.tokens[:end]), "position": len(held.tokens)}

    def _score(self, row: dict[str, Any], fault: str | None) -> dict[str, Any]:
        held, end, _ = self._hold(row, fault, "given")
        logprobs = np.zeros(self.engine.prefill_tokens, np.float32)
        start, reached = int(row["position"]), min(end, len(held.tokens))
        for at in range(start, reached):
            logprobs[at - start] = toy_logprob(held.tokens[: at + 1]) if at else 1.0
        return {"logprobs": logprobs, "count": reached - start, "position": len(held.tokens)}

    def _attention(self, row: dict[str, Any], _: str | None) -> dict[str, Any]:
        """Entries lie backwards, and each head looks at the first token and at its own."""
        held, position = self.sessions.get(self._key(row)), int(row["position"])
        if held is None:
            raise Refused(Status.UNKNOWN)
        if row["layer"] >= LAYERS:
            raise Refused(Status.INVALID, 18)
        if position >= len(held.tokens):
            raise Refused(Status.GAP, len(held.tokens))
        positions = np.full(ENTRIES, -1, np.int32)
        positions[ENTRIES - len(held.tokens) :] = np.arange(len(held.tokens))[::-1]
        weights = np.zeros([HEADS, ENTRIES], np.float32)
        for head in range(HEADS):
            weights[head] += (positions == 0) * (0.5 + head / 10)
            weights[head] += (positions == position) * (0.5 - head / 10)
        return {"weights": weights, "positions": positions, "position": len(held.tokens)}

    def _truncate(self, row: dict[str, Any], _: str | None) -> dict[str, Any]:
        held = self.sessions.get(self._key(row))
        if held is None:
            raise Refused(Status.UNKNOWN)
        position = int(row["position"])
        if position > len(held.tokens):
            raise Refused(Status.GAP, len(held.tokens))
        if self.rollback is not None and len(held.tokens) - position > self.rollback:
            raise Refused(Status.NOT_REVERSIBLE, len(held.tokens) - self.rollback)
        del held.tokens[position:], held.kinds[position:]
        return {"position": position}

    def _fork(self, row: dict[str, Any], _: str | None) -> dict[str, Any]:
        held = self.sessions.get(self._key(row))
        if held is None:
            raise Refused(Status.UNKNOWN)
        position = int(row["position"])
        position = len(held.tokens) if position < 0 else position
        if position > len(held.tokens):
            raise Refused(Status.GAP, len(held.tokens))
        if position == 0:
            raise Refused(Status.EMPTY)
        if self.rollback is not None and len(held.tokens) - position > self.rollback:
            raise Refused(Status.NOT_REVERSIBLE, len(held.tokens) - self.rollback)
        key = row["tenant"], row["target"]
        if key not in self.sessions:
            if len(self.sessions) >= self.slots:
                raise Refused(Status.FULL, 5)
            self.sessions[key] = Held(held.tokens[:position], held.kinds[:position])
        found = self.sessions[key].tokens
        for at in range(position):
            if at >= len(found) or found[at] != held.tokens[at]:
                raise Refused(Status.CONFLICT, at)
        return {"position": len(found)}

    def _close(self, row: dict[str, Any], _: str | None) -> dict[str, Any]:
        if self.sessions.pop(self._key(row), None) is None:
            raise Refused(Status.UNKNOWN)
        return {}

    def _stats(self, _: dict[str, Any], __: str | None) -> dict[str, Any]:
        return {**dict.fromkeys(STATS, 0), "slots_used": len(self.sessions)}

    @staticmethod
    def _key(row: Mapping[str, Any]) -> tuple[bytes, bytes]:
        return row["tenant"], row["session_id"]

    # What it says of itself

    def _metadata(self, request: Any, context: Any) -> Any:
        if not self.metadata_allowed:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        found = wire.SignatureDefMap()
        for name, spec in self.table.items():
            signature = found.signature_def[name]
            for side in ("inputs", "outputs"):
                for key, tensor in getattr(spec, side).items():
                    info = getattr(signature, side)[key]
                    for size in (-1, *tensor.shape):
                        info.tensor_shape.dim.add(size=size if isinstance(size, int) else -1)
        stops = np.array([self.contract.stops(None)], np.int32)
        found.signature_def["generate"].defaults["stop_tokens"].CopyFrom(wire.to_proto(stops))
        reply = wire.GetModelMetadataResponse()
        reply.metadata["signature_def"].value = found.SerializeToString()
        return reply

    def _model_status(self, request: Any, context: Any) -> Any:
        if request.model_spec.name != "tfkv":
            name = request.model_spec.name
            context.abort(grpc.StatusCode.NOT_FOUND, f"Could not find any versions of model {name}")
        reply = wire.GetModelStatusResponse()
        reply.model_version_status.add(version=1, state=50)
        reply.model_version_status.add(version=2, state=30)
        return reply


@pytest.fixture
def make_server() -> Iterator[Callable[..., FakeServer]]:
    made: list[FakeServer] = []

    def make(*args: Any, **kwargs: Any) -> FakeServer:
        server = FakeServer(*args, **kwargs)
        server.start()
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def server(make_server: Callable[..., FakeServer]) -> FakeServer:
    return make_server()


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.target, retry=FAST, timeout=10.0) as made:
        yield made


@pytest.fixture
def fast_retry() -> Retry:
    return FAST


@pytest.fixture(scope="session")
def byte_tokenizer() -> tokenizers.Tokenizer:
    """A real byte-level BPE tokenizer without merges: every byte is a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


@pytest.fixture
def artifact(tmp_path: Any, server: FakeServer, byte_tokenizer: tokenizers.Tokenizer) -> Any:
    """A model directory with what a client reads of an artifact."""
    version = tmp_path / "model" / "1"
    (version / "assets.extra").mkdir(parents=True)
    (version / "saved_model.pb").write_bytes(b"")
    manifest = Manifest(
        model=DecoderConfig(VOCABULARY, 1, 8, 1, 1, 8, 8),
        engine=server.engine,
        signatures=server.table,
        fingerprint="f",
        bytes_per_token=1,
        bytes_per_session=1,
        positions=1000,
        stop_tokens=server.stop_tokens,
        chat_template=TEMPLATE,
        special_tokens={"eos": "<|im_end|>"},
    )
    (version / MANIFEST_PATH).write_text(manifest.to_json(), encoding="utf-8")
    byte_tokenizer.save(str(version / TOKENIZER_PATH))
    json.loads((version / TOKENIZER_PATH).read_text(encoding="utf-8"))
    return version.parent


@pytest.fixture
def say(server: FakeServer, byte_tokenizer: tokenizers.Tokenizer) -> Callable[..., None]:
    """Makes the server answer with given texts, one a turn, each ended by a stop token."""

    def speak(*texts: str) -> None:
        def next_token(history: Sequence[int], _: Mapping[str, Any]) -> int:
            # The turn is the number of assistant headers; what follows it was said already.
            header = byte_tokenizer.encode("<|im_start|>assistant\n").ids
            starts = [
                at + len(header)
                for at in range(len(history))
                if list(history[at : at + len(header)]) == header
            ]
            said = history[starts[-1] :]
            script = [*byte_tokenizer.encode(texts[len(starts) - 1]).ids, STOP]
            return script[len(said)]

        server.next_token = next_token

    return speak


@pytest.fixture
def expected() -> Callable[..., list[int]]:
    """The toy model's continuation of a history, without any server."""

    def continuation(history: Sequence[int], count: int, seed: int | None = None) -> list[int]:
        row = {"temperature": 0.0 if seed is None else 1.0, "seed": seed or 0}
        tokens = list(history)
        for _ in range(count):
            tokens.append(toy_next(tokens, row))
        return tokens[len(history) :]

    return continuation


@pytest.fixture
def new_id() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"session-{next(numbers)}-{secrets.token_hex(4)}"

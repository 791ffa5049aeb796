"""Client of an artifact on TensorFlow Serving, or on the embedded server."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import grpc
import numpy as np

from tfkv.chat_template import ChatTemplate
from tfkv.config import EngineConfig
from tfkv.errors import DeadlineError, Status
from tfkv.manifest import TOKENIZER_PATH, Manifest, latest_version
from tfkv.serving import failures, wire
from tfkv.serving.contract import Contract, Row
from tfkv.serving.generation import Generation, Prompt, Sampling
from tfkv.serving.offload import OffloadTier
from tfkv.serving.retry import Deadline, Retry
from tfkv.serving.session import Session
from tfkv.serving.text import Tokenizer

_RETRIED_STATUS = (Status.BUSY, Status.FULL)


@dataclasses.dataclass(frozen=True)
class VersionStatus:
    """State of one version of the model on the server.

    Args:
        version: Its number.
        state: ``START``, ``LOADING``, ``AVAILABLE``, ``UNLOADING``, ``END`` or ``UNKNOWN``.
        message: What went wrong, empty when nothing did.
    """

    version: int
    state: str
    message: str = ""


class Client:
    """Speaks to one model over gRPC, and keeps conversations going through failures.

    Use it for everything short of raw protobuf: one-shot generation, sessions of many
    turns, scoring, statistics. One client serves any number of threads; a session belongs
    to one thread at a time.

    Args:
        target: ``host:port`` of the gRPC endpoint, or any gRPC target.
        model: Model name on the server.
        artifact: Directory of the artifact (a version, or the model directory above it):
            gives tokenizer, chat template, stop tokens and the limits of a call. Without it
            the limits are asked from the server, and only token ids can be sent.
        tokenizer: Path of a ``tokenizer.json``, where there is no artifact at hand.
        tenant: Owner of the sessions; those of two tenants never meet.
        timeout: Seconds for each bounded call, its repetitions included.
        version: Version number to address; the newest by default.
        version_label: Version label to address, instead of a number.
        credentials: Channel credentials for TLS; a plain channel by default.
        max_message_bytes: Largest message sent or received.
        retry: How calls are repeated.
        offload: Directory for sessions that the server has no room for, see `OffloadTier`;
            by default a call that finds the server full waits, and then fails.

    Raises:
        ArtifactError: The artifact's directory or manifest cannot be read.
        TextError: The tokenizer cannot be read.
        InputError: Both a version and a label are given.

    Example:
        >>> with Client("localhost:8500", artifact="artifacts/smollm2") as client:
        ...     with client.session() as session:
        ...         for piece in session.chat("What is the capital of France?"):
        ...             print(piece, end="", flush=True)
    """

    def __init__(
        self,
        target: str,
        model: str = "tfkv",
        *,
        artifact: str | pathlib.Path | None = None,
        tokenizer: str | pathlib.Path | None = None,
        tenant: str = "",
        timeout: float = 120.0,
        version: int | None = None,
        version_label: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        max_message_bytes: int = 1 << 30,
        retry: Retry | None = None,
        offload: str | pathlib.Path | None = None,
    ) -> None:
        if version is not None and version_label is not None:
            raise failures.InputError("Give `version` or `version_label`, not both.")
        self.target = target
        self.model = model
        self.tenant = tenant
        self.timeout = timeout
        self.retry = retry or Retry()
        #: Where idle sessions wait, if anywhere.
        self.offload = None if offload is None else OffloadTier(self, offload)
        self.manifest: Manifest | None = None
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        self._version = version
        self._version_label = version_label
        self._contract: Contract | None = None
        self._lock = threading.Lock()
        if artifact is not None:
            self._read_artifact(pathlib.Path(artifact))
        if tokenizer is not None:
            self.tokenizer = Tokenizer.from_file(tokenizer)
        self._channel = _open_channel(target, credentials, max_message_bytes)
        self._predict = self._method(wire.PREDICT, wire.PredictResponse)
        self._metadata = self._method(wire.GET_MODEL_METADATA, wire.GetModelMetadataResponse)
        self._status = self._method(wire.GET_MODEL_STATUS, wire.GetModelStatusResponse)

    def _read_artifact(self, artifact: pathlib.Path) -> None:
        directory = latest_version(artifact)
        self.manifest = Manifest.read(directory)
        self._contract = Contract.of_manifest(self.manifest)
        if (directory / TOKENIZER_PATH).exists():
            self.tokenizer = Tokenizer.from_file(directory / TOKENIZER_PATH)
        if self.manifest.chat_template:
            self.chat_template = ChatTemplate(
                self.manifest.chat_template, self.manifest.special_tokens
            )

    def _method(self, path: str, response: Any) -> Any:
        return self._channel.unary_unary(
            path,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=response.FromString,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel. Sessions on the server live on until they expire."""
        self._channel.close()

    # Calls

    def predict(
        self,
        signature: str,
        inputs: Mapping[str, Any],
        timeout: float | None = None,
        *,
        deadline: Deadline | None = None,
    ) -> dict[str, np.ndarray]:
        """Calls a signature with arrays, and repeats the call where that is safe and useful.

        A call with a negative ``position`` ("at the end") is not repeated when it may have
        been applied already.

        Args:
            signature: Name of the signature.
            inputs: Input name to array or nested list; nothing is added.
            timeout: Seconds, repetitions included; the client's by default.
            deadline: An outer limit on top of it.

        Returns:
            Output name to array; strings as `bytes`.

        Raises:
            RefusedError: The server refuses the call.
            UnavailableError: It stayed out of reach or overloaded.
            DeadlineError: No answer in time.
        """
        limit = self._limit(timeout, deadline)
        position = inputs.get("position")
        repeatable = position is None or bool(np.all(np.asarray(position) >= 0))
        request = self._request(signature, inputs)
        return self.retry.run(
            lambda seconds: self._predict_once(request, seconds), limit, repeatable=repeatable
        )

    def call(
        self,
        signature: str,
        rows: Sequence[Row],
        timeout: float | None = None,
        *,
        deadline: Deadline | None = None,
    ) -> list[Row]:
        """One bounded call with rows of the contract; what a row leaves out is filled in.

        Args:
            signature: Name of the signature.
            rows: Input name to value, one mapping a row; ``tokens`` may differ in length.
            timeout: Seconds, repetitions included; the client's by default.
            deadline: An outer limit on top of it.

        Returns:
            Output name to value, one mapping a row. Look at ``status`` of each: a refused
            row raises nothing here.

        Raises:
            InputError: A row does not fit the contract.
            ServerError: As for `predict`.
        """
        limit = self._limit(timeout, deadline)
        contract = self.contract
        inputs = contract.encode(signature, [self._owned(signature, row) for row in rows])
        outputs = self.predict(signature, inputs, deadline=limit, timeout=timeout)
        return contract.decode(signature, outputs, len(rows))

    def call_row(self, signature: str, row: Row, deadline: Deadline) -> Row:
        """One bounded call of one row, repeated while the answer is BUSY or FULL.

        With an offload tier, FULL first moves idle sessions out.

        Returns:
            The answer, whatever its status otherwise.

        Raises:
            RowError: The row was still BUSY or FULL when time was up.
            ServerError: As for `predict`.
        """
        contract = self.contract
        limit = self._limit(None, deadline)
        request = self._request(
            signature, contract.encode(signature, [self._owned(signature, row)])
        )

        def attempt(seconds: float) -> Row:
            outputs = self._predict_once(request, seconds)
            answer = contract.decode(signature, outputs, 1)[0]
            if answer["status"] == Status.FULL and self.offload and self.offload.make_room():
                return attempt(seconds)
            if answer["status"] in _RETRIED_STATUS:
                where = f"`{signature}` of session {row.get('session_id')!r}"
                raise failures.row_error(answer["status"], answer["detail"], where)
            return answer

        return self.retry.run(attempt, limit)

    def _owned(self, signature: str, row: Row) -> Row:
        """The row with this client's tenant, where the signature has one."""
        spec = self.contract.signatures.get(signature)
        if spec is None or "tenant" not in spec.inputs or "tenant" in row:
            return row
        return {**row, "tenant": self.tenant}

    def _limit(self, timeout: float | None, deadline: Deadline | None) -> Deadline:
        seconds = self.timeout if timeout is None else timeout
        return (deadline or Deadline.after(None)).earlier(seconds)

    def _request(self, signature: str, inputs: Mapping[str, Any]) -> Any:
        request = wire.PredictRequest(model_spec=self._model_spec(signature))
        for name, value in inputs.items():
            request.inputs[name].CopyFrom(wire.to_proto(value))
        return request

    def _predict_once(self, request: Any, seconds: float) -> dict[str, np.ndarray]:
        reply = self._send(self._predict, request, seconds, request.model_spec.signature_name)
        return {name: wire.to_array(proto) for name, proto in reply.outputs.items()}

    def _send(self, method: Any, request: Any, seconds: float, what: str) -> Any:
        try:
            return method(request, timeout=seconds)
        except grpc.RpcError as error:
            where = f"`{what}` of model {self.model!r} on {self.target}"
            raise failures.from_rpc_error(error, where) from error
        except ValueError as error:  # grpc's way to say that the channel is closed
            raise failures.SessionError(f"The client is closed ({error}).") from error

    def _model_spec(self, signature: str = "") -> Any:
        spec = wire.ModelSpec(name=self.model, signature_name=signature)
        if self._version is not None:
            spec.version.value = self._version
        elif self._version_label is not None:
            spec.version_label = self._version_label
        return spec

    # What the server says of itself

    @property
    def contract(self) -> Contract:
        """Signatures and limits: the artifact's manifest's, or asked from the server once."""
        with self._lock:
            if self._contract is None:
                self._contract = self._discover()
            return self._contract

    def _discover(self) -> Contract:
        try:
            return Contract.of_metadata(self.signatures())
        except failures.NotFoundError:
            raise
        except failures.RefusedError:
            # A proxy that passes Predict alone; the limits every export has by default.
            return Contract.of_engine(EngineConfig(batch_sizes=(1,)))

    def signatures(self, timeout: float | None = None) -> dict[str, Any]:
        """Signature name to ``SignatureDef``, as the server has them.

        Raises:
            ServerError: As for `predict`.
        """
        request = wire.GetModelMetadataRequest(
            model_spec=self._model_spec(), metadata_field=["signature_def"]
        )
        reply = self.retry.run(
            lambda seconds: self._send(self._metadata, request, seconds, "GetModelMetadata"),
            self._limit(timeout, None),
        )
        found = wire.SignatureDefMap.FromString(reply.metadata["signature_def"].value)
        return dict(found.signature_def)

    def status(self, timeout: float | None = None) -> list[VersionStatus]:
        """Versions of the model and their state, newest first.

        Raises:
            NotFoundError: The server has no such model.
            ServerError: As for `predict`.
        """
        spec = self._model_spec()
        request = wire.GetModelStatusRequest(model_spec=spec)
        reply = self.retry.run(
            lambda seconds: self._send(self._status, request, seconds, "GetModelStatus"),
            self._limit(timeout, None),
        )
        names = {number: name for name, number in wire.VERSION_STATES.items()}
        versions = [
            VersionStatus(item.version, names.get(item.state, "UNKNOWN"), item.status.error_message)
            for item in reply.model_version_status
        ]
        return sorted(versions, key=lambda item: -item.version)

    def wait_ready(self, timeout: float = 60.0, poll: float = 0.2) -> VersionStatus:
        """Waits until a version of the model can be called.

        Raises:
            DeadlineError: None became available in time.
            ServerError: The server failed in a way that waiting does not mend.
        """
        deadline = Deadline.after(timeout)
        while True:
            try:
                versions = self.status(timeout=deadline.left())
            except failures.NotFoundError:
                versions = []
            for version in versions:
                if version.state == "AVAILABLE":
                    return version
            if deadline.left() <= poll:
                raise DeadlineError(
                    f"Model {self.model!r} on {self.target} was not available within {timeout} s. "
                    f"Its versions: {versions}."
                )
            time.sleep(poll)

    def stats(self, timeout: float | None = None) -> dict[str, int]:
        """Counters of the artifact: slots, pages, tokens, refusals, epoch.

        Raises:
            ServerError: As for `predict`.
        """
        answer = self.call("stats", [{"session_id": "stats"}], timeout)[0]
        return {name: value for name, value in answer.items() if isinstance(value, int)}

    def adapters(self, timeout: float | None = None) -> dict[str, str]:
        """Name of each adapter of the served artifact to its fingerprint.

        Raises:
            ServerError: As for `predict`.
        """
        answer = self.predict("stats", {"session_id": np.array([b"stats"], object)}, timeout)
        found: dict[str, str] = json.loads(answer["adapters"][0]) if "adapters" in answer else {}
        return found

    # Sessions

    def session(
        self,
        session_id: str | None = None,
        *,
        tokens: Sequence[int] = (),
        adapter: str = "",
        overflow: str | int = "error",
        ttl_ms: int = 0,
        pin: bool = False,
        keep: bool = False,
    ) -> Session:
        """A conversation, as a context manager that closes it on the server at its end.

        Args:
            session_id: Its name; one that cannot be guessed by default.
            tokens: Transcript to go on from, as saved from an earlier `Session.tokens`.
                What the server still holds of it is not computed again, and what it holds
                beyond it is dropped.
            adapter: Adapter of the model, empty for the base. A session that the server holds
                already has one, and keeps it.
            overflow: When the session is full: ``error``, ``stop`` or ``slide``.
            ttl_ms: Idle lifetime in ms, 0 for the artifact's.
            pin: Whether the session never expires, until it is closed.
            keep: Whether to leave the session on the server at the end.

        Raises:
            InputError: The overflow policy is unknown, an id is not an int32, or the artifact's
                manifest, where the client has it, lists no such adapter.
        """
        if self.manifest is not None and adapter and adapter not in self.manifest.adapters:
            raise failures.InputError(
                f"The artifact has no adapter {adapter!r}. It has: "
                f"{', '.join(self.manifest.adapters) or 'none, only the base'}."
            )
        name = secrets.token_urlsafe(18) if session_id is None else session_id
        if not name:
            raise failures.InputError("`session_id` must not be empty. Received: ''.")
        return Session(
            self,
            name,
            tokens=tokens,
            adapter=adapter,
            overflow=overflow,
            ttl_ms=ttl_ms,
            pin=pin,
            keep=keep,
        )

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        adapter: str = "",
        overflow: str | int = "error",
        stream: bool = True,
        timeout: float | None = None,
    ) -> Generation:
        """Continues one prompt in a session of its own, which is closed afterwards.

        Arguments, pieces and result are those of `Session.generate`; `adapter` and `overflow`
        those of `session`.
        """
        session = self.session(adapter=adapter, overflow=overflow)
        sampling = Sampling(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop_tokens=stop_tokens,
        )
        generation = session.start(prompt, sampling, timeout=timeout, close_after=True)
        return generation if stream else generation.run()


def _open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, max_message_bytes: int
) -> grpc.Channel:
    """A channel that finds a restarted server within a second."""
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A pool of connections shared by equal channels would outlive a broken one.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)

"""Rows of the contract as arrays of a call, and answers as rows again.

The set of inputs of a signature is fixed and TensorFlow Serving refuses a missing one,
so a caller names what it cares about and `Contract` adds the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tfkv.config import EngineConfig
from tfkv.errors import ServerError
from tfkv.manifest import (
    MAX_STOP_TOKENS,
    OVERFLOW_POLICIES,
    Manifest,
    SignatureSpec,
    TensorSpec,
    signature_table,
)
from tfkv.serving import wire
from tfkv.serving.failures import InputError

#: One row of a call or of its answer: input or output name to the row's value.
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Contract:
    """Signatures of an artifact as a client sees them.

    Args:
        signatures: Name to inputs and outputs, `tfkv.manifest.signature_table` of the artifact.
        decode_chunk: Most tokens one call samples (N).
        prefill_tokens: Most tokens one call carries (T).
        stop_tokens: Ids that end a turn unless the caller says otherwise.
        batch_rows: Most rows that one call may have; only the manifest says more than 1.
    """

    signatures: Mapping[str, SignatureSpec]
    decode_chunk: int
    prefill_tokens: int
    stop_tokens: tuple[int, ...] = ()
    batch_rows: int = 1

    @classmethod
    def of_engine(cls, engine: EngineConfig, stop_tokens: tuple[int, ...] = ()) -> Self:
        """The contract of an artifact with this engine."""
        table = signature_table(engine, stop_tokens)
        chunk, prefill = engine.decode_chunk, engine.prefill_tokens
        return cls(table, chunk, prefill, stop_tokens, engine.batch_sizes[-1])

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Self:
        """The contract that an artifact's own manifest states."""
        engine = manifest.engine
        return cls(
            manifest.signatures,
            engine.decode_chunk,
            engine.prefill_tokens,
            manifest.stop_tokens,
            engine.batch_sizes[-1],
        )

    @classmethod
    def of_metadata(cls, signatures: Mapping[str, Any]) -> Self:
        """The contract as the server's ``signature_def`` metadata show it.

        Args:
            signatures: Signature name to ``SignatureDef``.

        Raises:
            ServerError: The model is not an artifact of this contract.
        """
        if "generate" not in signatures:
            raise ServerError(
                f"The model has no signature `generate`, but {sorted(signatures)}. "
                "Expected an artifact that `tfkv export` wrote."
            )
        generate = signatures["generate"]
        engine = EngineConfig(batch_sizes=(1,))
        chunk = _width(generate.outputs, "tokens", engine.decode_chunk)
        prefill = engine.prefill_tokens
        if "score" in signatures:
            prefill = _width(signatures["score"].outputs, "logprobs", prefill)
        engine = dataclasses.replace(engine, decode_chunk=chunk, prefill_tokens=prefill)
        stops: tuple[int, ...] = ()
        if "stop_tokens" in generate.defaults:
            ids = wire.to_array(generate.defaults["stop_tokens"]).ravel()
            stops = tuple(int(token) for token in ids if token >= 0)
        contract = cls.of_engine(engine, stops)
        expected = set(contract.signatures["generate"].inputs)
        if set(generate.inputs) != expected:
            raise ServerError(
                f"Inputs of `generate` differ from this client's: the model has "
                f"{sorted(generate.inputs)}, expected {sorted(expected)}. "
                "Use the tfkv version that exported the artifact."
            )
        return contract

    def encode(self, signature: str, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Arrays of every input of a signature, with defaults where a row says nothing.

        ``tokens`` of different lengths are padded, ``length`` follows from them.

        Args:
            signature: Name of the signature.
            rows: At least one; TensorFlow Serving's own batching hangs on a call without.

        Raises:
            InputError: No row, an unknown or missing name, or a value that doesn't fit.
        """
        specs = self._spec(signature).inputs
        if not rows:
            raise InputError("A call needs at least one row. Received: rows=[].")
        for row in rows:
            unknown = sorted(set(row) - set(specs))
            if unknown:
                raise InputError(
                    f"`{signature}` has no input {unknown[0]!r}. Known: {', '.join(specs)}."
                )
        arrays = {}
        for name, spec in specs.items():
            if name == "tokens":
                arrays[name] = self._tokens([row.get("tokens", ()) for row in rows])
            elif name == "length":
                lengths = [row.get("length", len(row.get("tokens", ()))) for row in rows]
                arrays[name] = _column(name, spec, lengths)
            else:
                arrays[name] = _column(name, spec, [row.get(name, spec.default) for row in rows])
        return arrays

    def decode(self, signature: str, arrays: Mapping[str, np.ndarray], count: int) -> list[Row]:
        """The rows of an answer: scalars as Python numbers or bytes, the rest as arrays.

        Raises:
            ServerError: An output is missing, or has another number of rows than the call.
        """
        outputs = self._spec(signature).outputs
        for name in outputs:
            if name not in arrays or arrays[name].shape[:1] != (count,):
                received = arrays[name].shape if name in arrays else "nothing"
                raise ServerError(
                    f"Output `{name}` of `{signature}` must have {count} rows. "
                    f"Received: {received}. Is the model an artifact of this tfkv version?"
                )
        columns = {
            name: arrays[name] if spec.shape else arrays[name].tolist()
            for name, spec in outputs.items()
        }
        return [{name: column[row] for name, column in columns.items()} for row in range(count)]

    def stops(self, stop_tokens: Sequence[int] | None) -> list[int]:
        """The input ``stop_tokens``, padded with -1; ``None`` means the artifact's own.

        Raises:
            InputError: More of them than the contract has room for.
        """
        chosen = self.stop_tokens if stop_tokens is None else stop_tokens
        if len(chosen) > MAX_STOP_TOKENS:
            raise InputError(
                f"`stop_tokens` holds at most {MAX_STOP_TOKENS} ids. Received: {len(chosen)}."
            )
        return [*chosen, *[-1] * (MAX_STOP_TOKENS - len(chosen))]

    def _spec(self, signature: str) -> SignatureSpec:
        if signature not in self.signatures:
            known = ", ".join(self.signatures)
            raise InputError(f"No signature {signature!r} in the contract. Known: {known}.")
        return self.signatures[signature]

    def _tokens(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        width = max(1, *(len(row) for row in rows), 1)
        if width > self.prefill_tokens:
            raise InputError(
                f"One call carries at most {self.prefill_tokens} tokens. Received: {width}. "
                "Cut them in pieces, as a session does."
            )
        padded = np.zeros((len(rows), width), np.int32)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = token_ids(row)
        return padded


def token_ids(ids: Sequence[int]) -> list[int]:
    """Checks that ids fit the wire; whether the model knows them the server says.

    Raises:
        InputError: One is not an integer, or not within int32.
    """
    limits = np.iinfo(np.int32)
    checked = []
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise InputError(
                f"Token ids are integers. Received: {token!r} ({type(token).__name__}) "
                f"at index {index}."
            )
        if not limits.min <= token <= limits.max:
            raise InputError(f"Token ids are int32. Received: {token} at index {index}.")
        checked.append(int(token))
    return checked


def overflow_code(overflow: str | int) -> int:
    """The wire value of an overflow policy, given by name or number.

    Raises:
        InputError: There is no such policy.
    """
    if overflow in OVERFLOW_POLICIES:
        return OVERFLOW_POLICIES[str(overflow)]
    if isinstance(overflow, int) and overflow in OVERFLOW_POLICIES.values():
        return overflow
    raise InputError(
        f"`overflow` must be one of {', '.join(OVERFLOW_POLICIES)}. Received: {overflow!r}."
    )


def _column(name: str, spec: TensorSpec, values: Sequence[Any]) -> np.ndarray:
    """One input of all rows."""
    if any(value is None for value in values):
        raise InputError(f"Input `{name}` has no default: give it for every row.")
    try:
        if spec.dtype == "string":
            column = np.empty(len(values), object)
            column[:] = values
            return column
        column = np.asarray(values)
        if spec.dtype.startswith("int") and column.dtype.kind not in "iu":
            raise InputError(f"Input `{name}` takes integers. Received: {list(values)!r}.")
        exact = np.array(values, np.dtype(spec.dtype))
    except (ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"Input `{name}` takes {spec.dtype}. Received: {list(values)!r} ({error})."
        ) from error
    sizes = [size for size in spec.shape if isinstance(size, int)]
    if exact.shape != (len(values), *sizes):
        raise InputError(
            f"Input `{name}` takes {tuple(sizes) or 'one number'} a row. "
            f"Received: shape {exact.shape[1:]}."
        )
    return exact


def _width(outputs: Any, name: str, default: int) -> int:
    """Size of axis 1 of an output, or a default where the server doesn't say."""
    if name not in outputs or len(outputs[name].tensor_shape.dim) < 2:
        return default
    size = int(outputs[name].tensor_shape.dim[1].size)
    return size if size > 0 else default

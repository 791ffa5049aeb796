"""The serving signatures over an engine: shapes in, batches through, rows out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import tensorflow as tf

from tfkv.export.engine import Engine
from tfkv.export.page_copies import Piece
from tfkv.export.rows import DECODE, GENERATE, SCORE, Answer, Request
from tfkv.export.session_table import Names
from tfkv.export.text_signature import TextFace, text_body
from tfkv.export.transient import unique_name
from tfkv.manifest import MAX_STOP_TOKENS, SignatureSpec, TensorSpec

Tensors = dict[str, tf.Tensor]

#: Inputs of the computation that `decode` and `score` do not have.
_NEUTRAL: dict[str, int | float] = {
    "max_new_tokens": 0,
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "seed": 0,
    "stop_tokens": -1,
}

_ANSWERS = {
    "generate": ("tokens", "count", "logprobs", "finish"),
    "decode": ("logits",),
    "score": ("logprobs", "count"),
}
_MODES = {"generate": GENERATE, "decode": DECODE, "score": SCORE}
_FIELD_OF = {("score", "logprobs"): "scores", ("score", "count"): "taken"}


def build_signatures(
    engine: Engine, table: dict[str, SignatureSpec], face: TextFace | None = None
) -> dict[str, tf.types.experimental.PolymorphicFunction]:
    """One traced function for each signature of the contract.

    Args:
        engine: What they run.
        table: The contract, `tfkv.manifest.signature_table`.
        face: For ``generate_text``, where the table has it.

    Returns:
        Signature name to a function whose input signature is the contract's.
    """
    bodies: dict[str, Callable[[Tensors], Tensors]] = {
        name: _batched(engine, name) for name in _ANSWERS
    }
    bodies["truncate"] = lambda inputs: _row_answer(
        engine, engine.truncate(_names(inputs), inputs["position"])
    )
    bodies["fork"] = lambda inputs: _row_answer(
        engine,
        engine.fork(
            _names(inputs),
            inputs["target"],
            inputs["position"],
            inputs["ttl_ms"],
            inputs["pin"],
        ),
    )
    bodies["attention"] = lambda inputs: _attention(engine, inputs)
    bodies["snapshot"] = lambda inputs: _snapshot(engine, inputs)
    bodies["restore"] = lambda inputs: _row_answer(
        engine,
        engine.restore(
            _names(inputs),
            Piece(*(inputs[name] for name in Piece._fields)),
            inputs["fingerprint"],
            inputs["ttl_ms"],
            inputs["pin"],
        ),
    )
    bodies["close"] = lambda inputs: _row_answer(engine, engine.close(_names(inputs)))
    if face is not None:
        bodies["generate_text"] = text_body(engine, face, bodies["generate"])
    bodies["stats"] = lambda inputs: _stats(engine, tf.size(inputs["session_id"]))
    return {name: _signature(spec, bodies[name], name) for name, spec in table.items()}


def _signature(
    spec: SignatureSpec, body: Callable[[Tensors], Tensors], name: str
) -> tf.types.experimental.PolymorphicFunction:
    """A function of named tensors with the contract's defaults."""

    # TensorFlow writes SignatureDef.defaults from parameters that default to a tensor, and
    # parameters with a default come last.
    names = sorted(spec.inputs, key=lambda key: spec.inputs[key].default is not None)

    def serve(*values: tf.Tensor) -> Tensors:
        return body(_broadcast(spec, dict(zip(names, values, strict=True))))

    serve.__name__ = name
    serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(key, spec.inputs[key]) for key in names]
    )
    return tf.function(
        serve,
        input_signature=[_tensor_spec(key, spec.inputs[key]) for key in names],
        autograph=False,
    )


def _parameter(name: str, spec: TensorSpec) -> inspect.Parameter:
    default = inspect.Parameter.empty
    if spec.default is not None:
        default = tf.constant([spec.default], spec.dtype)
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)


def _tensor_spec(name: str, spec: TensorSpec) -> tf.TensorSpec:
    shape = [None, *(None if axis == "T" else axis for axis in spec.shape)]
    return tf.TensorSpec(shape, spec.dtype, name=name)


def _broadcast(spec: SignatureSpec, inputs: Tensors) -> Tensors:
    """Inputs of one row each row of the batch; anything else is refused before it can harm.

    TensorFlow Serving does not check shapes, so the graph does. All inputs are checked
    together: a call is served in milliseconds, and an operation for each input and axis
    would be a good part of them.
    """
    # The shape as it comes: TensorFlow believes the signature and would drop the check.
    hidden = {
        name: tf.raw_ops.PlaceholderWithDefault(input=value, shape=None)
        for name, value in inputs.items()
    }
    ranks = {name: 1 + len(spec.inputs[name].shape) for name in inputs}
    ranked = _assert_each(
        tf.stack([tf.rank(value) for value in hidden.values()]) == list(ranks.values()),
        [f"`{name}` must have rank {rank}, the batch first." for name, rank in ranks.items()],
    )
    # Under the checks, or an op that trips over the shape would speak first.
    with tf.control_dependencies([ranked]):
        shapes = {name: tf.shape(value) for name, value in hidden.items()}
    rows = shapes["session_id"][0]
    counts = tf.stack([shape[0] for shape in shapes.values()])
    checks = [
        _assert_each(
            (counts == rows) | (counts == 1),
            [
                f"`{name}` must have as many rows as `session_id`, or one for all."
                for name in inputs
            ],
        )
    ]
    # Another width would fail the whole batch it is merged into.
    widths = [
        (name, axis, size)
        for name in inputs
        for axis, size in enumerate(spec.inputs[name].shape, start=1)
        if isinstance(size, int)
    ]
    if widths:
        checks.append(
            _assert_each(
                tf.stack([shapes[name][axis] for name, axis, _ in widths])
                == [size for _, _, size in widths],
                [f"`{name}` must have {size} values a row." for name, _, size in widths],
            )
        )
    with tf.control_dependencies(checks):
        return {
            name: _rows_of(value, rows, shapes[name], ranks[name]) for name, value in inputs.items()
        }


def _assert_each(holds: tf.Tensor, messages: list[str]) -> tf.Operation:
    """Fails with the message of the first of ``holds [n]`` that is false."""
    first = tf.argmin(tf.cast(holds, tf.int32))
    return tf.debugging.Assert(tf.reduce_all(holds), [tf.gather(messages, first)])


def _rows_of(value: tf.Tensor, rows: tf.Tensor, shape: tf.Tensor, rank: int) -> tf.Tensor:
    """A value of ``shape`` once for each row, where it is one for all."""
    lead = rows[tf.newaxis]
    wide = tf.broadcast_to(value, lead if rank == 1 else tf.concat([lead, shape[1:]], axis=0))
    wide.set_shape([None, *value.shape[1:]])
    return wide


def _names(inputs: Tensors) -> Names:
    adapter = inputs.get("adapter", tf.zeros_like(inputs["tenant"]))
    return Names(inputs["session_id"], inputs["tenant"], adapter)


def _row_answer(engine: Engine, answer: tuple[tf.Tensor, ...]) -> Tensors:
    position, status, detail = answer
    return {
        "position": position,
        "status": status,
        "detail": detail,
        "epoch": tf.fill([tf.size(status)], engine.stats.epoch.read()),
    }


def _attention(engine: Engine, inputs: Tensors) -> Tensors:
    weights, positions, *answer = engine.attention(
        _names(inputs), inputs["layer"], inputs["position"]
    )
    return {"weights": weights, "positions": positions, **_row_answer(engine, tuple(answer))}


def _snapshot(engine: Engine, inputs: Tensors) -> Tensors:
    piece, fingerprint, answer = engine.snapshot(_names(inputs), inputs["page"])
    fields = {name: value for name, value in piece._asdict().items() if name != "page"}
    return {**fields, "fingerprint": fingerprint, **_row_answer(engine, answer)}


def _stats(engine: Engine, rows: tf.Tensor) -> Tensors:
    values = engine.stats.read(rows)
    if not engine.adapters.fingerprints:
        return values
    return {**values, "adapters": tf.fill([rows], json.dumps(engine.adapters.fingerprints))}


def _batched(engine: Engine, signature: str) -> Callable[[Tensors], Tensors]:
    """A signature whose calls are merged into batches inside the graph."""
    config = engine.engine
    names = _ANSWERS[signature]
    given, sampled = [config.prefill_tokens], [config.decode_chunk]
    widths = {
        "tokens": sampled,
        "logprobs": given if signature == "score" else sampled,
        "logits": [engine.config.vocabulary_size],
    }

    def body(*flat: tf.Tensor) -> list[tf.Tensor]:
        count = len(Names._fields)
        answer = engine.advance(Names(*flat[:count]), Request(*flat[count:-1]), flat[-1])
        rows = _row_answer(engine, (answer.position, answer.status, answer.detail))
        return [*(_field(answer, signature, name) for name in names), *rows.values()]

    batch = tf.nondifferentiable_batch_function(
        num_batch_threads=1,
        max_batch_size=config.batch_sizes[-1],
        batch_timeout_micros=config.batch_timeout_us,
        allowed_batch_sizes=list(config.batch_sizes),
        max_enqueued_batches=config.max_enqueued_batches,
        autograph=False,
        enable_large_batch_splitting=False,
    )(body)
    queue = unique_name(signature)

    def serve(inputs: Tensors) -> Tensors:
        mode = tf.fill([tf.size(inputs["length"])], _MODES[signature])
        request, width = _request({**inputs, "mode": mode}, config.prefill_tokens)
        # TensorFlow finds the queue by the operation's name: under one name, calls of several
        # signatures, or of several engines of a process, would be put into one batch.
        with tf.name_scope(queue):
            outputs = batch(*_names(inputs), *request, width)
        keys = [*names, "position", "status", "detail", "epoch"]
        # The batch function forgets shapes: metadata would lack them, and no rows lose an axis.
        return {
            key: tf.reshape(value, [tf.size(inputs["length"]), *widths.get(key, ())])
            for key, value in zip(keys, outputs, strict=True)
        }

    return serve


def _field(answer: Answer, signature: str, name: str) -> tf.Tensor:
    return getattr(answer, _FIELD_OF.get((signature, name), name))


def _request(inputs: Tensors, width: int) -> tuple[Request, tf.Tensor]:
    """The request padded to the compiled width, and the width that came, int32 ``[B]``."""
    tokens = inputs["tokens"][:, :width]
    rows, came = tf.shape(tokens)[0], tf.shape(tokens)[1]
    tokens = tf.pad(tokens, [[0, 0], [0, width - came]])
    # What stands behind `length` is nobody's business: copies of a row may differ there.
    tokens = tf.where(tf.range(width) < inputs["length"][:, tf.newaxis], tokens, 0)
    tokens = tf.ensure_shape(tokens, [None, width])
    fields: Tensors = {**inputs, "tokens": tokens}
    for name, value in _NEUTRAL.items():
        if name not in fields:
            shape = [rows, MAX_STOP_TOKENS] if name == "stop_tokens" else [rows]
            dtype = tf.int64 if name == "seed" else None
            fields[name] = tf.fill(shape, tf.constant(value, dtype))
    return Request(*(fields[name] for name in Request._fields)), tf.fill([rows], came)

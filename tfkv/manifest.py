"""What an artifact says of itself: the public contract of its signatures, as data.

`signature_table` is the one place where names, dtypes, shapes and defaults of the
contract are written; the exporter builds the SavedModel from it, the client its
requests, the tests their expectations. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, Self

from tfkv.config import DecoderConfig, EngineConfig
from tfkv.errors import ArtifactError

MANIFEST_PATH = "assets.extra/tfkv_manifest.json"
TOKENIZER_PATH = "assets.extra/tokenizer.json"
WARMUP_PATH = "assets.extra/tf_serving_warmup_requests"
FORMAT_VERSION = 1
MAX_STOP_TOKENS = 8

OVERFLOW_POLICIES = {"error": 0, "stop": 1, "slide": 2}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One input or output of a signature.

    Args:
        dtype: NumPy name, or ``"string"``.
        shape: Axis names or sizes behind the batch axis; ``"T"`` means any width up to T.
        default: Value of one row where the caller leaves the input out; ``None`` means
            that the input is required (outputs have none).
        meaning: One line for the reference page.
    """

    dtype: str
    shape: tuple[str | int, ...] = ()
    default: Any = None
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class SignatureSpec:
    """Inputs and outputs of a signature; every one has the batch as axis 0."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]


_SESSION = {
    "session_id": TensorSpec("string", meaning="name of the conversation, chosen by the caller"),
    "tenant": TensorSpec("string", default="", meaning="owner; sessions of two tenants never meet"),
}
_ADAPTER = {"adapter": TensorSpec("string", default="", meaning="adapter name, empty for the base")}
_ADAPTERS = {
    "adapters": TensorSpec("string", meaning="JSON object of adapters, name to fingerprint")
}
_TOKENS = {
    "tokens": TensorSpec("int32", ("T",), meaning="ids that belong at `position`"),
    "length": TensorSpec("int32", meaning="how many of `tokens` count"),
    "position": TensorSpec("int32", meaning="absolute place of the first token; -1 = at the end"),
}
_LIFETIME = {
    "overflow": TensorSpec("int32", default=0, meaning="when full: 0 error, 1 stop, 2 slide"),
    "pin": TensorSpec("int32", default=0, meaning="1 = never expires, until a call says 0"),
    "ttl_ms": TensorSpec("int64", default=0, meaning="idle lifetime in ms, 0 = the artifact's"),
}
_SAMPLING = {
    "temperature": TensorSpec("float32", default=0.0, meaning="0 = greedy"),
    "top_p": TensorSpec("float32", default=1.0, meaning="probability mass kept"),
    "min_p": TensorSpec("float32", default=0.0, meaning="least share of the top probability"),
    "repetition_penalty": TensorSpec("float32", default=1.0, meaning="1 = none"),
    "top_k": TensorSpec("int32", default=0, meaning="most candidates, 0 = all"),
    "seed": TensorSpec("int64", default=0, meaning="the random stream of this session"),
}
_FINISH = TensorSpec("int32", meaning="0 none, 1 length, 2 stop, 3 capacity")
_ANSWER = {
    "position": TensorSpec("int32", meaning="tokens the session now holds"),
    "status": TensorSpec("int32", meaning="0 = OK, see the status table"),
    "detail": TensorSpec("int32", meaning="by status: first difference, ms to retry, ..."),
    "epoch": TensorSpec("int64", meaning="random number drawn when the artifact was loaded"),
}

#: Names of the values that `stats` answers with, in the order of the published vector.
STATS = {
    "slots": "sessions the artifact can hold",
    "slots_used": "sessions it holds",
    "pages": "pages of the pool",
    "pages_used": "pages that sessions hold",
    "pages_shared": "pages that more than one session holds",
    "pages_cached": "pages that no session holds, kept to be found again",
    "pages_free": "pages that hold nothing worth keeping",
    "bytes_pool": "bytes of the pool",
    "bytes_used": "bytes of the pages that hold tokens",
    "calls": "batches run",
    "rows": "rows served, padding not counted",
    "rows_padded": "rows that were copies of another row",
    "batches_to_1": "batches of one row",
    "batches_to_2": "batches of 2 rows",
    "batches_to_4": "batches of 3 or 4 rows",
    "batches_to_8": "batches of 5 to 8 rows",
    "batches_to_more": "batches of more than 8 rows",
    "prefix_lookups": "full pages of prompts that were looked for",
    "prefix_hits": "of those, found",
    "tokens_reused": "tokens whose keys were found instead of prefilled",
    "evictions": "cached pages that had to go",
    "tokens_prefilled": "tokens whose keys were filled by prefill",
    "tokens_decoded": "tokens sampled",
    "tokens_guessed": "tokens that speculation guessed",
    "tokens_accepted": "of those, sampled",
    "tokens_scored": "tokens scored",
    "replays": "rows answered wholly from history",
    "sessions_opened": "sessions created",
    "sessions_closed": "sessions closed by a call",
    "sessions_reaped": "sessions removed after their time to live",
    "rejected_invalid": "rows refused as INVALID or EMPTY",
    "rejected_unknown": "rows refused as UNKNOWN",
    "rejected_conflict": "rows refused as CONFLICT, GAP or FORGOTTEN",
    "rejected_full": "rows refused as FULL or OVERFLOW",
    "rejected_busy": "rows refused as BUSY",
    "rejected_other": "rows refused for another reason",
    "integrity": "0 = sound, otherwise the number of broken invariants",
    "uptime_ms": "milliseconds since the artifact was loaded",
}


def padded_stops(stop_tokens: Sequence[int]) -> list[int]:
    """As many stop tokens as the input of that name has, −1 = unused."""
    return [*stop_tokens, *[-1] * MAX_STOP_TOKENS][:MAX_STOP_TOKENS]


def text_signature() -> SignatureSpec:
    """The contract of ``generate_text``, which an artifact has if its tokenizer and its chat
    template can be put into a graph.

    It has few inputs, since REST wants all of them in each call.
    """
    alone = dataclasses.replace(
        _SESSION["session_id"],
        meaning="name of the conversation; empty = one for this call alone",
    )
    return SignatureSpec(
        {
            "session_id": alone,
            "tenant": _SESSION["tenant"],
            **_ADAPTER,
            "text": TensorSpec("string", meaning="the user's message, UTF-8"),
            "system": TensorSpec(
                "string", default="", meaning="system message of a new session; empty = none given"
            ),
            "max_new_tokens": TensorSpec("int32", default=256, meaning="most tokens to sample"),
            **{name: _SAMPLING[name] for name in ("temperature", "top_p", "seed")},
        },
        {
            "text": TensorSpec("string", meaning="the answer, without special tokens"),
            "count": TensorSpec("int32", meaning="tokens sampled, stop token included"),
            "finish": _FINISH,
            **_ANSWER,
        },
    )


def signature_table(
    engine: EngineConfig,
    stop_tokens: tuple[int, ...] = (),
    page_bytes: int = 0,
    adapters: bool = False,
) -> dict[str, SignatureSpec]:
    """The contract of every signature of an artifact.

    Args:
        engine: What the artifact is compiled for; N of the contract is
            ``engine.decode_chunk``, T is ``engine.prefill_tokens``.
        stop_tokens: Default stop tokens, at most `MAX_STOP_TOKENS`.
        page_bytes: Bytes of a page of the pool.
        adapters: Whether it has adapters, which `stats` then lists.

    Returns:
        Signature name to its inputs and outputs.
    """
    chunk = engine.decode_chunk
    sampling = {
        "max_new_tokens": TensorSpec(
            "int32", default=chunk, meaning="tokens to sample, 0 = prefill only"
        ),
        **_SAMPLING,
        "stop_tokens": TensorSpec(
            "int32",
            (MAX_STOP_TOKENS,),
            default=padded_stops(stop_tokens),
            meaning="ids that end a turn, -1 = unused",
        ),
    }
    size = engine.page_size
    piece = {
        "held": TensorSpec("int32", meaning="tokens the whole session holds"),
        "filled": TensorSpec("int32", meaning="of those, how many have keys: all, or all but one"),
        "tokens": TensorSpec("int32", (size,), meaning="tokens of the page, 0 behind the last"),
        "kinds": TensorSpec("int32", (size,), meaning="of each: 0 given, 1 sampled, 2 stop"),
        "logprobs": TensorSpec("float32", (size,), meaning="of each, 1 where there is none"),
        "page_bytes": TensorSpec(
            "string", meaning=f"keys and values as they are stored, {page_bytes:,} bytes"
        ),
        "fingerprint": TensorSpec("string", meaning="of the weights and the cache they belong to"),
    }
    append = {**_SESSION, **_ADAPTER, **_TOKENS}
    return {
        "generate": SignatureSpec(
            {**append, **sampling, **_LIFETIME},
            {
                "tokens": TensorSpec("int32", (chunk,), meaning="sampled ids, -1 after `count`"),
                "count": TensorSpec("int32", meaning="how many were sampled, stop token included"),
                "logprobs": TensorSpec(
                    "float32", (chunk,), meaning="of each under the unmodified model, 0 after"
                ),
                "finish": _FINISH,
                **_ANSWER,
            },
        ),
        "decode": SignatureSpec(
            {**append, **_LIFETIME},
            {
                "logits": TensorSpec("float32", ("V",), meaning="logits after the last token"),
                **_ANSWER,
            },
        ),
        "score": SignatureSpec(
            {**append, **_LIFETIME},
            {
                "logprobs": TensorSpec(
                    "float32",
                    (engine.prefill_tokens,),
                    meaning="of each given token; 1 where there is none (first of a session)",
                ),
                "count": TensorSpec("int32", meaning="how many of the given tokens were taken"),
                **_ANSWER,
            },
        ),
        "truncate": SignatureSpec(
            {**_SESSION, "position": TensorSpec("int32", meaning="tokens to keep")},
            dict(_ANSWER),
        ),
        "fork": SignatureSpec(
            {
                **_SESSION,
                "target": TensorSpec("string", meaning="name of the branch"),
                "position": TensorSpec(
                    "int32", default=-1, meaning="tokens the branch begins with; -1 = all"
                ),
                "pin": _LIFETIME["pin"],
                "ttl_ms": _LIFETIME["ttl_ms"],
            },
            dict(_ANSWER),
        ),
        "attention": SignatureSpec(
            {
                **_SESSION,
                "layer": TensorSpec("int32", meaning="which layer, from 0"),
                "position": TensorSpec(
                    "int32", default=-1, meaning="the held token that attends; -1 = the last"
                ),
            },
            {
                "weights": TensorSpec(
                    "float32",
                    ("heads", "entries"),
                    meaning="what the token attends to, each query head sums to 1",
                ),
                "positions": TensorSpec(
                    "int32", ("entries",), meaning="position each entry holds, -1 = empty"
                ),
                **_ANSWER,
            },
        ),
        "snapshot": SignatureSpec(
            {**_SESSION, "page": TensorSpec("int32", meaning="which page of the session, from 0")},
            {**piece, **_ANSWER},
        ),
        "restore": SignatureSpec(
            {
                **_SESSION,
                "page": TensorSpec("int32", meaning="which page; 0 makes the session"),
                **piece,
                "pin": _LIFETIME["pin"],
                "ttl_ms": _LIFETIME["ttl_ms"],
            },
            dict(_ANSWER),
        ),
        "close": SignatureSpec(dict(_SESSION), dict(_ANSWER)),
        "stats": SignatureSpec(
            {"session_id": TensorSpec("string", meaning="any; one row answers one row")},
            {
                **{name: TensorSpec("int64", meaning=meaning) for name, meaning in STATS.items()},
                "epoch": _ANSWER["epoch"],
                **(_ADAPTERS if adapters else {}),
            },
        ),
    }


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of one artifact, written beside its graph.

    Args:
        model: Architecture; None where it is a Keras model of its owner's.
        engine: What the graph was compiled for.
        signatures: The contract, `signature_table` of the engine.
        fingerprint: Hash of weights and configuration; equal fingerprints give equal tokens.
        bytes_per_token: Bytes of cache a stored token takes, scales and padding included.
        bytes_per_session: Most bytes of cache one session takes.
        positions: Most positions a session may reach, in tokens.
        rollback: Most tokens `truncate` can take back; -1 = all.
        chunk_invariant: Whether the result is the same however the prompt is cut.
        stop_tokens: Ids that end a turn.
        chat_template: Jinja2 template of a conversation, empty where there is none.
        special_tokens: Role (``bos``, ``eos``, ...) to token text, for the template.
        source: Where the weights came from, for people.
        tfkv_version: Version that exported it.
        adapters: Name of each adapter to the fingerprint of its factors.
        format_version: Version of this file's own format.
    """

    model: DecoderConfig | None
    engine: EngineConfig
    signatures: dict[str, SignatureSpec]
    fingerprint: str
    bytes_per_token: int
    bytes_per_session: int
    positions: int
    rollback: int = -1
    chunk_invariant: bool = True
    stop_tokens: tuple[int, ...] = ()
    chat_template: str = ""
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)
    source: str = ""
    tfkv_version: str = ""
    adapters: dict[str, str] = dataclasses.field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "manifest") -> Self:
        """Reads a manifest back.

        Raises:
            ArtifactError: Not JSON, of another format version, or fields are missing.
        """
        try:
            data = json.loads(text)
            version = data["format_version"]
            if version != FORMAT_VERSION:
                raise ArtifactError(
                    f"{where} has format version {version}; this tfkv reads {FORMAT_VERSION}. "
                    "Export the model again, or install the version that wrote it "
                    f"({data.get('tfkv_version', 'unknown')})."
                )
            if data["model"] is not None:
                data["model"] = DecoderConfig.from_dict(data["model"])
            data["engine"] = EngineConfig.from_dict(data["engine"])
            data["stop_tokens"] = tuple(data["stop_tokens"])
            data["signatures"] = {
                name: SignatureSpec(
                    *(
                        {
                            key: TensorSpec(**{**spec, "shape": tuple(spec["shape"])})
                            for key, spec in side.items()
                        }
                        for side in (signature["inputs"], signature["outputs"])
                    )
                )
                for name, signature in data["signatures"].items()
            }
            return cls(**data)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{where} is not a tfkv manifest ({type(error).__name__}: {error}). "
                "Expected the file that `tfkv export` writes."
            ) from error

    @classmethod
    def read(cls, version_dir: str | pathlib.Path) -> Self:
        """Reads the manifest of a version directory.

        Raises:
            ArtifactError: The directory holds no manifest, or not a readable one.
        """
        path = pathlib.Path(version_dir) / MANIFEST_PATH
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ArtifactError(
                f"No manifest at {path}: expected a version directory that `tfkv export` wrote."
            ) from error
        return cls.from_json(text, str(path))


def latest_version(model_dir: str | pathlib.Path) -> pathlib.Path:
    """The newest version directory below a model directory.

    Accepts the version directory itself, too.

    Raises:
        ArtifactError: There is no version directory.
    """
    path = pathlib.Path(model_dir)
    if (path / "saved_model.pb").exists():
        return path
    versions = [p for p in path.glob("*") if p.name.isdigit() and (p / "saved_model.pb").exists()]
    if not versions:
        raise ArtifactError(
            f"{path} holds no SavedModel version. Expected {path}/<number>/saved_model.pb, "
            "as `tfkv export` writes it."
        )
    return max(versions, key=lambda p: int(p.name))

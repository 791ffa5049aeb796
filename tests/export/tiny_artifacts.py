"""Engines that the tests export, and a caller that remembers its sessions."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np
from tiny_model import CONFIG

from tfkv.config import EngineConfig
from tfkv.errors import Status
from tfkv.export import LoadedArtifact, export, exporter
from tfkv.export.importers import ModelSource
from tfkv.layers.cache_spec import CacheSpec

PLAIN = EngineConfig(
    slots=8,
    capacity=96,
    page_size=16,
    decode_chunk=8,
    prefill_tokens=128,
    batch_sizes=(1, 2, 4),
    scan_pages=4,
    xla=False,
)
ENGINES = {
    "plain": PLAIN,
    "compiled": EngineConfig(**{**PLAIN.to_dict(), "xla": True, "batch_sizes": (1, 4)}),
    "int8": EngineConfig(
        **{**PLAIN.to_dict(), "xla": True, "batch_sizes": (2,), "cache": "dense+int8"}
    ),
    # A ring of 96 entries behind one page of sinks, and a history that forgets.
    "window": EngineConfig(
        **{
            **PLAIN.to_dict(),
            "cache": "sliding_window(window=20, sinks=3)",
            "history": 160,
            "slots": 3,
        }
    ),
}
ENGINES["fair"] = EngineConfig(
    **{**PLAIN.to_dict(), "capacity": 320, "prefill_tokens": 256, "shared_prefill_tokens": 64}
)
# Sessions without an end; the trained context is 512.
ENGINES["stream"] = EngineConfig(
    **{**PLAIN.to_dict(), "cache": "streaming_llm(window=61,sinks=3)", "slots": 2}
)
# Codes of four bits, the newest 64 tokens and the first two exact.
ENGINES["exact"] = EngineConfig(
    **{**PLAIN.to_dict(), "capacity": 192, "slots": 3, "cache": "k4v4(recent=64,sinks=2)"}
)
# Keys of four tokens coded together.
ENGINES["kivi"] = EngineConfig(
    **{**ENGINES["exact"].to_dict(), "cache": "kivi4(recent=67,sinks=2,group=4)"}
)
# What scores highest of a session that reads on, and of one that is judged after its prompt.
ENGINES["evict"] = EngineConfig(
    **{
        **PLAIN.to_dict(),
        "cache": "snapkv(budget=40,sinks=2,window=16,whole_prompt=False)",
        "slots": 3,
    }
)
ENGINES["evict_whole"] = EngineConfig(
    **{
        **PLAIN.to_dict(),
        "cache": "expected_attention(budget=40,sinks=2,recent=8,window=24,whole_prompt=True)+int8",
        "capacity": 256,
        "slots": 3,
        "xla": True,
        "batch_sizes": (2,),
    }
)
ENGINES["evict_heads"] = EngineConfig(
    **{
        **PLAIN.to_dict(),
        "cache": "key_diff(budget=40,sinks=2,recent=8,whole_prompt=True,caps='some')",
        "capacity": 256,
        "slots": 3,
        "head_budgets": [[16, 64], [40, 40]],
    }
)
# What got most attention, in a session that reads on: sums, and heads with budgets of their own.
ENGINES["h2o"] = EngineConfig(
    **{
        **PLAIN.to_dict(),
        "cache": "h2o(budget=40,sinks=2,recent=8)",
        "slots": 3,
    }
)
ENGINES["h2o_whole"] = EngineConfig(
    **{
        **ENGINES["evict_whole"].to_dict(),
        "cache": "h2o(budget=40,sinks=2,recent=8,whole_prompt=True)+int8",
    }
)
ENGINES["h2o_heads"] = EngineConfig(
    **{
        **ENGINES["evict_heads"].to_dict(),
        "cache": "h2o(budget=40,sinks=2,recent=8,whole_prompt=True,caps='some')",
    }
)
# What it takes to repeat the prompt, and what was looked at where nobody repeats it.
ENGINES["kvzip"] = EngineConfig(
    **{
        **PLAIN.to_dict(),
        "cache": "kvzip(budget=40,sinks=2,recent=8)",
        "capacity": 256,
        "slots": 3,
        "repeat": [9, 8, 7, 6, 5],
    }
)
ENGINES["kvzip_on"] = EngineConfig(
    **{
        **ENGINES["h2o"].to_dict(),
        "cache": "kvzip(budget=40,sinks=2,recent=8,whole_prompt=False)",
    }
)
# The first page, one that is selected, and the two newest, behind a layer that reads all.
ENGINES["quest"] = EngineConfig(
    **{
        **PLAIN.to_dict(),
        "capacity": 192,
        "slots": 4,
        "cache": "quest(pages=2,page_size=16,dense_layers=1)",
    }
)
ENGINES["quest_exact"] = EngineConfig(
    **{
        **ENGINES["quest"].to_dict(),
        "cache": "quest(pages=2,page_size=16,dense_layers=1)+k4v4(recent=64,sinks=2)",
        "batch_sizes": (2,),
        "xla": True,
    }
)
_PAGE_BYTES = 16 * CacheSpec.parse("dense").bytes_per_token(
    CONFIG.num_layers, CONFIG.num_key_value_heads, CONFIG.head_dim
)
# Room for ten pages where eight sessions could want six each.
ENGINES["crowded"] = EngineConfig(
    **{**PLAIN.to_dict(), "pool_bytes": 11 * _PAGE_BYTES, "tenant_sessions": 2}
)
_SERIAL = itertools.count()


def write(source: ModelSource, directory: pathlib.Path, engine: EngineConfig) -> pathlib.Path:
    """Exports for tests that compare the artifact themselves, and more closely: the exporter's own
    comparison takes longer than the export."""
    with mock.patch.object(exporter, "verify"):
        return export(source, directory, engine)


@contextlib.contextmanager
def loaded_when_asked(
    written: Callable[[str], pathlib.Path],
) -> Iterator[dict[str, LoadedArtifact]]:
    """Artifacts by name, loaded from their version directory when first asked for."""

    class Loads(dict):
        def __missing__(self, name: str) -> LoadedArtifact:
            self[name] = LoadedArtifact(written(name))
            return self[name]

    loads = Loads()
    yield loads
    for artifact in loads.values():
        artifact.__exit__()


class Caller:
    """Calls an artifact, remembers its sessions, and closes them.

    Args:
        artifact: What to call.
    """

    def __init__(self, artifact: LoadedArtifact) -> None:
        self.artifact = artifact
        self.sessions: set[tuple[str, str]] = set()

    @staticmethod
    def name() -> str:
        """A session id that no test has used."""
        return f"session-{next(_SERIAL)}"

    def call(
        self,
        signature: str,
        session: str | Sequence[str],
        tokens: Sequence[int] | Sequence[Sequence[int]] = (),
        position: int | Sequence[int] = 0,
        **inputs: object,
    ) -> dict[str, np.ndarray]:
        """One row where `session` is a string, else one row for each of its strings.

        Answers of one row come without the batch axis. Further inputs are one value for all
        rows, or a list with one for each.
        """
        single = isinstance(session, str)
        ids = [session] if single else list(session)
        rows = [tokens] if single else list(tokens)
        feeds: dict[str, object] = {"session_id": ids}
        tenants = inputs.get("tenant", "")
        tenants = [tenants] * len(ids) if isinstance(tenants, str) else tenants
        self.sessions |= set(zip(tenants, ids, strict=True))
        if signature in ("generate", "decode", "score"):
            lengths = [len(row) for row in rows]
            padded = np.zeros([len(ids), max(lengths, default=0)], np.int32)
            for row, values in zip(padded, rows, strict=True):
                row[: len(values)] = values
            feeds |= {"tokens": padded, "length": lengths}
        if signature != "close":
            feeds["position"] = np.broadcast_to(position, [len(ids)])
        for name, value in inputs.items():
            rank = 1 + len(self.artifact.manifest.signatures[signature].inputs[name].shape)
            feeds[name] = value if np.ndim(value) == rank else [value]
        answer = self.artifact.call(signature, **feeds)
        return {name: value[0] for name, value in answer.items()} if single else answer

    def generate(self, session, tokens=(), position=0, count=8, **inputs):
        """`generate` without stop tokens unless given, `count` tokens."""
        inputs.setdefault("stop_tokens", [[-1] * 8])
        inputs.setdefault("max_new_tokens", count)
        return self.call("generate", session, tokens, position, **inputs)

    def decode(self, session, tokens=(), position=0, **inputs):
        return self.call("decode", session, tokens, position, **inputs)

    def score(self, session, tokens=(), position=0, **inputs):
        return self.call("score", session, tokens, position, **inputs)

    def truncate(self, session, position, **inputs):
        return self.call("truncate", session, (), position, **inputs)

    def close(self, session, **inputs):
        return self.call("close", session, (), **inputs)

    def stats(self) -> dict[str, int]:
        """Counters, as they were published last."""
        return {k: int(v[0]) for k, v in self.artifact.call("stats", session_id=["?"]).items()}

    def counted(self, before: dict[str, int]) -> dict[str, int]:
        """Counters that changed since `before`, by how much; clocks, levels and the histogram of
        batch sizes (see `batches`) left out."""
        after = self.stats()
        levels = ("slots_used", "bytes_used", "uptime_ms", "pages_used", "pages_shared")
        levels += ("pages_cached", "pages_free")
        left_out = {*levels, *(name for name in after if name.startswith("batches_to_"))}
        changed = {k: after[k] - before[k] for k in after if k not in left_out}
        return {k: v for k, v in changed.items() if v}

    def batches(self, before: dict[str, int]) -> list[int]:
        """Batches since `before` of 1, of 2, of up to 4, of up to 8 and of more rows."""
        after = self.stats()
        names = [f"batches_to_{most}" for most in (1, 2, 4, 8, "more")]
        return [after[name] - before[name] for name in names]

    def close_all(self) -> None:
        for tenant, session in sorted(self.sessions):
            if session:
                self.artifact.call("close", session_id=[session], tenant=[tenant])


def feed(caller: Caller, session: str, tokens: Sequence[int], cut: int, **inputs: object) -> None:
    """Hands tokens over in pieces of `cut`, nothing sampled."""
    for start in range(0, len(tokens), cut):
        answer = caller.generate(session, tokens[start : start + cut], start, count=0, **inputs)
        assert answer["status"] == Status.OK, (Status(int(answer["status"])), answer["detail"])

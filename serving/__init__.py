"""Client, sessions and servers of exported artifacts.

Names are loaded when they are first used: the client comes without TensorFlow, the
embedded server without the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfkv.chat_template import ChatTemplate
    from tfkv.errors import TextError
    from tfkv.serving.beam import beam_search
    from tfkv.serving.candidate import Candidate
    from tfkv.serving.client import Client, VersionStatus
    from tfkv.serving.contract import Contract
    from tfkv.serving.failures import (
        InputError,
        NotFoundError,
        RefusedError,
        SessionError,
    )
    from tfkv.serving.generation import Arrival, Generation, Result, Sampling
    from tfkv.serving.load import Load, LoadReport, run_load
    from tfkv.serving.offload import OffloadTier
    from tfkv.serving.retry import Retry
    from tfkv.serving.saved_session import SavedSession
    from tfkv.serving.server_process import ServerProcess
    from tfkv.serving.session import Session
    from tfkv.serving.text import Detokenizer, Tokenizer

_HOMES = {
    "Arrival": "generation",
    "Candidate": "candidate",
    "ChatTemplate": ".chat_template",
    "Client": "client",
    "Contract": "contract",
    "Detokenizer": "text",
    "Generation": "generation",
    "InputError": "failures",
    "Load": "load",
    "LoadReport": "load",
    "NotFoundError": "failures",
    "OffloadTier": "offload",
    "RefusedError": "failures",
    "Result": "generation",
    "Retry": "retry",
    "Sampling": "generation",
    "SavedSession": "saved_session",
    "ServerProcess": "server_process",
    "Session": "session",
    "SessionError": "failures",
    "TextError": ".errors",
    "Tokenizer": "text",
    "VersionStatus": "client",
    "beam_search": "beam",
    "run_load": "load",
}

__all__ = [
    "Arrival",
    "Candidate",
    "ChatTemplate",
    "Client",
    "Contract",
    "Detokenizer",
    "Generation",
    "InputError",
    "Load",
    "LoadReport",
    "NotFoundError",
    "OffloadTier",
    "RefusedError",
    "Result",
    "Retry",
    "Sampling",
    "SavedSession",
    "ServerProcess",
    "Session",
    "SessionError",
    "TextError",
    "Tokenizer",
    "VersionStatus",
    "beam_search",
    "run_load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A name that begins with a dot is of the package above.
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

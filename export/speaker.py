"""Has an artifact, or an engine in this process, answer prompts and judge answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from tfkv.config import EngineConfig
from tfkv.errors import Finish, RowError, Status


class Callee(Protocol):
    """What has signatures: `LoadedArtifact`, `EngineCalls`."""

    engine: EngineConfig

    def call(self, signature: str, **inputs: object) -> dict[str, np.ndarray]:
        """Outputs of a signature by name."""


class Speaker:
    """Calls one system as a client would, alone, a session a question.

    Args:
        callee: What is called.
    """

    def __init__(self, callee: Callee) -> None:
        self._callee = callee

    def answer(self, prompt: Sequence[int], most: int) -> list[int]:
        """The greedy answer, by `generate`.

        Args:
            prompt: Token ids, at least one.
            most: Most tokens of the answer; it also ends with a stop token, which is included.

        Raises:
            RowError: The system refuses, for lack of room say.
        """
        answer: list[int] = []
        try:
            given_tokens = self._begin(prompt)
            position = len(prompt) - len(given_tokens)
            while len(answer) < most:
                count = min(self._callee.engine.decode_chunk, most - len(answer))
                given = self._call("generate", given_tokens, position, max_new_tokens=[count])
                answer += given["tokens"][0, : given["count"][0]].tolist()
                given_tokens, position = [], len(prompt) + len(answer)
                if given["finish"][0] in (Finish.STOP, Finish.CAPACITY):
                    break
        finally:
            self._callee.call("close", session_id=[_SESSION])
        return answer

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[np.ndarray]:
        """What the system would have said at each place of an answer, by `decode`.

        Args:
            prompt: Token ids, at least one.
            answer: Given to the system token by token, whatever it would have said itself.

        Yields:
            float32 ``[V]``, as many as the answer has tokens.

        Raises:
            RowError: The system refuses.
        """
        try:
            given = self._begin(prompt)
            position = len(prompt) - len(given)
            for token in answer:
                yield self._call("decode", given, position)["logits"][0]
                position += len(given)
                given = [token]
        finally:
            self._callee.call("close", session_id=[_SESSION])

    def _begin(self, prompt: Sequence[int]) -> list[int]:
        """Hands over all of a prompt but what fits the call that asks; that is returned.

        By `generate`, for which a prompt goes on until something is asked: a policy may judge
        it as a whole.
        """
        most = self._callee.engine.prefill_tokens
        last = (len(prompt) - 1) // most * most
        for first in range(0, last, most):
            self._call("generate", prompt[first : first + most], first, max_new_tokens=[0])
        return list(prompt[last:])

    def _call(
        self, signature: str, tokens: Sequence[int], position: int, **inputs: object
    ) -> dict[str, np.ndarray]:
        given = self._callee.call(
            signature,
            session_id=[_SESSION],
            tokens=[list(tokens)],
            length=[len(tokens)],
            position=[position],
            **inputs,
        )
        status = Status(int(given["status"][0]))
        if status is not Status.OK:
            detail = int(given["detail"][0])
            raise RowError(
                status,
                detail,
                f"{signature!r} at position {position} was refused: {status.name}, detail "
                f"{detail} (see docs/contract.md). Prompt and answer must fit the session.",
            )
        return given


_SESSION = "speaker"

"""A conversation that survives lost replies, restarts and expiry."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import secrets
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from tfkv.chat_template import ChatTemplate, Message
from tfkv.errors import Finish, RowError, ServerError, Status, TextError, TfkvError
from tfkv.serving import failures
from tfkv.serving.candidate import Candidate
from tfkv.serving.contract import Row, overflow_code, token_ids
from tfkv.serving.generation import Chunk, Generation, Prompt, Sampling, is_messages
from tfkv.serving.n_best import sample_n
from tfkv.serving.retry import Deadline, is_uncertain
from tfkv.serving.text import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from tfkv.serving.client import Client

GIVEN, SAMPLED = "given", "sampled"

_MOST_REPLAYS = 8
_MOST_IDLE = 1000
_CLOSE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Session:
    """One conversation with a model, held by the server and remembered here.

    The transcript is kept on this side, and every call names the absolute position of its
    tokens. So a repeated call changes nothing, and when the server forgets the session
    (restart, new version, expiry) the transcript is replayed and the generation goes on with
    the tokens it would have had. Made by `Client.session`; used by one thread at a time.

    Args:
        client: Makes the calls.
        session_id: Name of the session on the server.
        tokens: Transcript to go on from; what the server holds beyond it is dropped.
        adapter: Adapter of the model, empty for the base.
        overflow: When the session is full: ``error``, ``stop`` or ``slide``.
        ttl_ms: Idle lifetime in ms, 0 for the artifact's.
        pin: Whether the session never expires.
        keep: Whether to leave it on the server at the end of a ``with`` block.

    Raises:
        InputError: The overflow policy is unknown, or an id is not an int32.

    Example:
        >>> with client.session() as session:
        ...     print(session.generate("Once upon a time", stream=False).text)
    """

    def __init__(
        self,
        client: Client,
        session_id: str,
        *,
        tokens: Sequence[int] = (),
        adapter: str = "",
        overflow: str | int = "error",
        ttl_ms: int = 0,
        pin: bool = False,
        keep: bool = False,
    ) -> None:
        self.session_id = session_id
        self.epoch: int | None = None
        self.replays = 0
        self.messages: list[Message] = []
        self._client = client
        self._adapter = adapter
        self._lifetime = {"overflow": overflow_code(overflow), "pin": int(pin), "ttl_ms": ttl_ms}
        self._keep = keep
        self._tokens = token_ids(tokens)
        self._kinds = [GIVEN] * len(self._tokens)
        self._logprobs: list[float | None] = [None] * len(self._tokens)
        # The server is known to hold this much of the transcript ...
        self._confirmed = 0
        # ... and may hold tokens that the transcript hasn't from here on.
        self._foreign_from: int | None = len(self._tokens) or None
        # A call whose reply never came may be applied as late as it likes.
        self._stragglers = False
        self._active: Generation | None = None
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if self._keep:
            self._end_active()
            return
        try:
            self.close(timeout=_CLOSE_SECONDS)
        except ServerError as error:
            # It expires by itself; the block's own outcome matters more.
            _log.warning("Session %s was not closed: %s", self.session_id, error)

    @property
    def tokens(self) -> list[int]:
        """Ids of the transcript, from position 0."""
        return list(self._tokens)

    @property
    def kinds(self) -> list[str]:
        """For each token of the transcript, ``given`` or ``sampled``."""
        return list(self._kinds)

    @property
    def logprobs(self) -> list[float | None]:
        """For each token of the transcript its logprob, where it was sampled or scored."""
        return list(self._logprobs)

    @property
    def position(self) -> int:
        """Tokens in the transcript: where the next one goes."""
        return len(self._tokens)

    # Generating

    def generate(
        self,
        prompt: Prompt = (),
        max_new_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        overflow: str | int | None = None,
        ttl_ms: int | None = None,
        pin: bool | None = None,
        stream: bool = True,
        timeout: float | None = None,
    ) -> Generation:
        """Appends a prompt and samples what follows.

        Args:
            prompt: Text or token ids to append, the messages of the whole conversation, or
                nothing to go on from where the session is.
            max_new_tokens: Most tokens to sample; 0 only stores the prompt.
            temperature: 0 = greedy.
            top_p: Probability mass kept.
            top_k: Most candidates, 0 = all.
            min_p: Least share of the top token's probability.
            repetition_penalty: 1 = none.
            seed: The random stream, drawn at random by default.
            stop_tokens: Ids that end the generation; the artifact's by default.
            overflow: Changes the session's choice from here on.
            ttl_ms: Changes the session's idle lifetime from here on.
            pin: Changes whether the session never expires, from here on.
            stream: Whether pieces are fetched as they are asked for; otherwise the
                generation is complete when this returns.
            timeout: Seconds for the whole generation; by default each of its bounded calls
                has the client's timeout.

        Returns:
            A `Generation`: an iterator over pieces, with a `result`. When it fails before
            anything was sampled, the prompt is taken back out of the transcript.

        Raises:
            InputError: An argument cannot be sent.
            TextError: Text is given and there is no tokenizer, or messages and no template.
            RowError: The server refused; raised where pieces are fetched.
            ServerError: The server failed; raised where pieces are fetched.
        """
        self._change_lifetime(overflow, ttl_ms, pin)
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
        generation = self.start(prompt, sampling, timeout=timeout)
        return generation if stream else generation.run()

    def chat(
        self,
        message: str | Message,
        max_new_tokens: int = 256,
        *,
        system: str | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        stream: bool = True,
        timeout: float | None = None,
    ) -> Generation:
        """Says something, and samples the model's answer.

        The conversation so far is in `messages`; only the new turn's tokens are computed.

        Args:
            message: The user's words, or a message with a role.
            max_new_tokens: Most tokens of the answer.
            system: Instructions that open the conversation; with its first message only.

        The other arguments, pieces and errors are those of `generate`.
        """
        opening: list[Message] = []
        if system is not None:
            if self.messages:
                raise failures.SessionError("`system` goes with the first message of a session.")
            opening = [{"role": "system", "content": system}]
        # An answer that still runs belongs into the conversation first.
        self._end_active()
        turn = {"role": "user", "content": message} if isinstance(message, str) else message
        return self.generate(
            [*opening, *self.messages, turn],
            max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop_tokens=stop_tokens,
            stream=stream,
            timeout=timeout,
        )

    def start(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        timeout: float | None = None,
        close_after: bool = False,
    ) -> Generation:
        """As `generate`, with the sampling as one value.

        Args:
            prompt: As for `generate`.
            sampling: How tokens are chosen.
            timeout: Seconds for the whole generation, from its first call on.
            close_after: Whether the session ends with the generation.
        """
        self._check_open()
        self._end_active()
        seed = sampling.seed
        if seed is None:
            seed = secrets.randbits(63) if sampling.temperature > 0 else 0
        row = self._sampling_row(sampling, seed)
        keep, given = self._plan(prompt)
        conversation = list(cast(Sequence[Message], prompt)) if is_messages(prompt) else None
        self._cut(keep)
        self._append(given, GIVEN)

        def done(generation: Generation) -> None:
            self._generation_done(generation, keep, conversation, close_after)

        tokenizer = self._client.tokenizer
        self._active = Generation(
            self._sample(row, sampling.max_new_tokens, timeout),
            Detokenizer(tokenizer, self._tokens) if tokenizer else None,
            seed=seed,
            prompt_tokens=len(given),
            done=done,
        )
        return self._active

    def _sampling_row(self, sampling: Sampling, seed: int) -> Row:
        """The inputs of `generate` that say how to sample."""
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": seed,
            "stop_tokens": token_ids(self._client.contract.stops(sampling.stop_tokens)),
        }

    def _sample(self, row: Row, wanted: int, timeout: float | None) -> Generator[Chunk, None, None]:
        """Bounded calls until enough is sampled or a reason to stop comes."""
        deadline = Deadline.after(timeout)
        most = self._client.contract.decode_chunk
        left, idle = wanted, 0
        # One token first, so that it is seen early.
        ask = min(left, 1)
        while True:
            answer = self._reach("generate", {**row, "max_new_tokens": ask}, deadline)
            chunk = self._take(answer, ask)
            left -= len(chunk.tokens)
            if chunk.tokens or chunk.finish != Finish.NONE or not wanted:
                idle = 0
                done = left <= 0 or chunk.finish in (Finish.STOP, Finish.CAPACITY)
                yield chunk if done else dataclasses.replace(chunk, finish=Finish.NONE)
                if done:
                    return
            else:
                # The batch's prefill budget went to others: call again.
                idle += 1
                self._pause_idle(idle, deadline)
            ask = min(left, most)

    def _take(self, answer: Row, asked: int) -> Chunk:
        """Enters what a call sampled into the transcript."""
        count = min(int(answer["count"]), asked)
        tokens = [int(token) for token in answer["tokens"][:count]]
        logprobs = [float(value) for value in answer["logprobs"][:count]]
        self._append(tokens, SAMPLED, logprobs)
        held = int(answer["position"])
        self._confirmed = min(held, len(self._tokens))
        if held > len(self._tokens):
            self._note_foreign(len(self._tokens))
        return Chunk(tokens, logprobs, Finish(int(answer["finish"])))

    def _generation_done(
        self,
        generation: Generation,
        before: int,
        conversation: list[Message] | None,
        close_after: bool,
    ) -> None:
        """Leaves the session as the generation's end says."""
        if self._active is generation:
            self._active = None
        result = generation.result
        if not result.tokens and not generation.completed:
            # Refused, failed or never begun: as if it had not been asked for.
            self._cut(before)
        elif conversation is not None:
            answer = {"role": "assistant", "content": result.text or ""}
            self.messages = [*conversation, answer]
        if close_after:
            try:
                self.close(timeout=_CLOSE_SECONDS)
            except ServerError as error:
                _log.warning("Session %s was not closed: %s", self.session_id, error)

    # Scoring

    def logits(self, prompt: Prompt = (), timeout: float | None = None) -> np.ndarray:
        """Appends a prompt, and returns the logits after its last token.

        For a caller that samples by itself: append the chosen token with the next call.

        Args:
            prompt: As for `generate`.
            timeout: Seconds for all calls; by default each has the client's timeout.

        Returns:
            float32 array over the vocabulary.
        """
        self._check_open()
        self._end_active()
        keep, given = self._plan(prompt)
        self._cut(keep)
        self._append(given, GIVEN)
        try:
            answer = self._reach("decode", {}, Deadline.after(timeout))
        except TfkvError:
            self._cut(keep)
            raise
        return np.asarray(answer["logits"])

    def score(self, prompt: str | Sequence[int], timeout: float | None = None) -> np.ndarray:
        """Appends a text, and returns the logprob of each of its tokens.

        Args:
            prompt: Text or token ids.
            timeout: Seconds for all calls; by default each has the client's timeout.

        Returns:
            float32 array, one number a token; NaN for the first token of a session.
        """
        self._check_open()
        self._end_active()
        deadline = Deadline.after(timeout)
        before, given = self._plan(prompt)
        width = self._client.contract.prefill_tokens
        scores: list[float] = []
        try:
            for begin in range(0, len(given), width):
                piece = given[begin : begin + width]
                at = len(self._tokens)
                self._append(piece, GIVEN)
                answer = self._reach("score", {}, deadline, begin=at)
                values = [float(value) for value in answer["logprobs"][: len(piece)]]
                self._logprobs[at:] = [value if value <= 0 else None for value in values]
                scores += values
        except TfkvError:
            self._cut(before)
            raise
        array = np.array(scores, np.float32)
        return np.where(array > 0, np.float32(np.nan), array)

    def attention(
        self, layer: int, position: int | None = None, timeout: float | None = None
    ) -> np.ndarray:
        """What one token attends to in one layer, for pictures. Changes nothing.

        Args:
            layer: Which layer, from 0.
            position: The token that attends; the last one by default.
            timeout: Seconds for all calls; by default each has the client's timeout.

        Returns:
            float32 ``[N, position + 1]``: for each query head the weight of each token up to
            this one, 0 where the cache keeps none. Rows sum to 1.

        Raises:
            InputError: The position is not within the transcript.
            RowError: There is no such layer, or the cache has forgotten what the token saw.
            ServerError: The server failed.
        """
        self._check_open()
        self._end_active()
        position = len(self._tokens) - 1 if position is None else position
        if not 0 <= position < len(self._tokens):
            raise failures.InputError(
                f"`position` must be from 0 to {len(self._tokens) - 1}. Received: {position}."
            )
        answer = self._look(layer, position, Deadline.after(timeout))
        held = answer["positions"]
        weights = np.zeros([len(answer["weights"]), position + 1], np.float32)
        seen = (held >= 0) & (held <= position)
        weights[:, held[seen]] = answer["weights"][:, seen]
        return weights

    def _look(self, layer: int, position: int, deadline: Deadline) -> Row:
        """An answer of `attention`, whatever the server holds of this session."""
        row = {"session_id": self.session_id, "layer": layer, "position": position}
        lost = 0
        while True:
            if self._foreign_from is not None or self._confirmed <= position:
                self._reach("generate", self._prefill_only(), deadline)
            answer = self._call("attention", row, deadline)
            status, renewed = int(answer["status"]), int(answer["epoch"]) != self.epoch
            if status == Status.OK and not renewed:
                return answer
            if status not in (Status.OK, Status.UNKNOWN, Status.GAP):
                raise self._row_error("attention", answer)
            self._forget("attention", "new epoch" if renewed else Status(status).name)
            lost += 1
            self._pause(lost - 1, deadline, _MOST_REPLAYS, _VANISHING)

    # Branching

    def fork(
        self,
        session_id: str | None = None,
        position: int | None = None,
        *,
        keep: bool = False,
        timeout: float | None = None,
    ) -> Session:
        """A second session that begins with this one's transcript; both go on independently.

        The server copies nothing: the branch shares pages until one of the two writes. What
        the server has not been told yet of the transcript is sent first. Like any session
        the branch has its transcript, so that it survives a restart by replay, even when
        this session is gone by then. A cache that no longer holds what the branch would
        begin with has it replayed with the branch's next call.

        Args:
            session_id: Name of the branch; one that cannot be guessed by default.
            position: Tokens that the branch begins with; all by default.
            keep: Whether to leave the branch on the server at the end of a ``with`` block.
            timeout: Seconds for all calls; by default each has the client's timeout.

        Returns:
            The branch, with this session's adapter and lifetime. It takes a slot of its own.

        Raises:
            InputError: The position is not within the transcript, or the name is this
                session's own.
            RowError: The server refused: FULL, QUOTA, or CONFLICT where the name is that of
                another session.
            ServerError: The server failed; an unpinned branch that was made nevertheless
                expires by itself.
        """
        self._check_open()
        self._end_active()
        position = len(self._tokens) if position is None else position
        if not 0 <= position <= len(self._tokens):
            raise failures.InputError(
                f"`position` must be within 0 and {len(self._tokens)}. Received: {position}."
            )
        branch = self._copy(session_id, position, keep)
        if branch.session_id == self.session_id:
            raise failures.InputError(
                f"A branch needs a name of its own. Received: session_id={session_id!r}."
            )
        if position > 0:
            self._branch(branch, Deadline.after(timeout))
        return branch

    def _copy(self, session_id: str | None, position: int, keep: bool) -> Session:
        """A session with the same beginning, of which the server knows nothing yet."""
        branch = self._client.session(session_id, adapter=self._adapter, keep=keep)
        branch._lifetime = dict(self._lifetime)
        branch._tokens = self._tokens[:position]
        branch._kinds = self._kinds[:position]
        branch._logprobs = self._logprobs[:position]
        branch.messages = list(self.messages) if position == len(self._tokens) else []
        return branch

    def _branch(self, branch: Session, deadline: Deadline) -> None:
        """Has the server make a branch, whatever it holds of this session.

        The position is absolute, so that a repeated call finds the branch made.
        """
        position = len(branch._tokens)
        lifetime = {name: self._lifetime[name] for name in ("pin", "ttl_ms")}
        lost = 0
        while True:
            if self._confirmed < position:
                self._reach("generate", self._prefill_only(), deadline)
            row = {
                "session_id": self.session_id,
                "target": branch.session_id,
                "position": position,
                **lifetime,
            }
            # By the branch: where no reply comes, it is the branch that is in doubt.
            answer = branch._call("fork", row, deadline)
            status, epoch = int(answer["status"]), int(answer["epoch"])
            renewed = epoch != self.epoch
            if status in (Status.NOT_REVERSIBLE, Status.FORGOTTEN):
                return
            if status == Status.OK and not renewed:
                branch.epoch = epoch
                branch._confirmed = position
                if int(answer["position"]) > position:
                    branch._note_foreign(position)
                return
            if status == Status.OK:
                # Made of a session that is not known to be ours.
                branch._note_foreign(0)
                branch._drop_foreign(deadline)
            elif status not in (Status.UNKNOWN, Status.GAP):
                raise branch._row_error("fork", answer)
            self._forget("fork", "new epoch" if renewed else Status(status).name)
            lost += 1
            self._pause(lost - 1, deadline, _MOST_REPLAYS, _VANISHING)

    def generate_n(
        self,
        n: int,
        prompt: Prompt = (),
        max_new_tokens: int = 256,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        rank: str = "mean",
        keep_best: bool = True,
        timeout: float | None = None,
    ) -> list[Candidate]:
        """Appends a prompt once, samples ``n`` continuations of it, and ranks them.

        The prompt is computed once; each continuation is a branch with a seed of its own, and
        the branches sample side by side, several rows a call where the client knows the
        artifact. It takes ``n`` slots besides this session's while it runs.

        Args:
            n: How many continuations.
            prompt: As for `generate`.
            max_new_tokens: Most tokens of each.
            temperature: Above 0; at 0 all would be equal.
            seed: Seed of the first continuation, the next number for the next one; drawn at
                random by default.
            rank: ``mean`` or ``total`` logprob of its tokens, the stop token included.
            keep_best: Whether this session goes on with the best one; otherwise with the
                prompt alone.
            timeout: Seconds for everything; by default each call has the client's timeout.

        The other arguments are those of `generate`.

        Returns:
            The continuations, best first. After an error the prompt is taken back out of
            the transcript.

        Raises:
            InputError: An argument cannot be sent, or makes no sense.
            RowError: The server refused, FULL where it lacks slots.
            ServerError: The server failed.
        """
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
        return sample_n(self, n, prompt, sampling, rank=rank, keep_best=keep_best, timeout=timeout)

    # Editing

    def truncate(self, position: int, timeout: float | None = None) -> None:
        """Takes the session back to its first ``position`` tokens.

        What the server holds beyond them is dropped, whoever put it there. Where the cache
        policy cannot take tokens back, the session is closed and what is kept is computed
        again with the next call.

        Raises:
            InputError: The position is not within the transcript.
        """
        self._check_open()
        self._end_active()
        if not 0 <= position <= len(self._tokens):
            raise failures.InputError(
                f"`position` must be within 0 and {len(self._tokens)}. Received: {position}."
            )
        if position < len(self._tokens):
            self.messages = []
        self._cut(position)
        self._note_foreign(position)
        self._drop_foreign(Deadline.after(timeout))

    def recompute(self, timeout: float | None = None) -> None:
        """Has all of the transcript computed again, in context, together with what comes next.

        Choose it before a question about what a policy has evicted by score: with the next
        call transcript and question are one prompt, all of which the question sees where the
        policy keeps prompts whole (``whole_prompt``); then it is judged anew. It costs a
        prefill of the transcript, and pages for all of it until it has been read. To compute
        single tokens again would be cheaper and wrong: keys and values depend on what stood
        before them. A window sees no more than it did.
        """
        self._check_open()
        self._end_active()
        self._close_on_server(Deadline.after(timeout))

    def close(self, timeout: float | None = None) -> None:
        """Frees the session on the server. Harmless when repeated."""
        self._end_active()
        if self._closed:
            return
        self._closed = True
        # Nothing was ever sent, or all of it was refused: nothing to free.
        if self.epoch is not None or self._foreign_from is not None:
            self._close_on_server(Deadline.after(timeout))

    # For the offload tier

    @property
    def lifetime(self) -> dict[str, Any]:
        """How long the server keeps it: ``ttl_ms`` and ``pin``."""
        return {"ttl_ms": self._lifetime["ttl_ms"], "pin": bool(self._lifetime["pin"])}

    def hold(self, stack: contextlib.ExitStack) -> bool:
        """Keeps the session from being called until the stack ends.

        Returns:
            False where a call is under way, or the session is pinned to the server.
        """
        if self._lifetime["pin"] or not self._lock.acquire(blocking=False):
            return False
        stack.callback(self._lock.release)
        return True

    def close_quietly(self) -> None:
        """Frees it on the server and changes nothing here; only while it is held."""
        row = {"session_id": self.session_id}
        answer = self._client.call_row("close", row, Deadline.after(None))
        if int(answer["status"]) not in (Status.OK, Status.UNKNOWN):
            raise self._row_error("close", answer)

    # The protocol

    def _reach(
        self, signature: str, extra: Row, deadline: Deadline, begin: int | None = None
    ) -> Row:
        """Has the server hold the whole transcript, however many calls that takes.

        Args:
            signature: What the last call asks for; those before it only prefill.
            extra: Inputs of the last call.
            deadline: When to give up.
            begin: Where the tokens of the last call begin; by default it carries what is
                missing, or the last token where nothing is.

        Returns:
            The answer to the last call.
        """
        lost = idle = 0
        while True:
            self._drop_foreign(deadline)
            start, stop = self._piece(begin)
            last = stop == len(self._tokens) and (begin is None or start == begin)
            answer = (
                self._exchange(signature, start, stop, extra, deadline)
                if last
                else self._exchange("generate", start, stop, self._prefill_only(), deadline)
            )
            if answer is None:
                lost += 1
                self._pause(lost - 1, deadline, _MOST_REPLAYS, _VANISHING)
                continue
            reached = min(int(answer["position"]), stop)
            idle = 0 if reached > self._confirmed else idle + 1
            self._confirmed = max(self._confirmed, reached)
            if last and reached == stop:
                return answer
            self._pause(idle, deadline, _MOST_IDLE, "prefill makes no progress")

    def _piece(self, begin: int | None) -> tuple[int, int]:
        """Bounds of the tokens that the next call carries."""
        goal, width = len(self._tokens), self._client.contract.prefill_tokens
        if begin is not None:
            if self._confirmed < begin:
                return self._confirmed, min(self._confirmed + width, begin)
            return begin, goal
        # The last token goes along where nothing is missing: a server that holds another
        # transcript then says CONFLICT instead of continuing that.
        start = min(self._confirmed, max(goal - 1, 0))
        return start, min(start + width, goal)

    def _exchange(
        self, signature: str, start: int, stop: int, extra: Row, deadline: Deadline
    ) -> Row | None:
        """One call about tokens[start:stop].

        Returns:
            The answer, or ``None`` where the server does not hold the session as expected,
            and the call has to be made anew: from the start where the session is lost.

        Raises:
            RowError: The row was refused.
            ServerError: The call failed.
        """
        answer = self._call(signature, self._row(start, stop, extra), deadline)
        status, epoch = int(answer["status"]), int(answer["epoch"])
        if status in (Status.UNKNOWN, Status.GAP) and start > 0:
            self._forget(signature, Status(status).name)
            return None
        if status == Status.CONFLICT and self._stragglers and int(answer["detail"]) >= start > 0:
            # A lost call was applied after its tokens had been dropped: drop them again.
            self._note_foreign(int(answer["detail"]))
            return None
        if status != Status.OK:
            raise self._row_error(signature, answer)
        renewed = self.epoch is not None and epoch != self.epoch
        self.epoch = epoch
        if renewed and start > 0:
            # What the server holds before `start` is not known to be ours.
            self._forget(signature, "new epoch")
            return None
        return answer

    def _row(self, start: int, stop: int, extra: Row) -> Row:
        """A row about tokens[start:stop]."""
        return {
            "session_id": self.session_id,
            "adapter": self._adapter,
            "tokens": self._tokens[start:stop],
            "position": start,
            **self._lifetime,
            **extra,
        }

    def _one_call_row(self, extra: Row) -> Row | None:
        """The row of the one call that `_reach` would make if all is well, if one is enough."""
        start, stop = self._piece(None)
        if self._foreign_from is not None or stop < len(self._tokens):
            return None
        return self._row(start, stop, extra)

    def _accepts(self, answer: Row) -> bool:
        """Whether an answer to `_one_call_row` can be taken; otherwise `_reach` asks again."""
        held = int(answer["position"])
        sound = int(answer["status"]) == Status.OK and int(answer["epoch"]) == self.epoch
        if not sound or held < len(self._tokens):
            return False
        self._confirmed = len(self._tokens)
        return True

    def _doubt(self) -> None:
        """Takes note that a call without an answer may have sampled tokens never seen."""
        self._stragglers = True
        self._note_foreign(len(self._tokens))

    def _call(self, signature: str, row: Row, deadline: Deadline) -> Row:
        if not self._lock.acquire(blocking=False):
            raise failures.SessionError(
                f"Session {self.session_id} is used by two threads at once. "
                "Give each thread a session of its own; the client can be shared."
            )
        try:
            if self._client.offload is not None and signature != "close":
                self._client.offload.touch(self, deadline)
            return self._client.call_row(signature, row, deadline)
        except TfkvError as error:
            if is_uncertain(error):
                self._doubt()
            raise
        finally:
            self._lock.release()

    def _prefill_only(self) -> Row:
        return {"max_new_tokens": 0, "stop_tokens": self._client.contract.stops(())}

    def _forget(self, signature: str, reason: str) -> None:
        """Takes note that the server holds nothing of this session any more."""
        _log.info(
            "Session %s is replayed from position 0 (%s to `%s`)",
            self.session_id,
            reason,
            signature,
        )
        self._confirmed = 0
        self.replays += 1

    def _pause(self, times: int, deadline: Deadline, most: int, why: str) -> None:
        """Waits before yet another call that may bring nothing; not the first time."""
        if times >= most:
            raise failures.SessionError(f"Session {self.session_id}: {why} ({times} calls).")
        if times > 0:
            longest = min(0.01 * 2 ** min(times, 6), deadline.left())
            time.sleep(random.uniform(0.0, longest))

    def _pause_idle(self, times: int, deadline: Deadline) -> None:
        """Waits after calls that sampled nothing although they should have."""
        self._pause(times, deadline, _MOST_IDLE, "sampling makes no progress")

    def _drop_foreign(self, deadline: Deadline) -> None:
        """Has the server drop what it may hold and the transcript hasn't."""
        if self._foreign_from is None:
            return
        keep = self._foreign_from
        if keep == 0:
            self._close_on_server(deadline)
            return
        row = {"session_id": self.session_id, "position": keep}
        answer = self._call("truncate", row, deadline)
        status = int(answer["status"])
        if status in (Status.NOT_REVERSIBLE, Status.FORGOTTEN):
            self._close_on_server(deadline)
            return
        if status == Status.UNKNOWN:
            self._forget("truncate", "UNKNOWN")
        elif status not in (Status.OK, Status.GAP):
            raise self._row_error("truncate", answer)
        elif self.epoch is not None and int(answer["epoch"]) != self.epoch:
            self._forget("truncate", "new epoch")
        self._confirmed = min(self._confirmed, keep)
        self._foreign_from = None

    def _close_on_server(self, deadline: Deadline) -> None:
        answer = self._call("close", {"session_id": self.session_id}, deadline)
        if int(answer["status"]) not in (Status.OK, Status.UNKNOWN):
            raise self._row_error("close", answer)
        if self._client.offload is not None:
            self._client.offload.forget(self.session_id)
        self._confirmed = 0
        self._foreign_from = None

    def _row_error(self, signature: str, answer: Row) -> RowError:
        where = f"`{signature}` of session {self.session_id!r}"
        return failures.row_error(int(answer["status"]), int(answer["detail"]), where)

    # The transcript

    @contextlib.contextmanager
    def _prompted(self, prompt: Prompt) -> Iterator[list[Message] | None]:
        """Appends a prompt, for good unless the block fails.

        Yields:
            The conversation that the prompt is, or ``None``.
        """
        self._check_open()
        self._end_active()
        keep, given = self._plan(prompt)
        self._cut(keep)
        self._append(given, GIVEN)
        try:
            yield list(cast(Sequence[Message], prompt)) if is_messages(prompt) else None
        except BaseException:
            self._cut(keep)
            raise

    def _adopt(self, best: Candidate, conversation: list[Message] | None) -> None:
        """Goes on with what a branch came to; the server is told with the next call."""
        self._append(best.tokens, SAMPLED, best.logprobs)
        if conversation is not None:
            answer = {"role": "assistant", "content": best.text or ""}
            self.messages = [*conversation, answer]

    def _text_of(self, tokens: Sequence[int], stopped: bool) -> str | None:
        """Text of tokens that follow the transcript, without the stop token."""
        if self._client.tokenizer is None:
            return None
        detokenizer = Detokenizer(self._client.tokenizer, self._tokens)
        return detokenizer.push(tokens[:-1] if stopped else tokens) + detokenizer.flush()

    def _append(
        self, tokens: Sequence[int], kind: str, logprobs: Sequence[float] | None = None
    ) -> None:
        self._tokens += tokens
        self._kinds += [kind] * len(tokens)
        self._logprobs += [None] * len(tokens) if logprobs is None else list(logprobs)

    def _cut(self, position: int) -> None:
        """Shortens the transcript; the server follows with the next call."""
        if position >= len(self._tokens):
            return
        del self._tokens[position:], self._kinds[position:], self._logprobs[position:]
        if self._confirmed > position or self._foreign_from is not None:
            self._note_foreign(position)
        self._confirmed = min(self._confirmed, position)

    def _note_foreign(self, position: int) -> None:
        known = self._foreign_from
        self._foreign_from = position if known is None else min(known, position)

    def _plan(self, prompt: Prompt) -> tuple[int, list[int]]:
        """How much of the transcript a prompt keeps, and the tokens it adds."""
        if isinstance(prompt, str):
            tokenizer = self._tokenizer()
            first = not self._tokens
            return self.position, tokenizer.encode(prompt, add_special_tokens=first)
        if is_messages(prompt):
            return self._plan_messages(cast(Sequence[Message], prompt))
        return self.position, token_ids(cast(Sequence[int], prompt))

    def _plan_messages(self, messages: Sequence[Message]) -> tuple[int, list[int]]:
        """The new turn's tokens, keeping as much of the transcript as is still true."""
        tokenizer, held = self._tokenizer(), self._tokens
        rendered = self._template().render(messages)
        whole = tokenizer.encode(rendered)
        common = _common_prefix(held, whole)
        if common < len(held):
            # A model may write a text with other tokens than the tokenizer would.
            text = tokenizer.decode(held, skip_special_tokens=False)
            if rendered.startswith(text) and len(text) < len(rendered):
                return len(held), tokenizer.encode(rendered[len(text) :])
        return common, whole[common:]

    def _tokenizer(self) -> Tokenizer:
        if self._client.tokenizer is None:
            raise TextError(
                "Text needs a tokenizer. Open the client with artifact=<directory> or "
                "tokenizer=<tokenizer.json>, or pass token ids."
            )
        return self._client.tokenizer

    def _template(self) -> ChatTemplate:
        if self._client.chat_template is None:
            raise TextError(
                "Messages need a chat template. Open the client with artifact=<directory> of a "
                "model that has one, or render the conversation and pass text."
            )
        return self._client.chat_template

    # Housekeeping

    def _change_lifetime(
        self, overflow: str | int | None, ttl_ms: int | None, pin: bool | None
    ) -> None:
        changes: Mapping[str, Any] = {
            "overflow": None if overflow is None else overflow_code(overflow),
            "ttl_ms": ttl_ms,
            "pin": None if pin is None else int(pin),
        }
        self._lifetime.update({name: value for name, value in changes.items() if value is not None})

    def _end_active(self) -> None:
        if self._active is not None:
            self._active.close()
            self._active = None

    def _check_open(self) -> None:
        if self._closed:
            raise failures.SessionError(
                f"Session {self.session_id} is closed. Open another with Client.session()."
            )


_VANISHING = (
    "the server loses it again and again. Are several replicas behind one address without "
    "session affinity, or is its lifetime shorter than a call?"
)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length

"""The least work that makes a declarative call true: pure decisions, no state."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfkv.errors import Status
from tfkv.export.layer_groups import LayerGroups
from tfkv.export.rows import GIVEN, STOPPED, Admission, Request
from tfkv.export.slot_geometry import SlotGeometry


class Remembered(NamedTuple):
    """A batch's sessions as they are stored.

    Attributes:
        held: int32 ``[B]``, tokens the session holds.
        filled: int32 ``[B]``, positions whose keys are on pages; held − 1 or held.
        reached: int32 ``[B]``, most tokens the session ever held.
        floor: int32 ``[B]``, positions below it were evicted by score, but for what is kept
            beside the pages; 0 = none.
        tokens: int32 ``[B, history]``, place ``position mod history``.
        kinds: int32 ``[B, history]``.
        logprobs: float32 ``[B, history]``.
    """

    held: tf.Tensor
    filled: tf.Tensor
    reached: tf.Tensor
    floor: tf.Tensor
    tokens: tf.Tensor
    kinds: tf.Tensor
    logprobs: tf.Tensor


class Plan(NamedTuple):
    """What is to be done for each row, all ``[B]``.

    Attributes:
        status: int32.
        detail: int32.
        position: int32, where the given tokens belong, absolute.
        held: int32, tokens the session holds before anything is sampled.
        filled: int32, positions below it are on pages already, and only read.
        start: int32, first position to compute.
        fill: int32, tokens to prefill from `start`.
        steps: int32, decode steps after that; the first feeds the last held token.
        replayed: int32, sampled tokens found in the history.
        stopped: bool, the replayed run ends in a stop token.
        capped: bool, fewer are sampled than asked, for lack of room.
        unfinished: bool, the batch's prefill budget ran out before this row was done.
    """

    status: tf.Tensor
    detail: tf.Tensor
    position: tf.Tensor
    held: tf.Tensor
    filled: tf.Tensor
    start: tf.Tensor
    fill: tf.Tensor
    steps: tf.Tensor
    replayed: tf.Tensor
    stopped: tf.Tensor
    capped: tf.Tensor
    unfinished: tf.Tensor

    def refuse(self, rows: tf.Tensor, status: Status, detail: tf.Tensor) -> Plan:
        """The plan without the work of some ``rows [B]``."""
        return self._replace(
            status=tf.where(rows, int(status), self.status),
            detail=tf.where(rows, detail, self.detail),
            fill=tf.where(rows, 0, self.fill),
            steps=tf.where(rows, 0, self.steps),
        )


class Refusal(NamedTuple):
    """Status and detail of rows; the first reason stays."""

    status: tf.Tensor
    detail: tf.Tensor

    def when(self, holds: tf.Tensor, status: Status, detail: tf.Tensor | int) -> Refusal:
        """Refuses rows where `holds`, unless they were refused already."""
        holds = holds & (self.status == Status.OK)
        return Refusal(
            tf.where(holds, int(status), self.status), tf.where(holds, detail, self.detail)
        )


class PrefillBudget(NamedTuple):
    """How many tokens a batch prefills, so that no caller waits long for another's prompt.

    A row that needs at most `shared` is short. The short rows of a batch are served first,
    the shortest before the others. What long rows get is divided equally between them: all
    of it where they are among themselves, `shared` where a short row waits for its tokens
    in the same batch. A long row always gets a piece, so that it gets on.

    Attributes:
        most: Tokens of all short rows, or of all long rows where there is no short one.
        shared: Tokens of all long rows where there is a short one.
        piece: Tokens of a row that are prefilled at once: fewer cost as much.
    """

    most: int
    shared: int
    piece: int

    def share_out(self, fill: tf.Tensor, works: tf.Tensor) -> tf.Tensor:
        """Tokens that each row may prefill now.

        Args:
            fill: int32 ``[B]``, tokens that it needs.
            works: bool ``[B]``, rows that are served.
        """
        short = fill <= self.shared
        order = tf.argsort(fill, stable=True)
        ordered = tf.cumsum(tf.gather(fill, order), exclusive=True)
        before = tf.scatter_nd(order[:, tf.newaxis], ordered, tf.shape(fill))
        many = tf.reduce_sum(tf.cast(~short & works, tf.int32))
        company = tf.reduce_any(short & works)
        together = tf.where(company, self.shared, self.most)
        share = tf.maximum(together // tf.maximum(many, 1), self.piece)
        return tf.clip_by_value(tf.where(short, self.most - before, share), 0, fill)


def make_plan(
    request: Request,
    admission: Admission,
    stored: Remembered,
    groups: LayerGroups | SlotGeometry,
    budget: PrefillBudget,
    chunk: int,
) -> Plan:
    """Decides what each row needs.

    Args:
        request: What the rows ask for.
        admission: Which sessions they mean.
        stored: What those sessions hold.
        groups: Where tokens lie and what can be read again.
        budget: Most tokens the batch prefills, and how it is shared out.
        chunk: Most tokens a row samples (axis N of the contract).
    """
    held = stored.held
    position = tf.where(request.position < 0, held, request.position)
    end = position + request.length
    refusal = _check_tokens(request, admission, stored, position)
    empty = (end == 0) & ((held == 0) | request.wants_logits)
    refusal = refusal.when(empty, Status.EMPTY, 0)

    replayed, stopped, blocked = _find_run(request, stored, end, chunk)
    refusal = refusal.when(blocked, Status.CONFLICT, end)
    whole = tf.maximum(held, end)
    wanted = tf.where((end + replayed >= held) & ~stopped, request.max_new_tokens - replayed, 0)
    limit = groups.limit(request.overflow)
    over = (end > limit) | ((request.overflow == 0) & (wanted > 0) & (whole + wanted > limit))
    refusal = refusal.when(over, Status.OVERFLOW, limit)
    room = tf.maximum(limit - whole, 0)
    sampled = tf.minimum(wanted, room)

    start, target = _span(stored, groups, position, end, whole, request)
    lost = request.wants_logits & ~groups.reversible(stored.reached, stored.floor, start)
    earliest = groups.earliest_reversible(stored.reached, stored.floor) + 1
    refusal = refusal.when(lost, Status.NOT_REVERSIBLE, earliest)

    works = (refusal.status == Status.OK) & (admission.first == tf.range(tf.size(held)))
    fill = tf.where(works, target - 1 - start, 0)
    allowed = budget.share_out(fill, works)
    unfinished = allowed < fill
    steps = tf.where(request.wants_logits, 1, sampled)
    return Plan(
        status=refusal.status,
        detail=refusal.detail,
        position=position,
        held=tf.where(unfinished, tf.maximum(held, start + allowed + 1), whole),
        filled=stored.filled,
        start=start,
        fill=allowed,
        steps=tf.where(works & ~unfinished, steps, 0),
        replayed=replayed,
        stopped=stopped,
        capped=(sampled < wanted) & ~unfinished,
        unfinished=unfinished,
    )


def oldest_start(reached: tf.Tensor, history: int) -> tf.Tensor:
    """Oldest position where a call may begin in a session that once held `reached` tokens.

    The token before it must be remembered, too: it is fed to compute what follows.
    """
    return tf.where(reached > history, reached - history + 1, 0)


def _check_tokens(
    request: Request, admission: Admission, stored: Remembered, position: tf.Tensor
) -> Refusal:
    """Compares the given tokens with the remembered ones."""
    history = stored.tokens.shape[1]
    oldest = oldest_start(stored.reached, history)
    width = request.tokens.shape[1]
    places = position[:, tf.newaxis] + tf.range(width)
    known = tf.gather(stored.tokens, tf.math.floormod(places, history), batch_dims=1)
    given = tf.range(width) < request.length[:, tf.newaxis]
    differs = given & (places < stored.held[:, tf.newaxis]) & (known != request.tokens)
    first = tf.reduce_min(tf.where(differs, places, 2**31 - 1), axis=1)
    refusal = Refusal(admission.status, admission.detail)
    refusal = refusal.when(position > stored.held, Status.GAP, stored.held)
    refusal = refusal.when(position < oldest, Status.FORGOTTEN, oldest)
    return refusal.when(tf.reduce_any(differs, axis=1), Status.CONFLICT, first)


def _find_run(
    request: Request, stored: Remembered, end: tf.Tensor, chunk: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The sampled tokens stored from `end` on: how many, whether they stop, whether a given
    token stands where the first of them belongs."""
    places = end[:, tf.newaxis] + tf.range(chunk)
    kinds = tf.gather(stored.kinds, tf.math.floormod(places, stored.kinds.shape[1]), batch_dims=1)
    asked = tf.range(chunk) < request.max_new_tokens[:, tf.newaxis]
    here = asked & (places < stored.held[:, tf.newaxis])
    blocked = here[:, 0] & (kinds[:, 0] == GIVEN)
    stops = tf.cast(here & (kinds == STOPPED), tf.int32)
    broken = tf.cast(~here | (kinds == GIVEN), tf.int32)
    run = tf.cumsum(broken + tf.pad(stops, [[0, 0], [1, 0]])[:, :-1], axis=1) == 0
    stopped = tf.reduce_any(run & (stops > 0), axis=1)
    return tf.reduce_sum(tf.cast(run, tf.int32), axis=1), stopped, blocked


def _span(
    stored: Remembered,
    groups: LayerGroups | SlotGeometry,
    position: tf.Tensor,
    end: tf.Tensor,
    whole: tf.Tensor,
    request: Request,
) -> tuple[tf.Tensor, tf.Tensor]:
    """First position to compute, and the position behind the last token to feed.

    For scores, that is the position before the first token without a known logprob.
    """
    target = tf.where(request.wants_logits | request.wants_scores, tf.maximum(end, 1), whole)
    start = tf.minimum(stored.filled, target - 1)
    width, history = request.tokens.shape[1], stored.logprobs.shape[1]
    places = position[:, tf.newaxis] + tf.range(width)
    logprobs = tf.gather(stored.logprobs, tf.math.floormod(places, history), batch_dims=1)
    known = (places == 0) | ((places < stored.held[:, tf.newaxis]) & (logprobs <= 0))
    unknown = tf.reduce_min(tf.where(known, 2**31 - 1, places), axis=1)
    before = tf.maximum(tf.minimum(unknown - 1, start), 0)
    again = request.wants_scores & groups.reversible(stored.reached, stored.floor, before)
    start = tf.where(again, before, start)
    return tf.maximum(start, 0), tf.maximum(target, 1)

"""Several sessions that go one step further in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfkv.errors import TfkvError
from tfkv.serving.contract import Row
from tfkv.serving.retry import Deadline, is_uncertain

if TYPE_CHECKING:
    from tfkv.serving.session import Session


def reach_together(
    sessions: Sequence[Session], signature: str, extras: Sequence[Row], deadline: Deadline
) -> list[Row]:
    """As `Session._reach` of each session, with several rows in a call while all goes well.

    A row that is refused, lost or not done is asked for again by its session alone, which
    knows how to wait and to replay: a call may be repeated, so nothing is lost by that.

    Args:
        sessions: Different sessions of one client, at least one.
        signature: What to call.
        extras: For each session its further inputs.
        deadline: When to give up.

    Returns:
        The answers, in the sessions' order.

    Raises:
        RowError: A row was refused for good.
        ServerError: A call failed.
    """
    client = sessions[0]._client
    most = client.contract.batch_rows
    answers: list[Row] = []
    for begin in range(0, len(sessions), most):
        group, inputs = sessions[begin : begin + most], extras[begin : begin + most]
        rows = [one._one_call_row(extra) for one, extra in zip(group, inputs, strict=True)]
        ready = [index for index, row in enumerate(rows) if row is not None]
        found: dict[int, Row] = {}
        if len(ready) > 1:
            sent = [row for row in rows if row is not None]
            try:
                replies = client.call(signature, sent, deadline=deadline)
            except TfkvError as error:
                if is_uncertain(error):
                    for index in ready:
                        group[index]._doubt()
                raise
            found = dict(zip(ready, replies, strict=True))
        for index, (one, extra) in enumerate(zip(group, inputs, strict=True)):
            if index in found and one._accepts(found[index]):
                answers.append(found[index])
            else:
                answers.append(one._reach(signature, extra, deadline))
    return answers

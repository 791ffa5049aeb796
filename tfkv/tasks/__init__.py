"""Kinds of tasks that show what a cache has forgotten: contexts, questions and answers.

A kind is one file and one line in `TASKS`; see docs/evaluation.md.

Example:
    >>> from tfkv.tasks import TASKS, Hay
    >>> hay = Hay(range(1000), encode=lambda text: [ord(letter) for letter in text])
    >>> (context,) = TASKS["passkey"].contexts(hay, length=400, count=1, depths=1)
    >>> len(context.tokens)
    400
"""

from __future__ import annotations

from collections.abc import Sequence

from tfkv.errors import ConfigError
from tfkv.tasks.common_word import CommonWord
from tfkv.tasks.facts import Facts
from tfkv.tasks.multi_key import MultiKey
from tfkv.tasks.multi_value import MultiValue
from tfkv.tasks.needle import Needle
from tfkv.tasks.passkey import Passkey
from tfkv.tasks.task import Context, Hay, Question, Task

__all__ = ["TASKS", "Context", "Hay", "Question", "Task", "chosen"]

#: Kinds of tasks by name.
TASKS: dict[str, Task] = {
    task.name: task
    for task in (Needle(), Passkey(), MultiKey(), MultiValue(), CommonWord(), Facts())
}


def chosen(names: Sequence[str]) -> list[str]:
    """Names of tasks, without repeats; ``"all"`` stands for each, ``"none"`` for none.

    Raises:
        ConfigError: There is no such task.
    """
    found: list[str] = []
    for name in names:
        if name not in (*TASKS, "all", "none"):
            raise ConfigError(
                f"`tasks` must be of {', '.join(TASKS)}, all or none. Received: {name!r}."
            )
        found += TASKS if name == "all" else [name]
    return [name for name in dict.fromkeys(found) if name != "none"]

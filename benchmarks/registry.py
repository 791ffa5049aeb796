"""Which function measures which figures."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping

from benchmarks.bars import Measurement

#: Issue to the modules that measure its figures. A new issue adds a line here.
MODULES = {
    "path": ("benchmarks.path",),
    "engine": ("benchmarks.engine",),
    "caches": ("benchmarks.caches", "benchmarks.eviction"),
    "keras": ("benchmarks.families", "benchmarks.fine_tuning", "benchmarks.notebooks"),
    "fast": ("benchmarks.fast", "benchmarks.fusions", "benchmarks.speculation"),
}

#: Called with a line about what is being done.
Say = Callable[[str], None]

Measured = Mapping[str, float | Measurement]


@dataclasses.dataclass(frozen=True)
class Measure:
    """A function that measures some figures in one go.

    Args:
        names: Full names of the figures.
        run: Measures them; gives name to value. A name it leaves out counts as short.
    """

    names: tuple[str, ...]
    run: Callable[[Say], Measured]


def measures(*names: str) -> Callable[[Callable[[Say], Measured]], Measure]:
    """Decorator: the function measures the figures of these names."""
    return lambda function: Measure(names, function)


def measures_of(issue: str) -> list[Measure]:
    """Everything an issue measures, in the order of its modules; empty for an unknown one."""
    modules = map(importlib.import_module, MODULES.get(issue, ()))
    return [x for module in modules for x in vars(module).values() if isinstance(x, Measure)]

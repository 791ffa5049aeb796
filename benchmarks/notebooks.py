"""Executes the notebooks: ``python -m benchmarks.notebooks [NAME ...]``.

Each is run from top to bottom in a kernel of its own, and written with its outputs, as a
notebook and as a page, to ``build/notebooks``. An error or a warning in a cell fails the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.bars import Measurement
from benchmarks.registry import Measured, Say, measures

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "notebooks"
_OUT = FOLDER.parent / "build" / "notebooks"
_CELL_SECONDS, _KERNEL_SECONDS = 900, 300


@dataclasses.dataclass(frozen=True)
class Executed:
    """A notebook that was run.

    Attributes:
        notebook: With its outputs.
        seconds: What it took, the start of the kernel included.
        complaints: What cells wrote to standard error, warnings among it.
    """

    notebook: Any
    seconds: float
    complaints: list[str]

    def write(self, folder: pathlib.Path, name: str) -> pathlib.Path:
        """Writes it as a notebook and as a page; gives the page."""
        import nbformat
        from nbconvert import HTMLExporter

        folder.mkdir(parents=True, exist_ok=True)
        nbformat.write(self.notebook, folder / f"{name}.ipynb")
        page, _ = HTMLExporter().from_notebook_node(self.notebook)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
        return folder / f"{name}.html"


def names() -> list[str]:
    """Of all notebooks, in their order."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def execute(name: str) -> Executed:
    """Runs a notebook from top to bottom.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    import nbclient
    import nbformat
    from traitlets.config import Config

    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=_CELL_SECONDS,
        kernel_name="python3",
        startup_timeout=_KERNEL_SECONDS,
        # The kernel warns of plain TCP.
        config=Config({"KernelManager": {"transport_encryption": "auto"}}),
        resources={"metadata": {"path": str(FOLDER)}},
    )
    start = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - start
    complaints = [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream" and output["name"] == "stderr"
    ]
    return Executed(notebook, seconds, complaints)


@measures("keras.notebook_minutes")
def minutes(say: Say) -> Measured:
    """Minutes that all notebooks take, one after the other."""
    spent = {}
    for name in names():
        say(name)
        done = execute(name)
        if done.complaints:
            raise RuntimeError(f"{name} complains: {done.complaints[0]}")
        spent[name] = done.seconds
    note = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items())
    return {"keras.notebook_minutes": Measurement(sum(spent.values()) / 60, note=note)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes notebooks and writes what came out; 1 if any complains."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebooks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them by default")
    parser.add_argument("--out", type=pathlib.Path, default=_OUT)
    options = parser.parse_args(arguments)
    failed = False
    for name in options.names or names():
        done = execute(name)
        page = done.write(options.out, name)
        print(f"{name}: {done.seconds:.0f} s, {page}", flush=True)
        for complaint in done.complaints:
            failed = True
            print(f"  complains: {complaint.rstrip()}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

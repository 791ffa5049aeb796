"""``python -m tfkv.demo``: SmolLM2 from its weights to streamed answers over gRPC.

Exports the model, unless that has been done, starts the embedded server as a process of its
own, asks two questions in one session, shows speed and bytes, and shuts the server down.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tfkv import terminal
from tfkv._version import __version__
from tfkv.config import EngineConfig
from tfkv.errors import ArtifactError, TfkvError
from tfkv.manifest import STATS, Manifest, latest_version

if TYPE_CHECKING:
    from tfkv.serving import Client

SOURCE = "smollm2"
ENGINE = EngineConfig()
QUESTIONS = ("What is the capital of France?", "And what is it famous for?")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tfkv.demo", description=__doc__)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("artifacts/smollm2"))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    try:
        prepare(options.directory)
        with serving(options.directory) as target:
            converse(target, options.directory, options.max_new_tokens)
    except TfkvError as error:
        _say(f"Error: {error}", style="red")
        return 1
    _say("The server shut down cleanly.")
    return 0


def prepare(directory: pathlib.Path) -> pathlib.Path:
    """The version directory to serve: the newest one where it fits, otherwise a new export.

    Raises:
        TfkvError: The model cannot be read or exported.
    """
    with contextlib.suppress(ArtifactError):
        version_dir = latest_version(directory)
        manifest = Manifest.read(version_dir)
        if manifest.engine == ENGINE and manifest.tfkv_version == __version__:
            _say(f"Using {version_dir}, exported before.")
            return version_dir
    _say(f"Exporting {SOURCE} to {directory} ...")
    terminal.load_tensorflow()
    from tfkv.export import export

    with terminal.Steps() as steps:
        version_dir = export(SOURCE, directory, ENGINE, progress=steps)
    _say(f"Wrote {version_dir}.")
    return version_dir


@contextlib.contextmanager
def serving(directory: pathlib.Path) -> Iterator[str]:
    """Runs `tfkv serve` on free ports; gives the gRPC target once it answers.

    Raises:
        ServerError: It ended before it answered, or with another exit code than 0.
    """
    from tfkv.serving import ServerProcess

    _say(f"Starting the server: tfkv serve {directory}")
    # Progress and log lines of the server go where ours go, to standard error.
    with ServerProcess(directory, show_log=True, rest=True) as server:
        _say(server.said)
        yield server.target


def converse(target: str, directory: pathlib.Path, max_new_tokens: int = 128) -> None:
    """Two turns of one session, then what they cost.

    Raises:
        TfkvError: A call failed.
    """
    from tfkv.serving import Client

    with Client(target, artifact=directory) as client:
        version = client.wait_ready()
        _say(f"Version {version.version} is {version.state}.")
        with client.session() as session:
            for question in QUESTIONS:
                print(f"\n> {question}", flush=True)
                answer = session.chat(question, max_new_tokens)
                terminal.stream(answer)
                _say(terminal.speed(answer.result), style="dim")
            _report(client, session.position)


def _report(client: Client, position: int) -> None:
    print()
    if client.manifest is not None:
        _say(terminal.held(client.manifest, position))
    _say("")
    terminal.notes().print(terminal.stats_table(client.stats(), STATS))


def _say(text: str, style: str | None = None) -> None:
    terminal.notes().print(text, style=style, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())

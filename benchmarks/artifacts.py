"""Exports of SmolLM2 that measurements share, made anew only when something changed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import sys

from tfkv._version import __version__
from tfkv.config import EngineConfig
from tfkv.errors import ArtifactError
from tfkv.manifest import Manifest, latest_version

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = "smollm2"

_WIDE = EngineConfig(slots=8, capacity=4352)

#: Engines by name; the folder is ``artifacts/bench-<name>``.
ENGINES = {
    "default": EngineConfig(),
    "long": EngineConfig(slots=2, capacity=4352),
    "long-int8": EngineConfig(slots=2, capacity=4352, cache="dense+int8"),
    "wide": _WIDE,
    "wide-int8": dataclasses.replace(_WIDE, cache="dense+int8", weights="int8"),
    **{f"pages-{size}": dataclasses.replace(_WIDE, page_size=size) for size in (16, 32, 64, 128)},
    # In the bytes of four slots of full length, and the page that is nobody's.
    "many": EngineConfig(slots=64, capacity=2048, pool_bytes=(4 * 2048 + 64) * 46_080),
}

_STAMP = "made_from.txt"
_EXPORTING = ("tfkv", "layers", "export")


def prepare(name: str) -> pathlib.Path:
    """Model directory of an engine, exported unless one made from the same code is there.

    Args:
        name: A key of `ENGINES`.

    Raises:
        subprocess.CalledProcessError: The export failed; its messages are on standard error.
    """
    engine, directory = ENGINES[name], _directory(name)
    stamp = directory / _STAMP
    with contextlib.suppress(ArtifactError, OSError):
        manifest = Manifest.read(latest_version(directory))
        same = manifest.engine == engine and manifest.tfkv_version == __version__
        if same and stamp.read_text(encoding="utf-8") == source_hash():
            return directory
    shutil.rmtree(directory, ignore_errors=True)
    # A process of its own: an export leaves gigabytes behind in the one it ran in.
    subprocess.run(
        [sys.executable, "-m", "benchmarks.artifacts", name],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    stamp.write_text(source_hash(), encoding="utf-8")
    return directory


def _directory(name: str) -> pathlib.Path:
    return ROOT / "artifacts" / f"bench-{name}"


def source_hash() -> str:
    """Hash of all code that an export runs."""
    digest = hashlib.sha256()
    for folder in _EXPORTING:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    from tfkv.export import export

    export(SOURCE, _directory(sys.argv[1]), ENGINES[sys.argv[1]])

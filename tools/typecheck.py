"""Runs mypy over the packages laid out as they are imported.

``setup.cfg`` maps ``tfkv.layers`` to ``layers/`` and so on. mypy follows neither that mapping
nor the finder of an editable install, so this script lays links under ``build/typecheck``, the
tree that a wheel would install, checks that, and names the real files in what it prints.
"""

from __future__ import annotations

import configparser
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typecheck"


def package_dirs() -> dict[str, str]:
    """Import name to folder, from ``setup.cfg``, parents first."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["package_dir"].strip().splitlines()
    pairs = (line.split("=") for line in lines)
    return dict(sorted((name.strip(), folder.strip()) for name, folder in pairs))


def lay_out(mapping: dict[str, str]) -> None:
    """Links every mapped folder's entries below `TREE`; new files appear by themselves."""
    shutil.rmtree(TREE, ignore_errors=True)
    for name, folder in mapping.items():
        target = TREE.joinpath(*name.split("."))
        target.mkdir(parents=True)
        for entry in (ROOT / folder).iterdir():
            if entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)


def real_name(line: str, mapping: dict[str, str]) -> str:
    """A line of mypy's output with the path of the linked file, not of the link."""
    for name, folder in sorted(mapping.items(), reverse=True):
        prefix = name.replace(".", "/") + "/"
        if line.startswith(prefix):
            return f"{folder}/{line.removeprefix(prefix)}"
    return line


def main() -> int:
    """Checks ``tfkv``; returns mypy's exit code."""
    mapping = package_dirs()
    lay_out(mapping)
    command = [
        *(sys.executable, "-m", "mypy", "-p", "tfkv", *sys.argv[1:]),
        f"--config-file={ROOT / 'setup.cfg'}",
        f"--cache-dir={ROOT / '.mypy_cache'}",
    ]
    result = subprocess.run(command, cwd=TREE, stdout=subprocess.PIPE, text=True, check=False)
    for line in result.stdout.splitlines():
        print(real_name(line, mapping))
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())

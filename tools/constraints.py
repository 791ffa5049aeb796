"""Writes constraints.txt: the exact versions of what the named environments hold.

Usage: ``python tools/constraints.py .venv .venv-lint``. Two environments that hold different
versions of one package are an error.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

TARGET = pathlib.Path(__file__).resolve().parent.parent / "constraints.txt"
HEADER = """\
# Exact versions that `make` installs (Python 3.11, Linux): known to work together.
# Not read by `pip install tfkv`, whose bounds are in setup.cfg. Written by `make constraints`.
"""


def frozen(environment: str) -> dict[str, str]:
    """Name to version of the released packages in an environment; editable ones are left out."""
    python = pathlib.Path(environment) / "bin" / "python"
    command = [str(python), "-m", "pip", "freeze", "--exclude-editable"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pairs = (line.split("==") for line in output.splitlines() if "==" in line)
    return {name: version for name, version in pairs if name != "tfkv"}


def main(environments: list[str]) -> int:
    """Merges what the environments hold and writes the file."""
    merged: dict[str, str] = {}
    for environment in environments:
        for name, version in frozen(environment).items():
            if merged.setdefault(name, version) != version:
                print(f"{name}: {merged[name]} and {version}", file=sys.stderr)
                return 1
    lines = [f"{name}=={version}\n" for name, version in merged.items()]
    TARGET.write_text(HEADER + "".join(sorted(lines, key=str.lower)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

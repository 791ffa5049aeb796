"""Resident sizes of processes."""

from __future__ import annotations

import pathlib
import subprocess
import sys


def resident_mb(pid: int | str = "self") -> float:
    """Resident size of a process in MB (10^6 bytes)."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/{pid}/status does not say VmRSS: this needs Linux.")


def import_baseline_mb() -> float:
    """Resident size of a process that has imported what the server does, and no more."""
    code = (
        "from tfkv import terminal; terminal.load_tensorflow(); import tfkv.serving.server\n"
        "from benchmarks.resident import resident_mb; print(resident_mb())"
    )
    root = pathlib.Path(__file__).resolve().parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=root
    )
    return float(result.stdout.split()[-1])

"""Makes the environments of peers, or says why one cannot be had."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping, Sequence

from benchmarks.peers.table import (
    BUILD,
    ENVIRONMENTS,
    LLAMA_CPP_PYTHON,
    OWN,
    PROBED,
    ROOT,
    Environment,
)
from benchmarks.registry import Say

_READY = "ready.json"
_LLAMA_CPP = "llama.cpp"
#: A client asks a package index for at most so long; compiling llama.cpp takes the most.
_SECONDS = 3600


class Absent(Exception):
    """Raised where a peer cannot be had; its text says why."""


def python_of(name: str, say: Say) -> pathlib.Path:
    """The Python of an environment, made if it is not there or its pins have changed.

    Args:
        name: Key of `ENVIRONMENTS`, or `OWN`.
        say: Told what takes a while.

    Raises:
        Absent: It cannot be made.
    """
    if name == OWN:
        return pathlib.Path(sys.executable)
    environment, folder = ENVIRONMENTS[name], BUILD / name
    python, ready = folder / "bin" / "python", folder / _READY
    stamp = json.dumps(environment.pins)
    if ready.exists() and ready.read_text(encoding="utf-8") == stamp:
        return python
    say(f"making the environment {name} ...")
    if not python.exists():
        venv.create(folder, with_pip=True)
    log = BUILD / f"{name}.log"
    _refuse_cuda(python, environment, log)
    if environment.compiles_llama_cpp:
        _llama_cpp(folder, python, log)
    else:
        run([python, "-m", "pip", "install", *environment.pins], log)
    if environment.leave_out:
        run([python, "-m", "pip", "uninstall", "--yes", *environment.leave_out], log)
    ready.write_text(stamp, encoding="utf-8")
    return python


def probe(say: Say) -> dict[str, str]:
    """Peers that nothing runs, and why: see `PROBED`."""
    reasons = {}
    for name, environment in PROBED.items():
        try:
            python_of(environment, say)
            reasons[name] = "it installs now, but no module of benchmarks.peers runs it"
        except Absent as error:
            reasons[name] = str(error)
    return reasons


def variables(name: str, threads: int) -> dict[str, str]:
    """Environment variables of a process of an environment."""
    given = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LLAMA_CPP_LIB_PATH": str(BUILD / name / _LLAMA_CPP / "bin"),
        "PATH": os.pathsep.join([str(BUILD / name / "bin"), os.environ.get("PATH", "")]),
    }
    return {**os.environ, **given}


def run(
    command: Sequence[object], log: pathlib.Path, environment: Mapping[str, str] | None = None
) -> None:
    """Runs a command of a preparation; what it prints goes to a log.

    Raises:
        Absent: It failed, or took an hour.
    """
    words = [str(word) for word in command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        print("$", *words, file=file, flush=True)
        try:
            done = subprocess.run(
                words,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Absent(f"{' '.join(words)[:80]}: {error}") from error
    if done.returncode:
        reason = last_error(log.read_text(encoding="utf-8", errors="replace"))
        raise Absent(f"{' '.join(words[1:4])} failed: {reason}")


def last_error(log: str) -> str:
    """The line of a log that says what went wrong: the last one that says ``error``."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower()]
    return (wrong or lines or ["it said nothing"])[-1][:300]


def _refuse_cuda(python: pathlib.Path, environment: Environment, log: pathlib.Path) -> None:
    """Asks pip what it would install, before it does."""
    if environment.compiles_llama_cpp:
        return
    report = log.with_suffix(".json")
    pip = [python, "-m", "pip", "install", "--dry-run", "--quiet", "--report", report]
    run([*pip, *environment.pins], log)
    packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    if found := cuda_packages([item["metadata"]["name"] for item in packages]):
        raise Absent(f"a CUDA build: pip would install {', '.join(found[:3])} along with it")


def cuda_packages(names: Sequence[str]) -> list[str]:
    """Those of some packages that are there for CUDA."""
    return [name for name in names if name.lower().startswith(("nvidia-", "nvidia_", "cuda-"))]


def _llama_cpp(folder: pathlib.Path, python: pathlib.Path, log: pathlib.Path) -> None:
    """Compiles llama.cpp once, for the Python package and for the server alike.

    The package's own build has no server; it is told to leave the library away, and finds it
    by `LLAMA_CPP_LIB_PATH`.
    """
    sources, built = folder / "sources", folder / _LLAMA_CPP
    shutil.rmtree(sources, ignore_errors=True)
    pip = [python, "-m", "pip"]
    only = ["--no-deps", "--no-binary", "llama-cpp-python"]
    run([*pip, "download", *only, "--dest", sources, LLAMA_CPP_PYTHON], log)
    (archive,) = sources.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(sources, filter="data")
    tree = sources / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    off = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP", "UI")]
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON", *off]
    # Neither is needed on loopback, and the second would be fetched.
    options += ["-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]
    run(["cmake", "-S", tree, "-B", built, *options], log)
    jobs = str(len(os.sched_getaffinity(0)))
    run(["cmake", "--build", built, "--parallel", jobs, "--target", "llama", "llama-server"], log)
    without = {**os.environ, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF"}
    run([*pip, "install", archive], log, without)

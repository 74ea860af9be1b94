"""The direction of imports, from the syntax tree: module level, lazy and TYPE_CHECKING imports alike."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import batchgen

PACKAGE = Path(batchgen.__file__).parent

# A module may import from its own level and from lower ones; the longest prefix counts.
LEVELS = {
    "batchgen": 0,  # the version alone
    "batchgen.errors": 0,
    "batchgen.units": 0,
    "batchgen.builtin": 0,
    "batchgen.jobs": 1,
    "batchgen.shards": 1,
    "batchgen.events": 1,
    "batchgen.inventory.records": 1,
    "batchgen.outputs.urls": 1,  # pure text, too
    "batchgen.outputs.names": 1,  # pure text: a job knows its name before anything is rendered
    "batchgen.manifest": 2,
    "batchgen.inventory": 2,
    "batchgen.plan": 2,
    "batchgen.rehearsal": 3,
    "batchgen.execute": 4,
    "batchgen.outputs": 4,
    "batchgen.journal": 4,
    "batchgen.journalfile": 4,
    "batchgen.journalreader": 4,
    "batchgen.merging": 4,
    "batchgen.reconcile": 4,
    "batchgen.remotecheck": 4,
    "batchgen.checkpoints": 4,
    "batchgen.lease": 4,
    "batchgen.runfolder": 4,
    "batchgen.runlock": 4,
    "batchgen.verify": 4,
    "batchgen.doctor": 5,
    "batchgen.report": 5,
    "batchgen.cli": 6,
    "batchgen.__main__": 7,
}
# Levels are not enough here: these must not know each other though they stand side by side or below.
FORBIDDEN = [
    ("batchgen.plan", "batchgen.manifest"),
    ("batchgen.outputs.names", "batchgen.outputs.image"),
    ("batchgen.manifest", "batchgen.plan"),
]
# Imports inside functions are for cli/ alone, but for these, whose price only some runs should pay.
LAZY = {
    # A program of its own: what its libraries print is led away from its answer before they are loaded.
    ("batchgen.execute.rehearsing", "batchgen.execute.rehearse"),
    ("batchgen.execute.rehearsing", "batchgen.jobs"),
    ("batchgen.execute.rehearsing", "batchgen.rehearsal.cache"),
    ("batchgen.inventory.model", "batchgen.inventory.hub"),  # huggingface_hub takes a second: hub ids only
    ("batchgen.report.html", "batchgen.report.charts"),  # matplotlib takes a second: nights only
    ("batchgen.execute.products", "batchgen.outputs.video"),  # PyAV is an extra: clips only
}
HEAVY = {"torch", "diffusers", "transformers", "pandas", "accelerate", "peft"}
# What the supervising process imports; it must hold no device and start at once.
LIGHT = (
    "batchgen.errors", "batchgen.units", "batchgen.jobs", "batchgen.events", "batchgen.manifest", "batchgen.inventory", "batchgen.plan",
    "batchgen.journal", "batchgen.runfolder", "batchgen.execute.settings", "batchgen.execute.supervisor", "batchgen.builtin",
)
# The clock and the environment are facts like any other: the planner gets them handed in.
IMPURE = {"os", "time", "datetime", "random", "secrets", "subprocess", "socket"}


@dataclass(frozen=True)
class Import:
    module: str
    target: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def module_name(path: Path, package: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(name: str, source: str, *, known: set[str], is_package: bool = False) -> Iterator[Import]:
    """Every import, with `from package import module` resolved to the module."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".") if is_package else name.split(".")[:-1]
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        for target in targets:
            yield Import(name, target, node.lineno, id(node) in inside)


def all_imports(package: Path = PACKAGE) -> list[Import]:
    files = {module_name(path, package): path for path in package.rglob("*.py")}
    return [
        found
        for name, path in files.items()
        for found in imports_of(name, path.read_text(encoding="utf-8"), known=set(files), is_package=path.name == "__init__.py")
    ]


def level(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 1, -1):
        if (prefix := ".".join(parts[:length])) in LEVELS:
            return LEVELS[prefix]
    assert module == "batchgen", f"{module} has no level: add it to LEVELS"
    return LEVELS["batchgen"]


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def offences(imports: list[Import]) -> list[str]:
    own = [found for found in imports if within(found.target, "batchgen")]
    wrong = [str(found) for found in own if level(found.module) < level(found.target)]
    wrong += [str(found) for found in own for one, other in FORBIDDEN if within(found.module, one) and within(found.target, other)]
    lazy = [found for found in own if found.lazy and not within(found.module, "batchgen.cli")]
    wrong += [f"{found} inside a function" for found in lazy if (found.module, found.target) not in LAZY]
    light = [found for found in imports if any(within(found.module, prefix) for prefix in LIGHT)]
    wrong += [str(found) for found in light if found.target.split(".")[0] in HEAVY]
    for found in imports:
        if within(found.module, "batchgen.plan"):
            top = found.target.split(".")[0]
            if top in IMPURE or (top != "batchgen" and top not in sys.stdlib_module_names):
                wrong.append(f"{found}: the planner is pure")
        if within(found.module, "batchgen.execute") and (within(found.target, "batchgen.report") or within(found.target, "batchgen.cli")):
            wrong.append(str(found))
    return wrong


def cycles(imports: list[Import]) -> list[str]:
    edges: dict[str, set[str]] = {}
    for found in imports:
        if within(found.target, "batchgen") and found.target != found.module and not found.lazy:
            edges.setdefault(found.module, set()).add(found.target)
    done: set[str] = set()
    found_cycles: list[str] = []

    def visit(node: str, path: tuple[str, ...]) -> None:
        if node in path:
            found_cycles.append(" -> ".join((*path[path.index(node) :], node)))
            return
        if node in done:
            return
        for target in sorted(edges.get(node, ())):
            visit(target, (*path, node))
        done.add(node)

    for node in sorted(edges):
        visit(node, ())
    return found_cycles


def test_no_import_runs_against_the_direction() -> None:
    found = all_imports()
    assert len(found) > 100
    assert offences(found) == []


def test_there_is_no_import_cycle() -> None:
    # `batchgen/__init__` holds the version and imports nothing, so a package's own __init__ is the only parent that counts.
    assert cycles(all_imports()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("batchgen.plan.x", "import torch"),
        ("batchgen.plan.x", "import os"),
        ("batchgen.plan.x", "import click"),
        ("batchgen.errors", "from batchgen import jobs"),
        ("batchgen.execute.x", "def f():\n    from batchgen.report import tables"),
        ("batchgen.execute.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from batchgen.cli import main"),
        ("batchgen.manifest.x", "from ..execute import worker"),
        ("batchgen.report.x", "def f():\n    from batchgen import journal"),
        ("batchgen.inventory.x", "def f():\n    import torch"),
        ("batchgen.manifest.x", "from batchgen.plan.records import Plan"),
    ],
)
def test_the_walk_sees_what_it_forbids(module: str, source: str) -> None:
    known = {"batchgen.jobs", "batchgen.report.tables", "batchgen.cli.main", "batchgen.execute.worker", "batchgen.journal"}
    assert offences(list(imports_of(module, source, known=known))) != []


def test_the_walk_sees_a_cycle() -> None:
    known = {"batchgen.plan.a", "batchgen.plan.b"}
    found = [*imports_of("batchgen.plan.a", "from batchgen.plan import b", known=known),
             *imports_of("batchgen.plan.b", "import batchgen.plan.a", known=known)]
    assert cycles(found) == ["batchgen.plan.a -> batchgen.plan.b -> batchgen.plan.a"]

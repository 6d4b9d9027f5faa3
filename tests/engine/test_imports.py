"""Imports: the floors of the house. sim knows no torch; engine knows sim; nobody knows experiments; no circles."""
from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY = {"sim": {"sim"}, "engine": {"engine", "sim"}, "experiments": {"experiments", "engine", "sim"}}
OURS = set(MAY)


def modules(package: str) -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> set[str]:
    """Every module name an import statement of a file mentions, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def graph() -> dict[str, set[str]]:
    """Module -> our modules it imports; importing a package's member does not count as importing the package."""
    every = {name: path for package in OURS for name, path in modules(package).items()}
    found = {}
    for name, path in every.items():
        named = imported(path) & set(every)
        found[name] = {n for n in named if not any(other.startswith(n + ".") for other in named)} - {name}
    return found


def test_sim_imports_no_torch():
    names = [n for n in modules("sim") if not n.endswith("__main__")]
    assert len(names) > 15
    code = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\nprint([m for m in ('torch', 'engine', 'experiments') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", MAY)
def test_a_floor_stands_on_those_below(package):
    for name, path in modules(package).items():
        ours = {n.split(".")[0] for n in imported(path)} & OURS
        assert ours <= MAY[package], f"{name} imports {ours - MAY[package]}"
        if package == "sim":
            assert "torch" not in {n.split(".")[0] for n in imported(path)}, name


def test_there_are_no_circles():
    order = list(graphlib.TopologicalSorter(graph()).static_order())
    assert order.index("sim.schedule") < order.index("sim.lint") < order.index("engine.compile")

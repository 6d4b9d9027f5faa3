"""environment.yml, pyproject.toml and the locks name the same packages."""
import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name(requirement: str) -> str:
    return re.split(r"[<>=!~; ]", requirement)[0].lower().replace("_", "-")


def wanted(*extras: str) -> dict[str, str]:
    lines = PROJECT["dependencies"] + [r for e in extras for r in PROJECT["optional-dependencies"][e]]
    return {name(line): line for line in lines}


def test_environment_agrees_with_pyproject():
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert "python" + PROJECT["requires-python"] in conda
    assert set(conda) - {"pip", "python" + PROJECT["requires-python"]} | set(pip["pip"]) - {"-e ."} == set(wanted("test").values())
    assert [name(line) for line in pip["pip"]] == ["torch", "-e"], "torch comes by pip, everything else from conda-forge"


def test_locks_hold_every_dependency_at_one_version():
    locks = [(ROOT / f).read_text().splitlines()[1:] for f in ("requirements.lock", "requirements-test.lock")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.a-z]+", line) for lock in locks for line in lock)
    runtime, test = ({name(line) for line in lock} for lock in locks)
    assert set(wanted()) <= runtime and not runtime & test
    assert set(wanted("test")) <= runtime | test


def test_makefile_installs_the_locked_torch_first():
    locked = next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("torch=="))
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.index(locked) < makefile.index("requirements.lock\n\t")

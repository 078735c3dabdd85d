"""Declared dependencies bring every module that the shipped code imports."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from tests.process.command import ROOT
from tests.test_layers import imported_modules

_OWN = {"dynamo_lite", "graphs"}
#: A name of typeshed, for type checkers only; and what torch's builds for GPUs bring.
_ELSEWHERE = {"_typeshed", "triton"}


def _name(requirement: str) -> str:
    """Of the distribution (PEP 508), in the form of PEP 503."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]).lower()


def _declared() -> set[str]:
    """Distributions of the project and of its option `cpu`, with those that they and torch require
    themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = {_name(one) for one in project["dependencies"] + project["optional-dependencies"]["cpu"]}
    return own | {_name(one) for brought in own | {"torch"} for one in requires(brought) or ()}


def test_every_import_comes_with_a_declared_dependency() -> None:
    declared, brings = _declared(), packages_distributions()
    files: list[Path] = [*(ROOT / "dynamo_lite").rglob("*.py"), *(ROOT / "graphs").glob("*.py")]
    missing = {
        (top, str(file.relative_to(ROOT)))
        for file in files
        for _, module in imported_modules(file)
        if (top := module.partition(".")[0]) not in sys.stdlib_module_names | _OWN | _ELSEWHERE
        and not declared & {_name(one) for one in brings.get(top, ())}
    }
    assert not missing

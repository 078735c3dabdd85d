"""Declared dependencies bring every module that the shipped code imports."""

import sys
import tomllib
from collections.abc import Collection, Iterable
from importlib.metadata import packages_distributions, requires
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.started import ROOT
from tests.test_layers import imported_modules

_OWN = {"dynamo_lite", "graphs"}
#: A name of typeshed, for type checkers only.
_ELSEWHERE = {"_typeshed"}


def _declared() -> set[str]:
    """Distributions of the project and of its option `cpu`, with those that they and torch require
    themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = _required(project["dependencies"] + project["optional-dependencies"]["cpu"])
    brought = [_required(requires(one.name) or [], one.extras) for one in own]
    brought.append(_required(requires("torch") or []))
    return {canonicalize_name(one.name) for one in (*own, *chain.from_iterable(brought))}


def _required(requirements: Iterable[str], extras: Collection[str] = ()) -> list[Requirement]:
    """Those that hold here, with these extras."""
    parsed = [Requirement(one) for one in requirements]
    chosen = ("", *extras)
    return [
        one
        for one in parsed
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in chosen)
    ]


def test_every_import_comes_with_a_declared_dependency() -> None:
    declared, brings = _declared(), packages_distributions()
    files: list[Path] = [*(ROOT / "dynamo_lite").rglob("*.py"), *(ROOT / "graphs").glob("*.py")]
    missing = {
        (top, str(file.relative_to(ROOT)))
        for file in files
        for _, module in imported_modules(file)
        if (top := module.partition(".")[0]) not in sys.stdlib_module_names | _OWN | _ELSEWHERE
        and not declared & {canonicalize_name(one) for one in brings.get(top, ())}
    }
    assert not missing

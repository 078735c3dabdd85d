"""The graph that the user names as `package.module:Attribute`, and what comes with dynamo-lite.

Its graphs, configurations and scripts are folders of the repository; the wheel has them inside the
package (see setup.py). A file of the same name in the working directory goes first.
"""

import ast
import importlib
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import dynamo_lite
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.services.services import Graph

GRAPHS, CONFIGS = "graphs", "configs"
_LISTED = "`dynamo-lite examples` lists the packaged graphs and configurations"


def load_graph(name: str) -> Graph:
    """Imports a graph: from the working directory, an installed package, or else the packaged
    graph of this name. Raises ConfigError."""
    module_name, colon, attribute = name.partition(":")
    if not module_name or not colon or not attribute:
        raise ConfigError([f"graph {name}: expected MODULE:NAME, e.g. graphs.disagg:Frontend"])
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _import(name, module_name)
    graph = getattr(module, attribute, None)
    if not isinstance(graph, Graph):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, Graph))
        message = f"graph {name}: {module_name} has no graph {attribute}"
        raise ConfigError([f"{message}; graphs there: {', '.join(known) or 'none'}"])
    if missing := graph.missing():
        raise ConfigError([f"graph {name}: these services are not linked: {', '.join(missing)}"])
    return graph


def _import(name: str, module_name: str) -> ModuleType | SimpleNamespace:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            why = f"its module imports {missing}, which is not installed"
            raise ConfigError([f"graph {name}: {why}"]) from exc
        package, _, stem = module_name.rpartition(".")
        path = packaged_file(GRAPHS, f"{stem}.py") if package == GRAPHS else None
        if path is None:
            where = f"no module {module_name} in {os.getcwd()}"
            raise ConfigError([f"graph {name}: {where}; {_LISTED}"]) from exc
    return SimpleNamespace(**runpy.run_path(str(path)))


def packaged_file(folder: str, name: str) -> Path | None:
    """The file `name` of a packaged folder; None if there is none."""
    path = _folder(folder) / name
    return path if Path(name).name == name and path.is_file() else None


def config_file(given: Path) -> Path:
    """The file that `-f` means: the given one, or else the packaged one of this name.

    Raises ConfigError when there is neither.
    """
    if given.exists() or given.is_absolute():
        return given
    if (packaged := examples().get(given.as_posix())) is None:
        raise ConfigError([f"{given}: cannot be read: no such file; {_LISTED}"])
    return packaged[0]


def examples() -> dict[str, tuple[Path, str]]:
    """Name (`graphs.MODULE:NAME` or `configs/FILE`) of each packaged graph and configuration to its
    file and the first line of its description."""
    found: dict[str, tuple[Path, str]] = {}
    for path in sorted(_folder(GRAPHS).glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[f"{GRAPHS}.{path.stem}:{node.targets[0].id}"] = path, about
    for path in sorted(_folder(CONFIGS).glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        found[f"{CONFIGS}/{path.name}"] = path, first.removeprefix("#").strip()
    return found


def _folder(name: str) -> Path:
    package = Path(dynamo_lite.__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name

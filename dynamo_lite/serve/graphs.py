"""Loads the graph that the user names as `package.module:Attribute`."""

import importlib
import importlib.util
import os
import sys
from types import ModuleType

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.serve.packaged import GRAPHS, graphs, packaged_file
from dynamo_lite.services.services import Graph


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


def _import(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                [f"graph {name}: its module imports {missing}, which is not installed"]
            ) from exc
        if (module := _import_packaged(module_name)) is not None:
            return module
        raise ConfigError([_no_module(name, module_name)]) from exc


def _import_packaged(module_name: str) -> ModuleType | None:
    package, _, stem = module_name.rpartition(".")
    path = packaged_file(GRAPHS, f"{stem}.py") if package == GRAPHS else None
    spec = path and importlib.util.spec_from_file_location(f"dynamo_lite.{module_name}", path)
    if not spec or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _no_module(name: str, module_name: str) -> str:
    package = module_name.rpartition(".")[0]
    siblings = [g.partition(":")[0].rpartition(".")[2] for g, _ in graphs() if package == GRAPHS]
    try:
        spec = importlib.util.find_spec(package) if package else None
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        siblings += [f[:-3] for f in os.listdir(folder) if f.endswith(".py") and f[0] != "_"]
    hint = f"; modules in {package}: {', '.join(sorted({*siblings}))}" if siblings else ""
    return f"graph {name}: no module {module_name} in {os.getcwd()}{hint}"

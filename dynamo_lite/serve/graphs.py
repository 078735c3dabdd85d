"""Loads the graph that the user names as `package.module:Attribute`."""

import importlib
import importlib.util
import os
import sys

from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.services.services import Graph


def load_graph(name: str) -> Graph:
    """Imports a graph, also from the working directory. Raises ConfigError."""
    module_name, colon, attribute = name.partition(":")
    if not module_name or not colon or not attribute:
        raise ConfigError([f"graph {name}: expected MODULE:NAME, e.g. graphs.disagg:Frontend"])
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or module_name
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                [f"graph {name}: its module imports {missing}, which is not installed"]
            ) from exc
        raise ConfigError([_no_module(name, module_name)]) from exc
    graph = getattr(module, attribute, None)
    if not isinstance(graph, Graph):
        known = sorted(key for key, value in vars(module).items() if isinstance(value, Graph))
        message = f"graph {name}: {module_name} has no graph {attribute}"
        raise ConfigError([f"{message}; graphs there: {', '.join(known) or 'none'}"])
    if missing := graph.missing():
        raise ConfigError([f"graph {name}: these services are not linked: {', '.join(missing)}"])
    return graph


def _no_module(name: str, module_name: str) -> str:
    package = module_name.rpartition(".")[0]
    siblings: list[str] = []
    try:
        spec = importlib.util.find_spec(package) if package else None
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        siblings += [f[:-3] for f in os.listdir(folder) if f.endswith(".py") and f[0] != "_"]
    hint = f"; modules in {package}: {', '.join(sorted(siblings))}" if siblings else ""
    return f"graph {name}: no module {module_name} in {os.getcwd()}{hint}"

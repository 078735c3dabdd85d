"""The graphs, configurations and scripts that come with dynamo-lite.

They are folders of the repository; the wheel has them inside the package (see setup.py). A file
of the same name in the working directory goes first.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import dynamo_lite
from dynamo_lite.protocol.errors import ConfigError

GRAPHS, CONFIGS = "graphs", "configs"


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
    if len(given.parts) == 2 and given.parts[0] == CONFIGS:
        if (packaged := packaged_file(CONFIGS, given.name)) is not None:
            return packaged
        names = ", ".join(name for name, _ in configs())
        raise ConfigError([f"{given}: cannot be read: no such file; packaged are {names}"])
    hint = "`dynamo-lite examples` lists those that are packaged"
    raise ConfigError([f"{given}: cannot be read: no such file; {hint}"])


def graphs() -> Iterator[tuple[str, str]]:
    """Name (`graphs.MODULE:NAME`) and first line of description of each packaged graph."""
    for path in _files(GRAPHS, "*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield f"{GRAPHS}.{path.stem}:{node.targets[0].id}", about


def configs() -> Iterator[tuple[str, str]]:
    """Name (`configs/FILE`) and first line of description of each packaged configuration."""
    for path in _files(CONFIGS, "*.yaml"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        yield f"{CONFIGS}/{path.name}", first.removeprefix("#").strip()


def example(name: str) -> str:
    """The text of a packaged graph or configuration, by the name that its list shows.

    Raises ConfigError for another name.
    """
    if name in dict(configs()):
        path = packaged_file(CONFIGS, name.removeprefix(f"{CONFIGS}/"))
    elif name in dict(graphs()):
        module = name.removeprefix(f"{GRAPHS}.").partition(":")[0]
        path = packaged_file(GRAPHS, f"{module}.py")
    else:
        path = None
    if path is None:
        raise ConfigError([f"{name}: no packaged graph or configuration has this name"])
    return path.read_text(encoding="utf-8")


def _files(folder: str, pattern: str) -> list[Path]:
    found = sorted(_folder(folder).glob(pattern))
    return [path for path in found if not path.name.startswith("_")]


def _folder(name: str) -> Path:
    """Inside the package, or in a checkout beside it."""
    package = Path(dynamo_lite.__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parent / name

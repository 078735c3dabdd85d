"""The layer rule: a package imports only packages to its left, siblings not each other.

Folders do not import each other in a circle, and neither do files.
And the rule of names: the public name of a class has one meaning in the whole package.
"""

import ast
import functools
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dynamo_lite"

#: From left to right; packages of one row are siblings.
ROWS = (
    ("protocol",),
    ("runtime",),
    ("routing", "transfer"),
    ("request_plane",),
    ("disagg",),
    ("vllm", "forward", "planner"),
    ("serve",),
    ("cli",),
)
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row}

#: Foreign packages with a home: no other package may import them.
HOMES = {
    "vllm": ("vllm",),
    "nixl": ("transfer",),
    "torch": ("vllm",),
    "nats": ("runtime/nats", "disagg/queue"),
    "aetcd": ("runtime/etcd",),
    "aiohttp": ("forward", "runtime", "serve"),
    "zmq": ("vllm",),
    "opentelemetry": ("runtime/tracing.py",),
    "pydantic": ("vllm/frontend",),
    "yaml": ("serve", "cli"),
    "rich": ("serve", "cli"),
    "typer": ("forward/commands.py", "serve", "cli"),
}

#: Files, and folders of files, with values in and values out.
PURE = (
    *("disagg/attempts", "disagg/decision", "planner/policy"),
    *("forward/protocols", "forward/prompts.py"),
    *("request_plane/admission.py", "runtime/backoff.py"),
    *("routing/kv_chain.py", "routing/kv_index.py", "routing/kv_routing.py"),
    *("routing/pickers.py", "routing/worker_loads.py"),
)

#: Lines of Python, a row for each top-level package. A commit that needs fewer lowers its row; one
#: that raises a row has the reason in the changelog.
BUDGET = {
    "dynamo_lite/protocol": 1_881,
    "dynamo_lite/runtime": 5_661,
    "dynamo_lite/routing": 1_192,
    "dynamo_lite/transfer": 1_233,
    "dynamo_lite/request_plane": 1_912,
    "dynamo_lite/disagg": 5_898,
    "dynamo_lite/vllm": 6_576,
    "dynamo_lite/forward": 4_494,
    "dynamo_lite/planner": 1_753,
    "dynamo_lite/serve": 4_368,
    "dynamo_lite/cli": 2_120,
    "tests": 49_756,
    "tests/simulation": 7_881,
}
SLACK = 50

#: What would make a decision depend on more than its arguments.
IMPURE = {
    *("asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random"),
    *("secrets", "signal", "socket", "subprocess", "sys", "threading", "time", "uuid"),
    *("aiohttp", "httpx", "requests", "uvloop"),
}

TYPE_CHECKS = ("TYPE_CHECKING", "typing.TYPE_CHECKING")

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, also of those inside functions."""
    return names_of(file, ast.walk(parsed(file)))


def modules_loaded_with(file: Path) -> set[str]:
    """Absolute names of the imports that run when the file itself is imported."""
    return {module for _, module in names_of(file, run_at_import(parsed(file)))}


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but those inside functions and under `if TYPE_CHECKING`."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) in TYPE_CHECKS:
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


def names_of(file: Path, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import among the nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in ROW_OF else None


def complaints(file: Path) -> Iterator[str]:
    relative = file.relative_to(ROOT / PACKAGE)
    own = relative.parts[0] if len(relative.parts) > 1 else None
    for line, module in imported_modules(file):
        where = f"{PACKAGE}/{relative}:{line}"
        target = layer_of(module)
        if own and target and target != own and ROW_OF[target] >= ROW_OF[own]:
            yield f"{where}: {own} imports {target}"
        top = module.split(".")[0]
        homes = HOMES.get(top)
        if homes and not any(f"{relative.as_posix()}/".startswith(f"{home}/") for home in homes):
            yield f"{where}: {top} belongs to {', '.join(homes)}"
        pure = next((f for f in PURE if f"{relative.as_posix()}/".startswith(f"{f}/")), None)
        if pure and top in IMPURE:
            yield f"{where}: {pure} imports {top}"


def test_every_package_has_a_row():
    packages = {file.parent.name for file in FILES if file.parent.parent == ROOT / PACKAGE}
    assert packages <= set(ROW_OF)


def lines_of(folder: str) -> int:
    """Of all its files; tests/simulation is counted apart."""
    apart = ROOT / "tests/simulation"
    return sum(
        len(file.read_bytes().splitlines())
        for file in (ROOT / folder).rglob("*.py")
        if folder == "tests/simulation" or apart not in file.parents
    )


def test_the_line_budget():
    counts = {folder: lines_of(folder) for folder in BUDGET}
    packages = {f"{PACKAGE}/{name}" for name in ROW_OF}
    assert packages | {"tests", "tests/simulation"} == set(BUDGET)
    above = {folder: count for folder, count in counts.items() if count > BUDGET[folder]}
    assert above == {}, "take lines away, or say in the changelog why not"
    lower = {folder: n for folder, n in counts.items() if n < BUDGET[folder] - SLACK}
    assert lower == {}, "lower the rows of BUDGET to these counts"


def test_every_pure_file_exists():
    assert [name for name in PURE if not (ROOT / PACKAGE / name).exists()] == []


def test_imports_go_left():
    assert sorted({complaint for file in FILES for complaint in complaints(file)}) == []


def file_of(module: str) -> Path | None:
    """The file of this package that `module` is, or that it is in."""
    top, *names = module.split(".")
    if top != PACKAGE:
        return None
    for end in range(len(names), -1, -1):
        path = (ROOT / PACKAGE).joinpath(*names[:end])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def path_in_package(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).as_posix()


def room_with(file: Path) -> str:
    """The folder of this package that the file lies in; empty for the package's own."""
    return path_in_package(file.parent).removeprefix(".")


def room_of(module: str) -> str | None:
    """The folder of this package that `module`, or the module that it is in, lies in."""
    file = file_of(module)
    return None if file is None else room_with(file)


def arrows() -> dict[str, set[str]]:
    """For each folder, the folders that its files import from."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        own = room_with(file)
        rooms = {room_of(module) for _, module in imported_modules(file)}
        found.setdefault(own, set()).update(room for room in rooms if room)
        found[own].discard(own)
    return found


def loads(files: Iterable[Path]) -> dict[str, set[str]]:
    """For each file, the other files that are loaded when it is."""
    found: dict[str, set[str]] = {}
    for file in files:
        loaded = {file_of(module) for module in modules_loaded_with(file)} - {file, None}
        found[path_in_package(file)] = {path_in_package(other) for other in loaded if other}
    return found


def circle(graph: dict[str, set[str]]) -> str:
    """One circle of the graph, named; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return " imports ".join(reversed(exc.args[1]))
    return ""


def test_no_two_folders_import_each_other():
    graph = arrows()
    assert "runtime/etcd" in graph["runtime/process"]
    assert circle(graph) == ""


def test_no_files_import_each_other_in_a_circle():
    graph = loads(FILES)
    assert "runtime/log_limit.py" in graph["runtime/tracing.py"]
    assert circle(graph) == ""


def test_both_sides_of_a_remote_prefill_know_only_what_they_share():
    graph = arrows()
    assert "disagg/prefill" not in graph["disagg/decode"]
    assert "disagg/decode" not in graph["disagg/prefill"]


def test_nothing_that_serves_imports_the_tests():
    assert not {
        (path_in_package(file), module)
        for file in FILES
        for _, module in imported_modules(file)
        if module.split(".")[0] in ("tests", "benchmarks")
    }


def reads_environment(tree: ast.AST) -> bool:
    """Whether it does more with the environment than set what a library asks for."""
    uses = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    settings = uses.count("os.environ.setdefault")
    return "os.getenv" in uses or uses.count("os.environ") > settings


def test_only_the_configuration_reads_the_environment():
    readers = [f for f in FILES if reads_environment(ast.parse(f.read_text(encoding="utf-8")))]
    assert [f.relative_to(ROOT / PACKAGE).as_posix() for f in readers] == [
        "serve/child_environment.py"
    ]


def test_the_name_of_a_class_has_one_meaning():
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path_in_package(file))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}

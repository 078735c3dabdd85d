"""The layer rule: a package imports only packages to its left, siblings not each other.

And the rule of names: a public class name has one meaning in the whole package.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dynamo_lite"

#: From left to right; packages of one row are siblings.
ROWS = (
    ("protocol",),
    ("policy",),
    ("runtime", "capacity"),
    ("queue", "transfer", "request_plane", "kv_events"),
    ("engine",),
    ("disagg",),
    ("vllm", "overview", "forward"),
    ("services",),
    ("simulation", "serve"),
    ("cli",),
)
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row}

#: Foreign packages with a home: no other package may import them.
HOMES = {
    "vllm": ("vllm",),
    "nixl": ("transfer",),
    "torch": ("vllm",),
    "triton": ("vllm",),
    "nats": ("runtime/nats", "queue"),
    "aetcd": ("runtime/etcd", "simulation"),
    "aiohttp": ("forward",),
    "zmq": ("vllm", "forward/kv"),
    "opentelemetry": ("runtime/tracing",),
    "pydantic": ("serve", "cli"),
    "yaml": ("serve", "cli"),
    "rich": ("serve", "cli"),
    "typer": ("serve", "cli"),
}

#: Folders of values in, values out.
PURE = ("policy", "forward/protocols")

#: What would make a decision depend on more than its arguments.
IMPURE = {
    *("asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random"),
    *("secrets", "signal", "socket", "subprocess", "sys", "threading", "time", "uuid"),
    *("aiohttp", "httpx", "requests", "uvloop"),
}

#: Class names of several modules that have one meaning all the same: each is a protocol in its
#: first module, and in the second one what has this role in the simulation.
ROLES = {
    # An engine's blocks: the connector's view of vLLM's pool; the simulated engine has its own.
    "Block": ["disagg/engine_api.py", "simulation/engine/pool.py"],
    "BlockPool": ["disagg/engine_api.py", "simulation/engine/pool.py"],
    # What the event loop needs of the network, so that the network can import the loop.
    "Network": ["simulation/loop/loop.py", "simulation/network/network.py"],
    # What the simulated planners need of the world that makes them.
    "World": ["simulation/planning.py", "simulation/world.py"],
}

FILES = sorted((ROOT / PACKAGE).rglob("*.py"))


def imported_modules(file: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import, also of those inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_left(file: Path):
    assert sorted(set(complaints(file))) == []


def room_of(module: str) -> str | None:
    """The folder of this package that `module`, or the module that it is in, lies in."""
    top, *names = module.split(".")
    if top != PACKAGE:
        return None
    for end in range(len(names), 0, -1):
        path = ROOT / PACKAGE / "/".join(names[:end])
        if path.is_dir():
            return "/".join(names[:end])
        if path.with_suffix(".py").is_file():
            return "/".join(names[: end - 1])
    return None


def arrows() -> dict[str, set[str]]:
    """For each folder, the folders that its files import from."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        own = file.parent.relative_to(ROOT / PACKAGE).as_posix().replace(".", "")
        rooms = {room_of(module) for _, module in imported_modules(file)}
        found.setdefault(own, set()).update(room for room in rooms if room)
        found[own].discard(own)
    return found


def test_no_two_folders_import_each_other():
    graph = arrows()
    assert "runtime/etcd" in graph["runtime/process"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        pytest.fail(" imports ".join(reversed(exc.args[1])))


def test_both_sides_of_a_remote_prefill_know_only_what_they_share():
    graph = arrows()
    assert "disagg/prefill" not in graph["disagg/decode"]
    assert "disagg/decode" not in graph["disagg/prefill"]


def test_only_its_command_imports_the_simulation():
    users = {
        file.relative_to(ROOT / PACKAGE).as_posix()
        for file in FILES
        for _, module in imported_modules(file)
        if (room_of(module) or "").startswith("simulation")
    }
    assert {user for user in users if not user.startswith("simulation/")} == {"cli/simulate.py"}


def reads_environment(tree: ast.AST) -> bool:
    """Whether it does more with the environment than set what a library asks for."""
    uses = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    settings = uses.count("os.environ.setdefault")
    return "os.getenv" in uses or uses.count("os.environ") > settings


def test_only_the_configuration_reads_the_environment():
    readers = [f for f in FILES if reads_environment(ast.parse(f.read_text(encoding="utf-8")))]
    assert [f.relative_to(ROOT / PACKAGE).as_posix() for f in readers] == ["serve/config.py"]


def homes_of_classes(files: list[Path]) -> dict[str, list[str]]:
    """For each public class name, the files that define it at their top level."""
    found: dict[str, list[str]] = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                home = file.relative_to(ROOT / PACKAGE).as_posix()
                found.setdefault(node.name, []).append(home)
    return found


def test_a_class_name_has_one_meaning():
    homes = homes_of_classes(FILES)
    assert {name: files for name, files in homes.items() if len(files) > 1} == ROLES


def test_the_rule_sees_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    bad = tmp_path / PACKAGE / "policy" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("import time\nfrom dynamo_lite.serve import cli\nimport vllm.config\n")
    assert len(set(complaints(bad))) == 3

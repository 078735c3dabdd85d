"""The layer rule: a package imports only packages to its left, siblings not each other."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dynamo_lite"

#: From left to right; packages of one row are siblings.
ROWS = (
    ("protocol",),
    ("policy",),
    ("runtime",),
    ("queue", "transfer"),
    ("engine",),
    ("components",),
    ("sim",),
    ("serve",),
)
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row}

#: Foreign packages with a home: nobody else may import them.
HOMES = {
    "vllm": ("engine/vllm",),
    "nixl": ("transfer",),
    "torch": ("engine/vllm",),
    "triton": ("engine/vllm",),
    "nats": ("runtime", "queue"),
    "aetcd": ("runtime", "queue"),
    "opentelemetry": ("runtime/otlp.py",),
    "pydantic": ("serve",),
    "yaml": ("serve",),
    "rich": ("serve",),
    "typer": ("serve",),
}

#: What would make a decision depend on more than its arguments.
IMPURE = {
    *("asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random"),
    *("secrets", "signal", "socket", "subprocess", "sys", "threading", "time", "uuid"),
    *("aiohttp", "httpx", "requests", "uvloop"),
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
        if own == "policy" and top in IMPURE:
            yield f"{where}: policy imports {top}"


def test_every_package_has_a_row():
    packages = {file.parent.name for file in FILES if file.parent.parent == ROOT / PACKAGE}
    assert packages <= set(ROW_OF)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_left(file: Path):
    assert sorted(set(complaints(file))) == []


def reads_environment(tree: ast.AST) -> bool:
    """Whether it does more with the environment than set what a library asks for."""
    uses = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    settings = uses.count("os.environ.setdefault")
    return "os.getenv" in uses or uses.count("os.environ") > settings


def test_only_the_configuration_reads_the_environment():
    readers = [f for f in FILES if reads_environment(ast.parse(f.read_text(encoding="utf-8")))]
    assert [f.relative_to(ROOT / PACKAGE).as_posix() for f in readers] == ["serve/config.py"]


def test_the_rule_sees_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    bad = tmp_path / PACKAGE / "policy" / "bad.py"
    bad.parent.mkdir(parents=True)
    bad.write_text("import time\nfrom dynamo_lite.serve import cli\nimport vllm.config\n")
    assert len(set(complaints(bad))) == 3

"""Benchmarks that need no engine, each started as a command with its smallest sizes: they end
well, print their rows, and no request fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.edge_load_report import MIN_CORES
from benchmarks.scripted_engines import TOKENS
from tests.process.command import ROOT

#: `runtime` starts its systems one after the other, each with processes that import vLLM.
_PATIENCE_S = 360.0

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(_PATIENCE_S + 60)]


def bench(name: str, *arguments: str) -> str:
    """What the benchmark prints."""
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends what it has started
            raise
    assert process.returncode == 0, output + errors
    assert "Traceback" not in errors
    return output


@pytest.mark.parametrize(
    ("name", "sizes", "rows"),
    [
        ("router", ("--blocks=50000", "--questions=300", "--rounds=1"), ["prefixes matched"]),
        ("sealed_frames", ("--frames=200", "--rounds=1"), ["150 bytes, back to back, sender"]),
        ("sealed_notices", ("--writes=5", "--rounds=2"), ["32 KiB: on", "8192 KiB: on"]),
    ],
)
def test_the_ones_within_one_process(name: str, sizes: tuple[str, ...], rows: list[str]):
    lines = bench(name, *sizes).splitlines()
    for row in rows:
        figures = [line.removeprefix(row) for line in lines if line.startswith(row)]
        assert figures and all(re.search(r"\d", each) for each in figures)


def test_runtime(tmp_path: Path):
    found = tmp_path / "found.json"
    sizes = ("--rounds=1", "--requests=8", "--concurrency=4", "--idle-s=1", f"--json={found}")
    lines = bench("runtime", *sizes).splitlines()
    for row in ("Frontend  ", "vLLM's app alone", "Frontend / app alone", "worker, busy"):
        assert len([line for line in lines if line.startswith(row)]) == 1
    [events] = [line for line in lines if line.startswith("events per answer")]
    graph, plain = re.findall(r"[\d.]+", events)
    assert float(graph) > 1 and float(plain) > 1
    [row] = json.loads(found.read_text())
    assert row["frontend_ms"] > 0 and row["plain_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("--systems", "rust", "--binary", "nowhere"), 1, "--binary: there is no file"),
        (("--first-load", "0"), 2, "--first-load: '0' is not a number above 0"),
        (("--rounds", "many"), 2, "--rounds: 'many' is not a whole number above 0"),
    ],
)
def test_edge_load_says_what_is_wrong(arguments: tuple[str, ...], code: int, why: str):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.edge_load", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == code
    assert why in done.stderr


def test_edge_load(tmp_path: Path):
    """One small load of two systems. What it holds depends on the machine; what cannot be told
    from it has to be said."""
    found = tmp_path / "found.json"
    systems = ("--systems", "python", "python-2", "--rounds=1", f"--json={found}")
    sizes = ("--seconds=1", "--first-load=200", "--most-load=200", "--precision=0.9")
    output = bench("edge_load", *systems, *sizes, "--idle-s=0.1")
    table, notes = output.split("\n\n")[1:]
    assert [line.split()[0] for line in table.splitlines()] == ["system", "python", "python-2"]
    [steps] = json.loads(found.read_text())
    held = {step["system"] for step in steps if not step["failed"] and step["first_p99_ms"] <= 100}
    for name in ("python", "python-2"):
        top = "held the highest load that was offered" if name in held else "no load held in 1 of 1"
        assert f"{name}: {top}" in notes
    if held == {"python", "python-2"} and len(os.sched_getaffinity(0)) < MIN_CORES:
        assert "target 1.8: " in notes and ("met" in notes or "cannot be shown on" in notes)


def test_forward(tmp_path: Path):
    found = tmp_path / "found.json"
    sizes = ("--rounds=1", "--requests=8", "--concurrency", "4", "--step-ms=1", "--router=")
    lines = bench("forward", *sizes, f"--json={found}").splitlines()
    assert {line.split()[1] for line in lines[-2:]} == {"forwarder", "engine"}
    for row in json.loads(found.read_text()):
        assert row["first_ms"] > 0
        assert row["events"] == pytest.approx(TOKENS, rel=0.1)

"""Benchmarks that need no engine, each started as a command with its smallest sizes: they end
well and print their rows."""

import subprocess
import sys

import pytest

from tests.started import ROOT

#: `runtime` starts its systems one after the other, each with processes that import vLLM.
_PATIENCE_S = 360.0

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(_PATIENCE_S + 60)]


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ("router --blocks=50000 --questions=300 --rounds=1", ["prefixes matched"]),
        ("tls_frames --frames=200 --rounds=1", ["150 bytes, back to back, sender"]),
        (
            "runtime --rounds=1 --requests=8 --concurrency=4 --idle-s=1",
            ["Frontend / app alone", "worker, busy", "events per answer"],
        ),
        (
            "edge_load --systems python python-2 --rounds=1 --seconds=1 --first-load=200"
            " --most-load=200 --precision=0.9 --idle-s=0.1",
            ["python: ", "python-2: "],
        ),
        ("forward --rounds=1 --requests=8 --concurrency 4 --step-ms=1 --router=", []),
    ],
)
def test_it_ends_well(arguments: str, rows: list[str]):
    name, *sizes = arguments.split()
    with subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *sizes],
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
    for row in rows:
        assert any(line.strip().startswith(row) for line in output.splitlines()), output

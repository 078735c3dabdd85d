"""`dynamo-lite simulate` as a person runs it."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.process.command import PATIENCE_S, ROOT, run

pytestmark = pytest.mark.heavy

LOAD = ("--load", "sine", "--rate", "1", "--duration", "60")


def test_a_comparison_as_table_json_and_picture(tmp_path: Path):
    out, svg = tmp_path / "report.json", tmp_path / "curves.svg"
    compared = ("--compare", "static:1P2D,local-only,oracle,script:0=1P1D+20=2P1D")
    files = ("--out", str(out), "--svg", str(svg))
    result = run("simulate", "--workers", "1P1D", *LOAD, *compared, *files)
    assert result.returncode == 0, result.stderr
    names = ["static:1P1D", "static:1P2D", "local-only:2D", "oracle", "script:0=1P1D+20=2P1D"]
    report = json.loads(out.read_text())
    assert [one["name"] for one in report["runs"]] == names
    assert all(any(line.startswith(name) for line in result.stdout.splitlines()) for name in names)
    for one in report["runs"]:
        assert one["requests"]["completed"] == report["trace"]["requests"]
        assert sum(one["decisions"].values()) >= one["requests"]["completed"]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_the_same_seed_prints_the_same():
    command = ("simulate", "--workers", "1P1D", *LOAD, "--json", "--router", "kv")
    first, again = run(*command), run(*command)
    assert first.returncode == 0 and first.stdout == again.stdout
    assert run(*command, "--seed", "1").stdout != first.stdout


def test_a_trace_file(tmp_path: Path):
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    )
    result = run("simulate", "--workers", "1P1D", "--trace", str(file), "--json")
    assert json.loads(result.stdout)["runs"][0]["requests"]["completed"] == 2
    file.write_text(file.read_text() + "2023-11-16 18:18:04,x,8\n")
    broken = run("simulate", "--workers", "1P1D", "--trace", str(file))
    assert broken.returncode == 2
    assert broken.stderr == (
        f"error: {file}:4: ContextTokens is 'x'; accepted: a whole number from 0 to 1e+07\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2D", *LOAD], "accepted: PREFILL and DECODE workers as in 2P3D"),
        (["--workers", "1P0D", *LOAD], "at least one"),
        (["--workers", "1P1D"], "give either --trace FILE or --load KIND"),
        (["--workers", "1P1D", "--load", "sine"], "--load needs --rate"),
        (["--workers", "1P1D", "--load", "flood", "--rate", "1"], "accepted: constant, step"),
        (["--workers", "1P1D", *LOAD, "--speed", "0"], "--speed is 0; accepted: 1e-06 to 1e+06"),
        (["--workers", "1P1D", *LOAD, "--compare", "best"], "accepted: static:2P3D"),
        (
            ["--workers", "3P4D", *LOAD, "--compare", "planner", "--max-workers", "4"],
            "'planner' begins with 7 workers, and its budget-devices is 4",
        ),
        (["--workers", "1P1D", *LOAD, "--timing", "none"], "accepted: a file that benchmarks"),
        (["--workers", "1P1D", *LOAD, "--model", "other"], "measured with model 'gpu-like'"),
        (
            ["--workers", "1P1D", *LOAD, "--timing", "tiny_cpu", "--vllm-version", "0.1"],
            "measured with vLLM 0.32.0, not 0.1",
        ),
        (["--workers", "1P1D", "--trace", "x", "--window", "9:3"], "accepted: FROM:TO"),
        (["--workers", "1P1D", *LOAD, "--router", "best"], "--router"),
    ],
)
def test_bad_input_is_refused_with_what_is_accepted(arguments: list[str], message: str):
    result = run("simulate", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_timing_file_with_a_mistake(tmp_path: Path):
    file = tmp_path / "timing.json"
    shipped = ROOT / "dynamo_lite/capacity/data/gpu_like.json"
    file.write_text(shipped.read_text().replace('"step_s": 0.01003', '"step_s": -1'))
    result = run("simulate", "--workers", "1P1D", *LOAD, "--timing", str(file))
    assert result.returncode == 2
    assert "$.step.step_s" in result.stderr


def test_ctrl_c_writes_what_there_is(tmp_path: Path):
    out = tmp_path / "report.json"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "dynamo_lite.cli.cli", "simulate", "--workers", "100P100D"),
            *("--load", "constant", "--rate", "300", "--duration", "500"),
            *("--compare", "local-only", "--out", str(out)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()  # the first progress
    assert "requests" in line
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "(interrupted)" in printed
    (one,) = json.loads(out.read_text())["runs"]
    assert one["interrupted"] and 0 < one["requests"]["completed"] < 140_000
    assert one["requests"]["unfinished"] > 0

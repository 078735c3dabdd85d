"""`python -m tests.simulation` as a person runs it."""

import signal
import subprocess
import sys

import pytest

from tests.process.command import PATIENCE_S, ROOT

COMMAND = (sys.executable, "-m", "tests.simulation")
MUTANT = ("--mutant", "no-claim")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_seeds_that_hold():
    result = run("--seeds", "4", "--jobs", "2")
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1] == "4 seeds played: no invariant violated"
    titles = ("faults", "requests", "ended", "longest wait", "latest end")
    assert all(any(line.startswith(f"  {title} ") for line in lines) for title in titles)
    assert "seeds/s" in result.stderr
    assert run("--seeds", "4", "--jobs", "1").stdout == result.stdout


def test_a_violated_seed_comes_with_the_command_that_shows_the_same_again():
    found = run("--seeds", "100", "--stop", *MUTANT)
    assert found.returncode == 1
    line, command = found.stdout.splitlines()[:2]
    seed, _, violation = line.removeprefix("seed ").partition(": ")
    words = command.split()
    assert words == ["python", "-m", "tests.simulation", "--seed", seed, "--trace", *MUTANT]
    again = run(*words[3:])
    assert again.returncode == 1
    lines = again.stdout.splitlines()
    assert f"violated at {violation}" in lines
    assert lines[-1] == f"seed {seed}: violated"
    text = violation.partition(" s: ")[2]
    assert any(f"VIOLATION {text}" in line for line in lines)
    assert any("decode-0#1" in line and "ready" in line for line in lines)


def test_one_seed_without_a_trace():
    result = run("--seed", "1")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("seed 1: ")
    assert lines[-1] == "seed 1: no invariant violated"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --seed --seeds is required"),
        (["--seed", "1", "--seeds", "2"], "not allowed with argument --seed"),
        (["--seed", "1", "--jobs", "2"], "--jobs requires --seeds"),
        (["--seeds", "2", "--trace"], "--trace requires --seed"),
        (["--seeds", "0"], "expected a whole number from 1 on"),
        (["--seed", "x"], "--seed"),
        (["--seed", "1", "--mutant", "no-sense"], "choose from 'no-claim', 'no-quarantine'"),
    ],
)
def test_bad_options(arguments: list[str], message: str):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert not result.stdout


def test_ctrl_c_shows_what_was_found_so_far():
    process = subprocess.Popen(
        [*COMMAND, "--seeds", "100000", *MUTANT],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert first.startswith("seed ")
    assert "violated" in out.splitlines()[-1]
    assert "interrupted before seed" in err
    assert "Traceback" not in err

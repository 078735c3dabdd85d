"""`scripts/test`, with a program in pytest's place."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.process.command import eventually

#: Says what it was asked for. A part ends with the code in PLAIN or ENGINES; with HANGS it
#: waits for Ctrl-C, and then ends by itself, as pytest does. NO_HOSTS: why hosts cannot be made.
PYTEST = """#!/usr/bin/env python3
import os, signal, sys
if "tests.hosts.network" in sys.argv:
    print(os.environ.get("NO_HOSTS", ""))
    sys.exit()
with open("asked", "a") as asked:
    print(*sys.argv[1:], file=asked)
part = "PLAIN" if "not vllm" in sys.argv else "ENGINES"
if "HANGS" in os.environ:
    try:
        signal.pause()
    except KeyboardInterrupt:
        sys.exit(2)
sys.exit(int(os.environ.get(part, "0")))
"""
PLAIN = "-m pytest -m not vllm --numprocesses 4 --dist loadfile --no-loadscope-reorder"
ENGINES = "-m pytest -m vllm"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "scripts" / "test"
    script.parent.mkdir()
    shutil.copy("scripts/test", script)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTEST)
    python.chmod(0o755)
    return script


def asked(script: Path) -> list[str]:
    told = script.parent.parent / "asked"
    return told.read_text().splitlines() if told.exists() else []


@pytest.mark.parametrize(
    ("codes", "exit_code", "ends"),
    [
        ({}, 0, ("passed in", "passed in")),
        ({"PLAIN": "1"}, 1, ("FAILED after", "passed in")),
        ({"ENGINES": "1"}, 1, ("passed in", "FAILED after")),
        ({"PLAIN": "5", "ENGINES": "2"}, 1, ("FAILED after", "FAILED after")),
    ],
)
def test_both_parts_run_and_the_last_lines_say_how_they_ended(
    script: Path, codes: dict[str, str], exit_code: int, ends: tuple[str, str]
):
    ran = subprocess.run([script], env={**os.environ, **codes}, capture_output=True, text=True)
    assert asked(script) == [PLAIN, ENGINES]
    assert ran.returncode == exit_code
    first, second = ran.stdout.splitlines()[-2:]
    assert first.startswith(f"part 1, tests without engines: {ends[0]}")
    assert second.startswith(f"part 2, tests with engines: {ends[1]}")


def test_what_is_skipped_is_said_at_the_end(script: Path):
    for name in ("get_vllm_rs", "get_routers"):
        (script.parent / name).write_text('#!/bin/sh\n[ -z "$NO_DOWNLOADS" ]\n')
        (script.parent / name).chmod(0o755)

    def before_the_ends(**environment: str) -> list[str]:
        env = {**os.environ, "NO_DOWNLOADS": "", "NO_HOSTS": "", **environment}
        ran = subprocess.run([script], env=env, capture_output=True, text=True)
        assert ran.returncode == 0
        lines = ran.stdout.splitlines()
        return lines[len(lines) - 1 - lines[::-1].index("") + 1 : -2]

    assert before_the_ends() == []
    assert before_the_ends(NO_HOSTS="needs root") == ["tests/hosts is SKIPPED: needs root"]
    assert before_the_ends(NO_DOWNLOADS="1") == [
        "the tests of the Rust edge are SKIPPED: no vllm-rs",
        "the comparisons with routers are SKIPPED: no vllm-router, no sglang-router",
    ]


def test_arguments_go_to_one_run(script: Path):
    ran = subprocess.run(
        [script, "tests/unit", "-k", "not vllm"], env={**os.environ, "ENGINES": "3"}
    )
    assert asked(script) == ["-m pytest tests/unit -k not vllm"]
    assert ran.returncode == 0


def test_ctrl_c_ends_it_at_once(script: Path):
    running = subprocess.Popen(
        [script],
        env={**os.environ, "HANGS": ""},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Where the tests run in the background it may be ignored, and would stay so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with running:
        eventually(lambda: asked(script), "the first part runs")
        os.killpg(running.pid, signal.SIGINT)
        output, _ = running.communicate(timeout=10)
    assert running.returncode == 130
    assert asked(script) == [PLAIN] and "part 1" not in output

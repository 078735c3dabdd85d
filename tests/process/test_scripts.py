"""`scripts/test`, with a program in pytest's place."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.process.command import eventually

#: Says what it was asked for. A part ends with the code in PLAIN, WITH_VLLM or ENGINES; with HANGS
#: it waits for Ctrl-C, and then ends by itself, as pytest does.
PYTEST = """#!/usr/bin/env python3
import os, signal, sys
if "tests.hosts.network" in sys.argv:
    sys.exit()
with open("asked", "a") as asked:
    print(*sys.argv[1:], file=asked)
part = "PLAIN" if "--ignore=tests/vllm" in sys.argv else "ENGINES"
part = "WITH_VLLM" if "tests/vllm/without_engines" in sys.argv else part
if "HANGS" in os.environ:
    try:
        signal.pause()
    except KeyboardInterrupt:
        sys.exit(2)
sys.exit(int(os.environ.get(part, "0")))
"""
PLAIN = "--ignore=tests/vllm --numprocesses 3 --dist loadfile --no-loadscope-reorder"
WITH_VLLM = "tests/vllm/without_engines --numprocesses 2 --dist loadfile"
ENGINES = "tests/vllm --ignore=tests/vllm/without_engines"
CORE = [f"-m pytest -m not heavy {part}" for part in (PLAIN, WITH_VLLM, ENGINES)]
ALL = [f"-m pytest {part}" for part in (PLAIN, WITH_VLLM, ENGINES)]


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
    ("arguments", "parts", "codes", "ends"),
    [
        ([], CORE, {}, ("passed in", "passed in", "passed in")),
        (["--all"], ALL, {"ENGINES": "1"}, ("passed in", "passed in", "FAILED after")),
        ([], CORE, {"PLAIN": "5", "WITH_VLLM": "2"}, ("FAILED after", "FAILED after", "passed in")),
    ],
)
def test_all_parts_run_and_the_last_lines_say_how_they_ended(
    script: Path, arguments: list[str], parts: list[str], codes: dict[str, str], ends: tuple[str]
):
    env = {**os.environ, **codes}
    ran = subprocess.run([script, *arguments], env=env, capture_output=True, text=True)
    assert asked(script) == parts
    assert ran.returncode == (1 if codes else 0)
    names = ("tests without vLLM", "tests of what imports vLLM", "tests with engines")
    lines = ran.stdout.splitlines()[-3:]
    for number, (line, name, end) in enumerate(zip(lines, names, ends, strict=True), 1):
        says = rf"part {number}, {name}: {end} \d+ s \(\d+ s of processor time"
        assert re.match(says, line)


def test_arguments_go_to_one_run(script: Path):
    arguments = ["tests/unit", "-k", "not vllm"]
    ran = subprocess.run([script, *arguments], env={**os.environ, "ENGINES": "3"})
    assert asked(script) == ["-m pytest tests/unit -k not vllm"]
    assert ran.returncode == 3, "the code of pytest"


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
    assert asked(script) == CORE[:1] and "part 1" not in output

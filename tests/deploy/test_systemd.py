"""The systemd units: as systemd reads them, and against the command line."""

import configparser
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.command_lines import DEPLOY, ROOT, Served, served

UNITS = DEPLOY / "systemd"
PROGRAM = "/opt/dynamo-lite/bin/dynamo-lite"
NAMES = ("dynamo-lite.service", "dynamo-lite@.service")
SERVICES = ("Frontend", "VllmWorker", "PrefillWorker")


def unit(name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(UNITS / name)
    return parser["Service"]


def environment() -> dict[str, str]:
    lines = (UNITS / "dynamo-lite.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and line[0] != "#")


def command_of(name: str, instance: str = "") -> Served:
    command = unit(name)["ExecStart"].replace("%i", instance).replace("\\\n", "")
    for variable, value in environment().items():
        command = command.replace(f"${{{variable}}}", value)
    assert "$" not in command
    words = shlex.split(command.replace("&", "\\&"))
    assert words[0] == PROGRAM
    # The page says to begin with a copy of this file.
    return served(words[1:], {"/etc/dynamo-lite/graph.yaml": ROOT / "configs" / "disagg.yaml"})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_finds_nothing_to_complain_about(tmp_path: Path) -> None:
    program = tmp_path / "dynamo-lite"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for name in NAMES:
        text = (UNITS / name).read_text().replace(PROGRAM, str(program))
        (tmp_path / name.replace("@", "@Frontend")).write_text(text)
    units = [str(path) for path in tmp_path.glob("*.service")]
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    # It also reads the machine's own units: theirs are not ours to judge.
    ours = [line for line in checked.stderr.splitlines() if "dynamo-lite" in line]
    assert (len(units), ours) == (2, [])


@pytest.mark.parametrize(
    ("name", "instance"), [(NAMES[0], ""), *((NAMES[1], service) for service in SERVICES)]
)
def test_a_unit_starts_what_it_says_and_is_stopped_in_time(name: str, instance: str) -> None:
    section, command = unit(name), command_of(name, instance)
    assert command.options["service_name"] == (instance or None)
    limit_s = float(section["TimeoutStopSec"].removesuffix("s"))
    assert command.longest_stop_s <= limit_s <= command.longest_stop_s + 30
    # With control-group each process would get SIGTERM, and with it a second one: a kill.
    assert section["KillMode"] == "mixed"
    assert section["WorkingDirectory"] == f"/var/lib/{section['StateDirectory']}"
    assert section["Environment"] == f"HOME={section['WorkingDirectory']}"

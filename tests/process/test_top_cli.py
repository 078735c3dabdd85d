"""`dynamo-lite top` as a command: on a terminal, and on a pipe."""

import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from tests.process.command import serving
from tests.started import ROOT

pytestmark = pytest.mark.timeout(180)

ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_the_terminal_is_as_before(tmp_path: Path, kind: signal.Signals):
    with serving(tmp_path, until="ready http"):
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            os.environ["TERM"] = "xterm"
            arguments = ("-m", "dynamo_lite.cli.cli", "top", "--state-dir", str(tmp_path))
            os.execv(sys.executable, (sys.executable, *arguments))
        shown = b""
        while b"WORKER" not in shown:
            shown += os.read(terminal, 1 << 16)
        if kind is signal.SIGINT:
            os.write(terminal, b"\x03")
        else:
            os.kill(pid, kind)
        shown += _rest_of(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for begun, ended in ((ENTER_SCREEN, LEAVE_SCREEN), (HIDE_CURSOR, SHOW_CURSOR)):
            assert 0 <= shown.rfind(begun) < shown.rfind(ended)
        assert b"Traceback" not in shown


def _rest_of(terminal: int) -> bytes:
    rest = b""
    while True:
        try:
            piece = os.read(terminal, 1 << 16)
        except OSError:  # how a terminal without a program ends
            piece = b""
        if not piece:
            os.close(terminal)
            return rest
        rest += piece

"""The bridge's thread: an engine does not outlive its session."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_lite.disagg.bridge import ThreadBridge
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.process.stop import EXIT_OWNED_TASK_FAILED
from dynamo_lite.runtime.tasks import needed, running

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0

#: An engine whose own thread has nothing to do, and whose session loses a loop.
ENGINE = """
import asyncio, contextlib, threading
from dynamo_lite.disagg.bridge import ThreadBridge
from dynamo_lite.runtime.tasks import needed, running

lost = asyncio.Event()

async def follow():
    await lost.wait()
    raise ValueError("no such\\nthing")

@contextlib.asynccontextmanager
async def session():
    async with needed() as fail, running(follow(), name="follower", on_failure=fail):
        yield

bridge = ThreadBridge(session)
bridge.start(30)
bridge.call(lost.set)
threading.Event().wait()
"""


class Session:
    """A session that can be made to fail. thread: the one that it was opened in."""

    thread: threading.Thread

    def __init__(self, *, refused: bool = False, bad_end: bool = False):
        self.refused, self.bad_end = refused, bad_end
        self.lost = asyncio.Event()

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[None]:
        self.thread = threading.current_thread()
        if self.refused:
            raise ValueError("not opened")
        async with needed() as fail, running(self._follow(), name="follower", on_failure=fail):
            yield
            if self.bad_end:
                raise ValueError("not closed")

    async def _follow(self) -> None:
        await self.lost.wait()
        raise ValueError("lost")


def test_a_process_whose_bridge_fails_ends_with_its_exit_code_and_the_cause():
    ended = subprocess.run(
        [sys.executable, "-c", ENGINE], capture_output=True, text=True, cwd=ROOT, timeout=WAIT_S
    )
    assert ended.returncode == EXIT_OWNED_TASK_FAILED == 70
    line = "the engine's bridge has ended, and so does this process, with exit code 70: "
    assert line + "ValueError('no such\\nthing')" in ended.stderr.splitlines()


def test_a_session_that_ends_by_itself_ends_the_process_once():
    ends = threading.Semaphore(0)
    session = Session()
    bridge = ThreadBridge(session, end_process=ends.release)
    bridge.start(WAIT_S)
    bridge.call(session.lost.set)
    assert ends.acquire(timeout=WAIT_S)
    bridge.close()
    assert not ends.acquire(blocking=False)
    assert not session.thread.is_alive()


@pytest.mark.parametrize("bad_end", [False, True])
def test_a_bridge_that_is_closed_does_not_end_the_process(
    bad_end: bool, caplog: pytest.LogCaptureFixture
):
    ends: list[None] = []
    session = Session(bad_end=bad_end)
    bridge = ThreadBridge(session, end_process=lambda: ends.append(None))
    bridge.start(WAIT_S)
    bridge.close()
    assert not session.thread.is_alive() and not ends
    assert ("the engine's bridge failed: ValueError('not closed')" in caplog.text) is bad_end


def test_a_session_that_cannot_be_opened_fails_the_start():
    ends: list[None] = []
    session = Session(refused=True)
    bridge = ThreadBridge(session, end_process=lambda: ends.append(None))
    with pytest.raises(StartupError, match="not opened"):
        bridge.start(WAIT_S)
    bridge.close()
    assert not session.thread.is_alive() and not ends

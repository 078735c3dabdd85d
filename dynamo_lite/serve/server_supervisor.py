"""Keeps one embedded server running: whatever ended it, it is started again."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.serve.progress import Progress, exit_text
from dynamo_lite.serve.run_state import ServerState

#: Starts that fail in a row, after which the graph is given up: nearly 8 s.
_TRIES = 6
_BACKOFF = Backoff(first_s=0.25, factor=2.0, longest_s=5.0, calm_s=30.0)


class Server(Protocol):
    """A server that the graph cannot do without for long."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    async def exited(self) -> int:
        """Returns the exit code when the server has ended."""
        ...

    async def restart(self) -> None:
        """Starts it as it was, after its end. Raises StartupError."""
        ...


class ServerSupervisor:
    """state: its line in run.json; `on_change` is called after each change.

    graph_ends: set it when nobody needs to hear any more that the server stays away.
    """

    def __init__(self, server: Server, progress: Progress, on_change: Callable[[], None]):
        self.state = ServerState(name=server.name, pid=server.pid)
        self.graph_ends = False
        self._server = server
        self._progress = progress
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"ServerSupervisor({self.state})"

    async def keep(self) -> None:
        """Runs until it is cancelled. Raises StartupError when the server cannot be started."""
        failures = 0
        while True:
            began = time.monotonic()
            code = await self._server.exited()
            restart = _BACKOFF.after_exit(failures, time.monotonic() - began)
            failures = restart.failures
            # Nobody works well without it: only what dies again and again must wait.
            delay_s = 0.0 if failures == 1 else restart.delay_s
            self.state.pid = 0
            self._on_change()
            self._say(f"ended ({exit_text(code)}); again {_when(delay_s)}")
            await self._start(delay_s)
            self.state.pid = self._server.pid
            self.state.restarts += 1
            self._on_change()
            self._say("is back")

    async def _start(self, delay_s: float) -> None:
        failures = 0
        while True:
            await asyncio.sleep(delay_s)
            try:
                return await self._server.restart()
            except StartupError as exc:
                restart = _BACKOFF.after_exit(failures, 0.0)
                failures, delay_s = restart.failures, restart.delay_s
                if failures >= _TRIES and not self.graph_ends:
                    raise StartupError(f"{self.state.name} cannot be started again: {exc}") from exc
                self._say(f"{exc}; again {_when(delay_s)}")

    def _say(self, text: str) -> None:
        self._progress.line(self.state.name, text)


def _when(delay_s: float) -> str:
    return f"in {delay_s:g} s" if delay_s else "at once"

"""Keeps one embedded server running: restarts it after every end."""

import asyncio
import time
from collections.abc import Callable

from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.backoff import Backoff
from dynamo_lite.serve.embedded import EmbeddedServer
from dynamo_lite.serve.progress import Progress, exit_text
from dynamo_lite.serve.run_state import ServerState

#: Failed starts in a row after which the whole graph fails: nearly 8 s.
_TRIES = 6
_BACKOFF = Backoff(first_s=0.25, factor=2.0, longest_s=5.0, calm_s=30.0)


class ServerSupervisor:
    """Restarts one server. `on_change` is called after each change of `state`."""

    def __init__(self, server: EmbeddedServer, progress: Progress, on_change: Callable[[], None]):
        #: Its entry in run.json.
        self.state = ServerState(name=server.name, pid=server.pid)
        #: Set during a drain: failed restarts no longer raise.
        self.graph_ends = False
        self._server = server
        self._progress = progress
        self._on_change = on_change

    async def keep(self) -> None:
        """Runs until it is cancelled. Raises StartupError when the server cannot be started."""
        failures = 0
        while True:
            began = time.monotonic()
            code = await self._server.exited()
            restart = _BACKOFF.after_exit(failures, time.monotonic() - began)
            failures = restart.failures
            # Every process needs the server: only repeated failures are delayed.
            delay_s = 0.0 if failures == 1 else restart.delay_s
            self.state.pid = 0
            self._on_change()
            self._print(f"ended ({exit_text(code)}); restarting {_when(delay_s)}")
            await self._start(delay_s)
            self.state.pid = self._server.pid
            self.state.restarts += 1
            self._on_change()
            self._print("restarted")

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
                    raise StartupError(f"{self.state.name} cannot be restarted: {exc}") from exc
                self._print(f"{exc}; next try {_when(delay_s)}")

    def _print(self, text: str) -> None:
        self._progress.line(self.state.name, text)


def _when(delay_s: float) -> str:
    return f"in {delay_s:g} s" if delay_s else "now"

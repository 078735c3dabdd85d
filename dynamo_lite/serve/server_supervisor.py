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
        ends = 0
        while True:
            began = time.monotonic()
            code = await self._server.exited()
            self.state.pid = 0
            self._on_change()
            end = _BACKOFF.after_exit(ends, time.monotonic() - began)
            # Every process needs the server: only repeated failures are delayed.
            ends, delay_s, failures = end.failures, 0.0 if end.failures == 1 else end.delay_s, 0
            what = f"ended ({exit_text(code)}); restarting"
            while not self.state.pid:
                self._print(f"{what} in {delay_s:g} s" if delay_s else f"{what} now")
                await asyncio.sleep(delay_s)
                try:
                    await self._server.restart()
                    self.state.pid = self._server.pid
                except StartupError as exc:
                    restart = _BACKOFF.after_exit(failures, 0.0)
                    failures, delay_s, what = restart.failures, restart.delay_s, f"{exc}; next try"
                    if failures >= _TRIES and not self.graph_ends:
                        why = f"{self.state.name} cannot be restarted: {exc}"
                        raise StartupError(why) from exc
            self.state.restarts += 1
            self._on_change()
            self._print("restarted")

    def _print(self, text: str) -> None:
        self._progress.line(self.state.name, text)

"""Starts all processes of a graph, keeps them running, drains them in order."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence

from dynamo_lite.policy.backoff import Backoff
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.runtime.process.stop import StopRequest
from dynamo_lite.runtime.tasks import end_tasks
from dynamo_lite.serve.child_process import Launch
from dynamo_lite.serve.instance_supervisor import InstanceSupervisor
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import RunFile
from dynamo_lite.serve.server_supervisor import Server, ServerSupervisor

EXIT_DRAINED = 0
EXIT_FORCED = 130

_NEWS_INTERVAL_S = 5.0
#: A process may take this long after its grace to cancel work, and then to free its engine.
_DRAIN_MARGIN_S = 10.0
_CLOSE_MARGIN_S = 40.0


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP: the first asks for a drain, the second forces."""

    def __init__(self) -> None:
        self.stop = StopRequest()
        self.force = asyncio.Event()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for kind in kinds:
            loop.add_signal_handler(kind, self._on_signal, kind)
        try:
            yield
        finally:
            for kind in kinds:
                loop.remove_signal_handler(kind)

    def _on_signal(self, kind: signal.Signals) -> None:
        if self.stop.is_set:
            self.force.set()
        self.stop.set(kind.name, EXIT_DRAINED)


class Supervisor:
    """Runs `tiers` of instances; a tier is drained only when the one before has been.

    grace_s: longest drain of one process, which the process keeps itself; a
    process that takes notably longer is killed.
    """

    def __init__(
        self,
        tiers: Sequence[Sequence[Launch]],
        servers: Sequence[Server],
        run: RunFile,
        signals: StopSignals,
        progress: Progress,
        *,
        grace_s: float,
        backoff: Backoff | None = None,
    ):
        policy = backoff or Backoff()
        self._tiers = [
            [InstanceSupervisor(launch, policy, progress, self._on_change) for launch in tier]
            for tier in tiers
        ]
        self._keepers = [keeper for tier in self._tiers for keeper in tier]
        self._servers = [ServerSupervisor(server, progress, self._on_change) for server in servers]
        self._run = run
        self._signals = signals
        self._progress = progress
        self._grace_s = grace_s
        run.state.processes = [keeper.state for keeper in self._keepers]
        run.state.servers = [server.state for server in self._servers]

    async def run(self) -> int:
        """Returns the exit code. Raises StartupError when the start fails, or a server
        that the graph needs ends for good; nothing is left running then."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = [tasks.create_task(server.keep()) for server in self._servers]
                for keeper in self._keepers:
                    tasks.create_task(keeper.keep(), name=keeper.launch.name)
                forcing = tasks.create_task(self._force_when_asked())
                if await self._until_ready():
                    self._announce()
                    await self._until_stop()
                await self._drain()
                for task in (*watching, forcing):
                    task.cancel()
        except BaseExceptionGroup as group:
            expected, rest = group.split(StartupError)
            if expected is None or rest is not None:
                raise
            raise _first(expected) from group
        return EXIT_FORCED if self._signals.force.is_set() else EXIT_DRAINED

    async def _until_ready(self) -> bool:
        """Waits for every instance. False when a stop was asked for meanwhile."""
        while waiting := [keeper for keeper in self._keepers if not keeper.ready.is_set()]:
            await _first_of(
                waiting[0].ready.wait(), self._signals.stop.wait(), timeout_s=_NEWS_INTERVAL_S
            )
            if self._signals.stop.is_set:
                return False
            late = [k.launch.name for k in self._keepers if not k.ready.is_set()]
            if late and late == [keeper.launch.name for keeper in waiting]:
                self._progress.line("serve", f"waiting for {', '.join(late)}")
        return True

    def _announce(self) -> None:
        self._run.state.state = "ready"
        self._on_change()
        for keeper in self._keepers:
            url = keeper.facts.get("url")
            if not url:
                continue
            model = keeper.facts.get("model", "MODEL")
            print(f"ready {url}", flush=True)
            print(_example(url, model, asks_key=bool(keeper.facts.get("asks_key"))), flush=True)
            return
        print(f"ready {' '.join(keeper.launch.name for keeper in self._keepers)}", flush=True)

    async def _until_stop(self) -> None:
        async def all_done() -> None:
            for keeper in self._keepers:
                await keeper.done.wait()

        await _first_of(all_done(), self._signals.stop.wait())

    async def _drain(self) -> None:
        for server in self._servers:
            server.graph_ends = True
        self._run.state.state = "draining"
        self._on_change()
        if self._signals.stop.is_set:
            self._progress.line("serve", "stopping; once more forces")
        for tier in self._tiers:
            for keeper in tier:
                keeper.stop()
            await _all_of([keeper.drained for keeper in tier], self._grace_s + _DRAIN_MARGIN_S)
        # An engine takes seconds to be taken apart: all do so at the same time.
        await _all_of([keeper.done for keeper in self._keepers], _CLOSE_MARGIN_S)
        for keeper in self._keepers:
            if not keeper.done.is_set():
                keeper.kill()
                await keeper.done.wait()

    async def _force_when_asked(self) -> None:
        await self._signals.force.wait()
        self._progress.line("serve", "forced")
        for keeper in self._keepers:
            keeper.kill()

    def _on_change(self) -> None:
        facts = [keeper.facts for keeper in self._keepers if keeper.state.state == "ready"]
        urls = [str(fact["url"]) for fact in facts if fact.get("url")]
        if urls:
            self._run.state.http = urls[0]
        self._run.write()


_EXAMPLE = """
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\{more}
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], \
"max_tokens": 32}}'
"""


def _example(url: str, model: str, *, asks_key: bool) -> str:
    """A command for the user's shell, who knows the key and the certificate."""
    more: list[str] = []
    if url.startswith("https:"):
        more.append('--cacert "$CERTIFICATE"')
    if asks_key:
        more.append('-H "Authorization: Bearer $API_KEY"')
    lines = "".join(f"\n    {option} \\" for option in more)
    return _EXAMPLE.format(url=url, model=model, more=lines)


async def _all_of(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Returns when all are set, or after the time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()


async def _first_of(*waits: object, timeout_s: float | None = None) -> None:
    """Returns when one of the coroutines has returned, or after the time; ends the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[arg-type]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*tasks)


def _first(group: BaseExceptionGroup[StartupError]) -> StartupError:
    for exc in group.exceptions:
        return _first(exc) if isinstance(exc, BaseExceptionGroup) else exc
    raise ValueError("an exception group is never empty")

"""Starts all processes of a graph, restarts crashed ones, and drains them in order."""

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
from dynamo_lite.serve.lease_revoker import LeaseRevoker
from dynamo_lite.serve.progress import Progress
from dynamo_lite.serve.run_state import RunFile
from dynamo_lite.serve.server_supervisor import Server, ServerSupervisor

EXIT_DRAINED = 0
EXIT_FORCED = 130

#: While the start makes no progress, the names of the missing processes are repeated.
_REMINDER_S = 5.0
#: After its grace a process may take this long to cancel requests, then to close its engine.
_DRAIN_MARGIN_S = 10.0
_CLOSE_MARGIN_S = 40.0


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP: the first starts a drain, the second kills."""

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
    """Runs all instances of a graph, and its embedded servers.

    Args:
        tiers: instances in drain order: a tier is drained after the one before it.
        grace_s: longest drain of one process. Each process enforces it itself; one that
            takes much longer is killed.
        leases: revokes the leases of processes that died.
    """

    def __init__(
        self,
        tiers: Sequence[Sequence[Launch]],
        servers: Sequence[Server],
        run: RunFile,
        signals: StopSignals,
        progress: Progress,
        leases: LeaseRevoker,
        *,
        grace_s: float,
        backoff: Backoff | None = None,
    ):
        policy = backoff or Backoff()
        self._tiers = [
            [
                InstanceSupervisor(launch, policy, leases, progress, self._on_change)
                for launch in tier
            ]
            for tier in tiers
        ]
        self._instances = [instance for tier in self._tiers for instance in tier]
        self._servers = [ServerSupervisor(server, progress, self._on_change) for server in servers]
        self._run = run
        self._signals = signals
        self._progress = progress
        self._grace_s = grace_s
        run.state.processes = [instance.state for instance in self._instances]
        run.state.servers = [server.state for server in self._servers]

    async def run(self) -> int:
        """Returns the exit code.

        Raises StartupError when the start fails or an embedded server cannot be restarted;
        no process is left running then.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = [tasks.create_task(server.keep()) for server in self._servers]
                for instance in self._instances:
                    tasks.create_task(instance.keep(), name=instance.launch.name)
                forcing = tasks.create_task(self._kill_when_forced())
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
        """Waits until every instance is ready. Returns False when a stop signal came first."""
        while waiting := [instance for instance in self._instances if not instance.ready.is_set()]:
            await _first_of(
                waiting[0].ready.wait(), self._signals.stop.wait(), timeout_s=_REMINDER_S
            )
            if self._signals.stop.is_set:
                return False
            late = [
                instance.launch.name for instance in self._instances if not instance.ready.is_set()
            ]
            if late and late == [instance.launch.name for instance in waiting]:
                self._progress.line("serve", f"waiting for {', '.join(late)}")
        return True

    def _announce(self) -> None:
        self._run.state.state = "ready"
        self._on_change()
        for instance in self._instances:
            url = instance.facts.get("url")
            if not url:
                continue
            model = instance.facts.get("model", "MODEL")
            print(f"ready {url}", flush=True)
            print(_example(url, model, needs_key=bool(instance.facts.get("asks_key"))), flush=True)
            return
        print(f"ready {' '.join(instance.launch.name for instance in self._instances)}", flush=True)

    async def _until_stop(self) -> None:
        async def all_done() -> None:
            for instance in self._instances:
                await instance.done.wait()

        await _first_of(all_done(), self._signals.stop.wait())

    async def _drain(self) -> None:
        for server in self._servers:
            server.graph_ends = True
        self._run.state.state = "draining"
        self._on_change()
        if self._signals.stop.is_set:
            self._progress.line("serve", "stopping; a second signal kills all processes")
        for tier in self._tiers:
            for instance in tier:
                instance.stop()
            await _all_of([instance.drained for instance in tier], self._grace_s + _DRAIN_MARGIN_S)
        # Closing an engine takes seconds; all close at the same time.
        await _all_of([instance.done for instance in self._instances], _CLOSE_MARGIN_S)
        for instance in self._instances:
            if not instance.done.is_set():
                instance.kill()
                await instance.done.wait()

    async def _kill_when_forced(self) -> None:
        await self._signals.force.wait()
        self._progress.line("serve", "forced: killing all processes")
        for instance in self._instances:
            instance.kill()

    def _on_change(self) -> None:
        facts = [instance.facts for instance in self._instances if instance.state.state == "ready"]
        urls = [str(fact["url"]) for fact in facts if fact.get("url")]
        if urls:
            self._run.state.http = urls[0]
        self._run.write()


_EXAMPLE = """
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\{more}
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], \
"max_tokens": 32}}'
"""


def _example(url: str, model: str, *, needs_key: bool) -> str:
    """A curl command; key and certificate are variables of the user's shell."""
    more: list[str] = []
    if url.startswith("https:"):
        more.append('--cacert "$CERTIFICATE"')
    if needs_key:
        more.append('-H "Authorization: Bearer $API_KEY"')
    lines = "".join(f"\n    {option} \\" for option in more)
    return _EXAMPLE.format(url=url, model=model, more=lines)


async def _all_of(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Waits until all are set, `timeout_s` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()


async def _first_of(*waits: object, timeout_s: float | None = None) -> None:
    """Waits until one coroutine has returned, `timeout_s` at most; cancels the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[arg-type]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(*tasks)


def _first(group: BaseExceptionGroup[StartupError]) -> StartupError:
    for exc in group.exceptions:
        return _first(exc) if isinstance(exc, BaseExceptionGroup) else exc
    raise ValueError("an exception group is never empty")

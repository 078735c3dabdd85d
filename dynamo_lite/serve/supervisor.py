"""Starts all processes of a graph, restarts crashed ones, and drains them in order. While the graph
runs, processes of scalable services can be added and retired."""

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_lite.protocol.errors import Refused, StartupError
from dynamo_lite.protocol.planner import RoleCounts, Want
from dynamo_lite.runtime.certificates import with_files
from dynamo_lite.runtime.process.stop import EXIT_FORCED, EXIT_STOPPED, StopRequest
from dynamo_lite.runtime.tasks import first_of
from dynamo_lite.serve.config import ServiceConfig
from dynamo_lite.serve.embedded import EmbeddedServer
from dynamo_lite.serve.instance_supervisor import InstanceSupervisor
from dynamo_lite.serve.launches import ServeRequest, prepare
from dynamo_lite.serve.progress import Progress, say
from dynamo_lite.serve.run_state import RunState, run_file, write_run

#: After its grace a process may take this long to cancel requests, then to close its engine.
_DRAIN_MARGIN_S = 10.0
_CLOSE_MARGIN_S = 40.0
#: A start says in such intervals what it still waits for.
_REMIND_S = 5.0


class Supervisor:
    """Runs all instances of a graph, and its embedded servers.

    Args:
        services: those to start, in drain order: the next one is drained after the one before it.
        stop, force: begin a drain, and kill all processes. Each process enforces the limit of its
            drain itself; one that takes much longer is killed.

    Raises StartupError when the devices do not suffice, or files of a process cannot be written.
    """

    def __init__(
        self,
        request: ServeRequest,
        services: Sequence[ServiceConfig],
        servers: Sequence[EmbeddedServer],
        directory: Path,
        run: RunState,
        stop: StopRequest,
        force: asyncio.Event,
        progress: Progress,
    ):
        self._request, self._grace_s = request, request.config.shared.grace_s
        self._etcd_url = with_files(run.etcd, run.folder, services[0].service.name)
        self._directory, self._run, self._progress = directory, run, progress
        self._servers, self._stop, self._force = servers, stop, force
        #: Set after each change of a process.
        self._changed = asyncio.Event()
        #: The tasks of the keepers.
        self._tasks = asyncio.TaskGroup()
        run.servers = [server.state for server in self._servers]
        self._services = {service.service.name: service for service in services}
        self._tiers: dict[str, list[InstanceSupervisor]] = {name: [] for name in self._services}
        for name, service in self._services.items():
            for _ in range(service.workers):
                try:
                    self._add(name)
                except Refused as exc:
                    raise StartupError(exc.reason) from exc

    async def run(self) -> int:
        """Returns the exit code.

        Raises StartupError when the start fails or an embedded server cannot be restarted;
        no process is left running then.
        """
        try:
            async with self._tasks as tasks:
                watching = [
                    tasks.create_task(server.keep(self._progress, self._run, self._on_change))
                    for server in self._servers
                ]
                for instance in self.instances:
                    tasks.create_task(instance.keep(), name=instance.launch.name)
                forcing = tasks.create_task(self._kill_when_forced())
                await first_of(
                    self._until(lambda one: one.was_ready), self._remind(), self._stop.wait()
                )
                if not self._stop.is_set:
                    self._announce()
                    await first_of(self._until(_has_ended), self._stop.wait())
                await self._drain()
                for task in (*watching, forcing):
                    task.cancel()
        except BaseExceptionGroup as group:
            expected, rest = group.split(StartupError)
            if expected is None or rest is not None:
                raise
            raise expected.exceptions[0] from group
        return EXIT_FORCED if self._force.is_set() else EXIT_STOPPED

    # Changes while the graph runs

    def want(self, order: Want) -> None:
        """Starts or drains processes of a service until there are as many, without draining ones.
        The graph survives processes that cannot be started; they are not tried again.

        Raises Refused when that is not possible; the error says what is accepted.
        """
        tasks, component = self._tasks, order.component
        if self._run.state != "ready":
            raise _refused(f"the graph is {self._run.state}; it must be ready")
        while (number := self._number(component)) < order.count:
            instance = self._add(component)
            tasks.create_task(instance.keep(), name=instance.launch.name)
            self._progress.line(instance.launch.name, "added")
            self._on_change()
        for instance in self._to_retire(component, number - order.count, order.leases):
            if instance.phase not in ("ended", "draining"):
                self._progress.line(instance.launch.name, "retired")
                instance.stop()
                limit_s = self._grace_s + _DRAIN_MARGIN_S + _CLOSE_MARGIN_S
                tasks.create_task(self._end([instance], limit_s))

    # From start to end

    async def _until(
        self,
        reached: Callable[[InstanceSupervisor], bool],
        of: Sequence[InstanceSupervisor] | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Returns when all of these, or all that there are then, have reached it, or after the
        limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not all(map(reached, self.instances if of is None else of)):
                    self._changed.clear()
                    await self._changed.wait()

    async def _remind(self) -> None:
        while True:
            await asyncio.sleep(_REMIND_S)
            for instance in self.instances:
                if not instance.was_ready:
                    self._progress.line(instance.launch.name, f"still {instance.doing}")

    def _announce(self) -> None:
        self._run.state = "ready"
        self._on_change()
        for instance in self.instances:
            url = instance.facts.get("url")
            if not url:
                continue
            say(f"ready {url}", sys.stdout)
            if not url.startswith("https:") and not instance.facts.get("asks_key"):
                model = instance.facts.get("model", "MODEL")
                say(_EXAMPLE.format(url=url, model=model), sys.stdout)
            return
        say(f"ready {' '.join(one.launch.name for one in self.instances)}", sys.stdout)

    async def _drain(self) -> None:
        self._run.state = "draining"
        self._on_change()
        if self._stop.is_set:
            self._progress.line("serve", "stopping; a second signal kills all processes")
        for tier in list(self._tiers.values()):
            for instance in tier:
                instance.stop()
            await self._until(lambda one: one.drained, tier, self._grace_s + _DRAIN_MARGIN_S)
        # Closing an engine takes seconds; all close at the same time.
        await self._end(self.instances, _CLOSE_MARGIN_S)

    async def _end(self, instances: Sequence[InstanceSupervisor], limit_s: float) -> None:
        """Waits for their end, and kills those that are still there after the limit."""
        await self._until(_has_ended, instances, limit_s)
        for late in itertools.filterfalse(_has_ended, instances):
            self._progress.line(late.launch.name, f"still there after {limit_s:g} s: killed")
            late.kill()
        await self._until(_has_ended, instances)

    async def _kill_when_forced(self) -> None:
        await self._force.wait()
        self._progress.line("serve", "forced: killing all processes")
        for instance in self.instances:
            instance.kill()

    def _on_change(self) -> None:
        ready = [one.facts for one in self.instances if one.state.state == "ready"]
        urls = [str(facts["url"]) for facts in ready if facts.get("url")]
        self._run.http = next(iter(urls), self._run.http)
        self._changed.set()
        self._run.processes = [instance.state for instance in self.instances]
        try:
            write_run(self._directory, self._run)
        except OSError as exc:
            # The graph goes on, and the next change is written with this one.
            path = run_file(self._directory)
            self._progress.line("serve", f"cannot write {path}: {exc.strerror}")

    # Which processes there are, and the devices that they occupy

    @property
    def instances(self) -> list[InstanceSupervisor]:
        """In drain order."""
        return [instance for tier in self._tiers.values() for instance in tier]

    def counts(self) -> dict[str, RoleCounts]:
        """Of the services that can be scaled."""
        return {n: self._counts(n) for n, one in self._services.items() if one.service.scalable}

    def _number(self, component: str) -> int:
        """Its processes, without draining ones. Raises Refused, which says what is accepted."""
        if (found := (counts := self.counts()).get(component)) is None:
            can = ", ".join(counts) or "none"
            raise _refused(f"{component}: no service of this graph that can be scaled: {can}")
        return found.starting + found.ready

    def _to_retire(
        self, component: str, number: int, leases: Sequence[int]
    ) -> list[InstanceSupervisor]:
        """Processes with these leases, then those that were never ready, the youngest first, then
        those that are restarted after a crash. Raises Refused if there are fewer than `number`."""
        tier = self._tiers[component]
        known = {one.lease_id: one for one in tier if one.lease_id}
        found = [known[lease] for lease in leases if lease in known]
        found += [one for one in reversed(tier) if one.phase == "starting"]
        found += [one for one in reversed(tier) if one.phase == "ready" and not one.lease_id]
        if len(found) < number:
            have = ", ".join(f"{lease:x}" for lease in known) or "none"
            raise _refused(
                f"{component}: no other process is starting or was named; leases: {have}"
            )
        return found[: max(number, 0)]

    def _add(self, name: str) -> InstanceSupervisor:
        """One more process, with the first free number. Raises Refused when too few devices are
        free, or its files cannot be written."""
        service, tier = self._services[name], self._tiers[name]
        present = {one.launch.instance for one in tier if not _has_ended(one)}
        number = next(n for n in itertools.count() if n not in present)
        if service.devices > len(free := self._free()):
            raise _refused(
                f"{name}: needs {service.devices} devices, {len(free)} are free; set Graph.devices,"
                " or retire a process first"
            )
        try:
            instance = self._keeper(service, number, free[: service.devices])
        except OSError as exc:
            raise _refused(f"{name}: its files cannot be written: {exc}") from exc
        # The last process with this number has ended, and its log was overwritten.
        self._tiers[name] = [one for one in tier if one.launch.instance != number] + [instance]
        return instance

    def _keeper(
        self, service: ServiceConfig, number: int, devices: tuple[str, ...]
    ) -> InstanceSupervisor:
        """Raises OSError when its files cannot be written."""
        return InstanceSupervisor(
            prepare(self._request, service, self._run, self._directory, number, devices),
            self._etcd_url,
            self._progress,
            self._on_change,
            needed=self._run.state != "ready",
        )

    def _free(self) -> tuple[str, ...]:
        """The devices that no process occupies which has not ended."""
        occupied = {
            name for one in self.instances if not _has_ended(one) for name in one.launch.devices
        }
        return tuple(name for name in self._request.config.devices if name not in occupied)

    def _counts(self, name: str) -> RoleCounts:
        tier = self._tiers[name]
        phases = [one.phase for one in tier]
        return RoleCounts(
            starting=phases.count("starting"),
            ready=phases.count("ready"),
            draining=phases.count("draining"),
            devices_each=self._services[name].devices,
            devices_free=len(self._free()),
            leases=tuple(one.lease_id for one in tier if one.lease_id and one.phase != "ended"),
        )


def _has_ended(instance: InstanceSupervisor) -> bool:
    """It will not be restarted."""
    return instance.phase == "ended"


def _refused(reason: str) -> Refused:
    return Refused(reason, elsewhere=False)


_EXAMPLE = """
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], \
"max_tokens": 32}}'
"""

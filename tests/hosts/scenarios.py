"""What happens to the hosts while they are under load."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.request_plane.framing import STALL_TIMEOUT_S
from tests.builders import eventually
from tests.chaos.questions import Known
from tests.hosts.load import PULLERS, Clients, Jobs
from tests.hosts.network import Host
from tests.hosts.rig import HTTP_PORT, LEASE_TTL_S, Rig

#: How long until everybody has answers again, on a machine that is busy with other things.
_AGAIN_S = 240.0
_SOME = 3
#: Longer than a lease, and than it takes until requests leave a worker that cannot be reached.
_LONG_S = LEASE_TTL_S + 2.0
#: How late the kernel may notice, and `ss` may show, that a host is lost.
_LATE_S = 8.0
_LOOK_S = 0.5
#: Longer than a request is under way to its Frontend.
_ARRIVES_S = 0.3
_QUEUE = names.prefill_stream("jobs")


@dataclass
class Stage:
    """A rig under load. clients: of each Frontend."""

    rig: Rig
    clients: list[Clients]
    #: How many jobs may be lost on their way, at most.
    lost_jobs: int = 0

    async def goes_on(self, *without: Clients) -> None:
        """All clients but `without` have answers, and no client waits for what is broken."""
        asking = [one for one in self.clients if one not in without]
        before = [one.right for one in asking]

        def enough() -> bool:
            answers = zip(asking, before, strict=True)
            return all(one.right >= had + _SOME for one, had in answers)

        try:
            await eventually(enough, _AGAIN_S)
        except TimeoutError as exc:
            now = [one.right for one in asking]
            raise AssertionError(f"not {_SOME} more answers: {before}, now {now}") from exc

    async def in_order(self) -> None:
        """Every process is a member, and all clients have answers."""
        await self.rig.whole()
        await self.goes_on()


Scenario = Callable[[Stage], Awaitable[None]]
Cut = Callable[[Rig], AbstractContextManager[None]]


def _until_gone(cut: Cut) -> Scenario:
    """Until the lease of the first decode worker has ended in etcd, and the process, by its own
    clock, has noticed it: it ends, and a new one joins when it can."""

    async def play(stage: Stage) -> None:
        rig, worker = stage.rig, stage.rig.services["VllmWorker"][0]
        lost, before = rig.lease_of(worker), worker.restarts

        async def gone() -> bool:
            await asyncio.sleep(_LOOK_S)
            return worker.restarts > before and lost not in await rig.leases()

        with cut(rig):
            try:
                await eventually(gone, _AGAIN_S)
            except TimeoutError as exc:
                raise AssertionError(f"a worker still has its lease: {lost:x}") from exc
            await stage.goes_on()

    return play


def _outlasted(cut: Cut) -> Scenario:
    """Longer than a lease, where no lease ends and no process: those who are parted are only silent
    to each other."""

    async def play(stage: Stage) -> None:
        before = await stage.rig.standing()
        with cut(stage.rig):
            await asyncio.sleep(_LONG_S)
            await stage.goes_on()
        await stage.in_order()
        assert await stage.rig.standing() == before

    return play


async def _frontend_host_vanishes(stage: Stage) -> None:
    """With its clients, so it goes on asking for their tokens. The workers, who send to it all the
    time, notice that nothing is acknowledged; the other Frontend's clients notice nothing."""
    gone = stage.clients[0]
    host = gone.frontend.host
    ports = await stage.rig.stream_ports()

    async def connected() -> bool:
        """A worker that is a member is connected to a moment later."""
        await asyncio.sleep(_LOOK_S)
        return all(worker.host.sends_to(host, port) for worker, port in ports)

    await eventually(connected, _AGAIN_S)
    with stage.rig.unplugged(host):
        began = time.monotonic()
        await gone.leave()
        await stage.goes_on(gone)

        async def given_up() -> bool:
            await asyncio.sleep(_LOOK_S)
            return not any(worker.host.sends_to(host, port) for worker, port in ports)

        try:
            left_s = STALL_TIMEOUT_S + _LATE_S - (time.monotonic() - began)
            await eventually(given_up, left_s)
        except TimeoutError as exc:
            raise AssertionError("workers still send to a host that is lost") from exc
        await stage.goes_on(gone)
    await stage.rig.whole()
    await gone.arrive()


async def _server_hosts_vanish(stage: Stage) -> None:
    """The leader of the queue's stream and that of etcd at once. The queue delivers once: a job
    that is on its way through the lost server may be lost, one for each pull request."""
    stage.lost_jobs = PULLERS
    nats, etcd = stage.rig.nats, stage.rig.etcd
    leaders = nats.members[await nats.leader(_QUEUE)], etcd.members[await etcd.leader()]
    with stage.rig.unplugged(*(leader.host for leader in leaders)):
        await asyncio.sleep(_LONG_S)
        await stage.goes_on()


async def _rolling_restart(stage: Stage) -> None:
    """Every server, then every worker and Frontend, in order. The clients of a Frontend use the
    other one meanwhile. It gives the answers that it has begun."""
    await stage.rig.servers_restarted(_QUEUE)
    for worker in stage.rig.workers:
        await worker.restart()
        await stage.goes_on()
    for clients, others in (stage.clients, stage.clients[::-1]):
        frontend = clients.frontend
        clients.turn_to(others.frontend)
        await asyncio.sleep(_ARRIVES_S)
        assert frontend.host.serves(HTTP_PORT), "it ends without a stream"
        await frontend.restart()
        clients.turn_to(frontend)
        await stage.goes_on()


def _frontends(rig: Rig) -> list[Host]:
    return [one.host for one in rig.services["Frontend"]]


def _worker(rig: Rig) -> list[Host]:
    """One of the decode workers."""
    return [rig.services["VllmWorker"][0].host]


_FROM_SERVERS: tuple[Cut, ...] = (
    lambda rig: rig.parted(_worker(rig), rig.server_hosts),
    lambda rig: rig.deaf(_worker(rig), rig.server_hosts),
    lambda rig: rig.deaf(rig.server_hosts, _worker(rig)),
)

SCENARIOS: dict[str, Scenario] = {
    "worker-host-vanishes": _until_gone(lambda rig: rig.unplugged(*_worker(rig))),
    "frontend-host-vanishes": _frontend_host_vanishes,
    "worker-parted-from-servers": _until_gone(_FROM_SERVERS[0]),
    # What it sends arrives, so the servers still see its refreshes; the answers are lost.
    "worker-hears-no-server": _until_gone(_FROM_SERVERS[1]),
    "worker-reaches-no-server": _until_gone(_FROM_SERVERS[2]),
    # NATS still carries its heartbeats.
    "worker-parted-from-etcd": _until_gone(lambda rig: rig.parted(_worker(rig), rig.etcd_hosts)),
    "worker-parted-from-nats": _outlasted(lambda rig: rig.parted(_worker(rig), rig.nats_hosts)),
    "worker-parted-from-frontends": _outlasted(
        lambda rig: rig.parted(_worker(rig), _frontends(rig))
    ),
    "worker-hears-no-frontend": _outlasted(lambda rig: rig.deaf(_worker(rig), _frontends(rig))),
    "frontends-hear-no-worker": _outlasted(lambda rig: rig.deaf(_frontends(rig), _worker(rig))),
    "server-hosts-vanish": _server_hosts_vanish,
    "rolling-restart": _rolling_restart,
}


async def play(rig: Rig, scenario: Scenario, known: Known, say: Callable[[str], None]) -> list[str]:
    """Runs it under load. What went wrong; empty if nothing did. say: gets what was asked."""
    clients = [Clients(one, known) for one in rig.services["Frontend"]]
    trouble: list[str] = []
    try:
        await rig.whole()
        async with AsyncExitStack() as stack:
            jobs = await stack.enter_async_context(Jobs(rig.nats.url))
            for one in clients:
                await stack.enter_async_context(one)
            stage = Stage(rig, clients)
            await stage.goes_on()
            await scenario(stage)
            await stage.in_order()
            for one in clients:
                one.stop()
            back, gone = await jobs.end()
            if gone or back > stage.lost_jobs:
                trouble.append(f"{back} jobs never came, the queue lost {gone}: {jobs}")
        say(f"{sum(one.right for one in clients)} answers, {jobs}, {back} taken back")
        if not jobs.pushed:
            trouble.append("no job was pushed")
    except (AssertionError, TimeoutError, DynamoLiteError) as exc:
        trouble.append(repr(exc))
    return trouble + [problem for one in clients for problem in one.trouble()]


async def play_all(
    rig: Rig,
    scenarios: Mapping[str, Scenario],
    known: Known,
    say: Callable[[str], None],
) -> int:
    """Returns how many scenarios failed."""
    failed = 0
    for name, scenario in scenarios.items():
        began, said = time.monotonic(), list[str]()
        trouble = await play(rig, scenario, known, said.append)
        failed += bool(trouble)
        verdict = "; ".join(trouble or ["right", *said])
        say(f"{name:36} {time.monotonic() - began:6.1f} s  {verdict}")
    return failed

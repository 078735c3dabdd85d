"""What happens to the hosts while they are under load."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass

from dynamo_lite.protocol import names
from dynamo_lite.request_plane.framing import UNACKNOWLEDGED_TIMEOUT_S
from tests.builders import eventually
from tests.hosts.load import Clients, Jobs, Known
from tests.hosts.network import Host
from tests.hosts.program import Program
from tests.hosts.rig import HTTP_PORT, LEASE_TTL_S, Rig

#: How long until everybody has answers again, on a machine that is busy with other things.
_AGAIN_S = 120.0
_SOME = 3
#: Longer than it takes until requests leave a worker that cannot be reached.
_PARTED_S = 12.0
#: How late the kernel may notice, and `ss` may show, that a host is lost.
_LATE_S = 8.0
_LOOK_S = 0.5
#: Longer than a request is under way to its Frontend.
_ARRIVES_S = 0.3


@dataclass
class Stage:
    """A rig under load. clients: of each Frontend. known: what they ask."""

    rig: Rig
    known: Known
    clients: list[Clients]
    jobs: Jobs

    async def goes_on(self, *without: Clients) -> None:
        """All clients but `without` have answers, and nobody waits for what is broken."""
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

    async def outlast_lease(self) -> None:
        await asyncio.sleep(LEASE_TTL_S + 2)

    async def worker_gone(self, restarts: int) -> None:
        """Its lease has ended in etcd, and the process, which was restarted so often before, has
        noticed it by its own clock."""
        lease_id = self.rig.lease_of(self.worker)

        async def gone() -> bool:
            await asyncio.sleep(_LOOK_S)
            return lease_id not in await self.rig.leases() and self.worker.restarts > restarts

        try:
            await eventually(gone, _AGAIN_S)
        except TimeoutError as exc:
            raise AssertionError(f"{self.worker.name} still has its lease") from exc

    async def half_a_lease(self) -> None:
        await asyncio.sleep(LEASE_TTL_S / 2)

    @property
    def worker(self) -> Program:
        return self.rig.services["VllmWorker"][0]

    @property
    def frontends(self) -> list[Host]:
        return [one.host for one in self.rig.services["Frontend"]]


Scenario = Callable[[Stage], Awaitable[None]]


async def worker_host_vanishes(stage: Stage) -> None:
    """No packet of a decode worker arrives; its streams go on elsewhere."""
    await _until_the_worker_is_gone(stage, stage.rig.unplugged(stage.worker.host))


async def _until_the_worker_is_gone(stage: Stage, cut: AbstractContextManager[None]) -> None:
    """Longer than its lease: the process ends, and a new one joins when it can."""
    before = stage.worker.restarts
    with cut:
        await stage.worker_gone(before)
        await stage.goes_on()


async def _for_less_than_a_lease(stage: Stage, *cuts: AbstractContextManager[None]) -> None:
    """One after the other: nobody ends, nobody leaves."""
    before = await stage.rig.standing()
    for cut in cuts:
        await stage.rig.refreshed()
        with cut:
            await stage.half_a_lease()
        await stage.goes_on()
        assert await stage.rig.standing() == before


async def frontend_host_vanishes(stage: Stage) -> None:
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
            left_s = UNACKNOWLEDGED_TIMEOUT_S + _LATE_S - (time.monotonic() - began)
            await eventually(given_up, left_s)
        except TimeoutError as exc:
            raise AssertionError("workers still send to a host that is lost") from exc
        await stage.goes_on(gone)
    await stage.rig.whole()
    await gone.arrive()


async def server_hosts_vanish(stage: Stage) -> None:
    """The leader of the queue's stream and that of etcd at once."""
    server = await stage.rig.nats.leader(names.prefill_stream("jobs"))
    member = await stage.rig.etcd.leader()
    leaders = stage.rig.nats.members[server].host, stage.rig.etcd.members[member].host
    with stage.rig.unplugged(*leaders):
        await stage.outlast_lease()
        await stage.goes_on()


async def server_hosts_vanish_shortly(stage: Stage) -> None:
    """All NATS servers and etcd members."""
    await _for_less_than_a_lease(stage, stage.rig.unplugged(*stage.rig.server_hosts))


async def worker_parted_from_servers_shortly(stage: Stage) -> None:
    """Both directions, then each by itself."""
    worker, servers = [stage.worker.host], stage.rig.server_hosts
    await _for_less_than_a_lease(
        stage,
        stage.rig.parted(worker, servers),
        stage.rig.deaf(worker, servers),
        stage.rig.deaf(servers, worker),
    )


async def worker_parted_from_servers(stage: Stage) -> None:
    cut = stage.rig.parted([stage.worker.host], stage.rig.server_hosts)
    await _until_the_worker_is_gone(stage, cut)


async def worker_parted_from_etcd(stage: Stage) -> None:
    """NATS still carries its heartbeats."""
    cut = stage.rig.parted([stage.worker.host], stage.rig.etcd_hosts)
    await _until_the_worker_is_gone(stage, cut)


async def worker_parted_from_etcd_shortly(stage: Stage) -> None:
    cut = stage.rig.parted([stage.worker.host], stage.rig.etcd_hosts)
    await _for_less_than_a_lease(stage, cut)


async def worker_parted_from_nats(stage: Stage) -> None:
    """Longer than a lease, which lives on in etcd: it is silent to the others, and nobody ends."""
    before = await stage.rig.standing()
    with stage.rig.parted([stage.worker.host], stage.rig.nats_hosts):
        await stage.outlast_lease()
        await stage.goes_on()
    assert await stage.rig.standing() == before


async def worker_hears_no_server(stage: Stage) -> None:
    """What it sends arrives, so the servers still see its refreshes; the answers are lost."""
    cut = stage.rig.deaf([stage.worker.host], stage.rig.server_hosts)
    await _until_the_worker_is_gone(stage, cut)


async def worker_reaches_no_server(stage: Stage) -> None:
    cut = stage.rig.deaf(stage.rig.server_hosts, [stage.worker.host])
    await _until_the_worker_is_gone(stage, cut)


async def worker_parted_from_frontends(stage: Stage) -> None:
    """All see it alive, and nobody who has requests can reach it."""
    with stage.rig.parted([stage.worker.host], stage.frontends):
        await asyncio.sleep(_PARTED_S)
        await stage.goes_on()


async def worker_hears_no_frontend(stage: Stage) -> None:
    with stage.rig.deaf([stage.worker.host], stage.frontends):
        await asyncio.sleep(_PARTED_S)
        await stage.goes_on()


async def frontends_hear_no_worker(stage: Stage) -> None:
    """One of the workers."""
    with stage.rig.deaf(stage.frontends, [stage.worker.host]):
        await asyncio.sleep(_PARTED_S)
        await stage.goes_on()


async def nats_leader_killed(stage: Stage) -> None:
    """Of the queue's stream."""
    name = await stage.rig.nats.leader(names.prefill_stream("jobs"))
    member = stage.rig.nats.members[name]
    await member.kill()
    await stage.goes_on()
    await stage.rig.nats.leader(names.prefill_stream("jobs"))  # another one
    member.start()
    await stage.rig.nats.current(names.prefill_stream("jobs"))


async def etcd_leader_killed(stage: Stage) -> None:
    member = stage.rig.etcd.members[await stage.rig.etcd.leader()]
    await member.kill()
    await stage.goes_on()
    await stage.rig.etcd.leader()  # another one
    member.start()
    await stage.rig.etcd.healthy()


async def rolling_restart(stage: Stage) -> None:
    """Every server, then every worker and Frontend, in order."""
    await stage.rig.servers_restarted(names.prefill_stream("jobs"))
    for worker in stage.rig.services["VllmWorker"]:
        await worker.restart()
        await stage.goes_on()
    one, other = stage.clients
    await _frontend_restarted(stage, one, other.frontend)
    await _frontend_restarted(stage, other, one.frontend)


async def _frontend_restarted(stage: Stage, clients: Clients, other: Program) -> None:
    """Its clients use the other one meanwhile. It gives the answers that it has begun."""
    frontend = clients.frontend
    clients.turn_to(other)
    await asyncio.sleep(_ARRIVES_S)
    assert frontend.host.serves(HTTP_PORT), "it ends without a stream"
    await frontend.restart()
    clients.turn_to(frontend)
    await stage.goes_on()


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__.replace("_", "-"): scenario
    for scenario in (
        worker_host_vanishes,
        frontend_host_vanishes,
        worker_parted_from_servers_shortly,
        worker_parted_from_servers,
        worker_parted_from_etcd_shortly,
        worker_parted_from_etcd,
        worker_parted_from_nats,
        worker_hears_no_server,
        worker_reaches_no_server,
        worker_parted_from_frontends,
        worker_hears_no_frontend,
        frontends_hear_no_worker,
        nats_leader_killed,
        etcd_leader_killed,
        server_hosts_vanish,
        server_hosts_vanish_shortly,
        rolling_restart,
    )
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
            stage = Stage(rig, known, clients, jobs)
            await stage.goes_on()
            await scenario(stage)
            await rig.whole()
            await stage.goes_on()
            for one in clients:
                one.stop()
            if missing := await jobs.missing(_AGAIN_S):
                trouble.append(f"{len(missing)} jobs never came: {jobs}")
        say(f"{sum(one.right for one in clients)} answers, {jobs}")
        if not jobs.pushed:
            trouble.append("no job was pushed")
    except (AssertionError, TimeoutError) as exc:
        trouble.append(repr(exc))
    return trouble + [problem for one in clients for problem in one.trouble()]

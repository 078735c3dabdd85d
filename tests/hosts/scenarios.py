"""What happens to the hosts while they are under load."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo_lite.protocol import names
from tests.hosts.load import Jobs, Results
from tests.hosts.network import Host
from tests.hosts.rig import Program, Rig

#: How long until everybody has answers again, on a machine that is busy with other things.
_AGAIN_S = 90.0
_SOME = 3


@dataclass
class Stage:
    """A rig under load."""

    rig: Rig
    results: Results
    jobs: Jobs

    async def goes_on(self) -> None:
        """Every Caller has answers, and nobody waits for what is broken."""
        await self.results.more(_SOME, _AGAIN_S)

    @property
    def worker(self) -> Program:
        return self.rig.services["VllmWorker"][0]

    @property
    def callers(self) -> list[Host]:
        return [program.host for program in self.rig.services["Caller"]]


Scenario = Callable[[Stage], Awaitable[None]]


async def worker_host_vanishes(stage: Stage) -> None:
    """No packet of a decode worker arrives for two leases; its streams go on elsewhere."""
    with stage.rig.unplugged(stage.worker.host):
        await asyncio.sleep(12)
        await stage.goes_on()
    await stage.worker.ready()


async def server_host_vanishes(stage: Stage) -> None:
    """One NATS server and one etcd member at once."""
    leader = await stage.rig.etcd.leader()
    with stage.rig.unplugged(stage.rig.etcd.members[leader].host):
        await asyncio.sleep(12)
        await stage.goes_on()


async def worker_parted_from_servers_shortly(stage: Stage) -> None:
    """For less than a lease: nobody ends, nobody leaves."""
    with stage.rig.parted([stage.worker.host], stage.rig.server_hosts):
        await asyncio.sleep(3)
    await stage.goes_on()
    assert "ended (" not in stage.worker.log.read_text()


async def worker_parted_from_servers(stage: Stage) -> None:
    """For longer than a lease: the process ends, and a new one joins when it can."""
    with stage.rig.parted([stage.worker.host], stage.rig.server_hosts):
        await asyncio.sleep(14)
        await stage.goes_on()


async def worker_hears_no_server(stage: Stage) -> None:
    """What it sends arrives, so the servers still see its refreshes; the answers are lost."""
    with stage.rig.deaf([stage.worker.host], stage.rig.server_hosts):
        await asyncio.sleep(14)
        await stage.goes_on()


async def worker_reaches_no_server(stage: Stage) -> None:
    with stage.rig.deaf(stage.rig.server_hosts, [stage.worker.host]):
        await asyncio.sleep(14)
        await stage.goes_on()


async def worker_parted_from_callers(stage: Stage) -> None:
    """All see it alive, and nobody who has requests can reach it."""
    with stage.rig.parted([stage.worker.host], stage.callers):
        await asyncio.sleep(10)
        await stage.goes_on()


async def worker_hears_no_caller(stage: Stage) -> None:
    with stage.rig.deaf([stage.worker.host], stage.callers):
        await asyncio.sleep(10)
        await stage.goes_on()


async def callers_hear_no_worker(stage: Stage) -> None:
    with stage.rig.deaf(stage.callers, [stage.worker.host]):
        await asyncio.sleep(10)
        await stage.goes_on()


async def nats_leader_killed(stage: Stage) -> None:
    """Of the queue's stream."""
    name = await stage.rig.nats.leader(names.prefill_stream("jobs"))
    member = stage.rig.nats.members[name]
    await member.kill()
    await stage.goes_on()
    await asyncio.sleep(10)
    member.start()
    await stage.rig.nats.current(names.prefill_stream("jobs"))


async def etcd_leader_killed(stage: Stage) -> None:
    member = stage.rig.etcd.members[await stage.rig.etcd.leader()]
    await member.kill()
    await stage.goes_on()
    await asyncio.sleep(8)
    member.start()
    await stage.rig.etcd.healthy()


async def rolling_restart(stage: Stage) -> None:
    """Every server, then every worker, in order."""
    for member in stage.rig.nats.members.values():
        await member.end()
        member.start()
        await stage.rig.nats.current(names.prefill_stream("jobs"))
    for member in stage.rig.etcd.members.values():
        await member.end()
        member.start()
        await stage.rig.etcd.healthy()
    for worker in stage.rig.services["VllmWorker"]:
        assert await worker.end() == 0
        worker.start()
        await worker.ready()
        await stage.goes_on()


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__.replace("_", "-"): scenario
    for scenario in (
        worker_host_vanishes,
        worker_parted_from_servers_shortly,
        worker_parted_from_servers,
        worker_hears_no_server,
        worker_reaches_no_server,
        worker_parted_from_callers,
        worker_hears_no_caller,
        callers_hear_no_worker,
        nats_leader_killed,
        etcd_leader_killed,
        server_host_vanishes,
        rolling_restart,
    )
}


async def play(rig: Rig, scenario: Scenario, say: Callable[[str], None]) -> list[str]:
    """Runs it under load. What went wrong; empty if nothing did. say: gets what was asked."""
    callers = [rig.directory / f"{one.name}.results" for one in rig.services["Caller"]]
    results = Results(callers)
    async with Jobs(rig.nats.url) as jobs:
        stage = Stage(rig, results, jobs)
        try:
            await stage.goes_on()
            await scenario(stage)
            await stage.goes_on()
        except AssertionError as exc:
            return [str(exc), *results.wrong()]
        missing = await jobs.missing(_AGAIN_S)
    say(f"{results.ended()} requests, {jobs}")
    trouble = [f"{len(missing)} jobs never came: {jobs}"] if missing else []
    if not jobs.pushed:
        trouble.append("no job was pushed")
    return trouble + results.wrong()

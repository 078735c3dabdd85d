"""Single failures under a steady load, after each of which no request has failed."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo_lite.runtime.etcd import EtcdStore
from tests.chaos.arena import Arena
from tests.chaos.blows import Blows
from tests.chaos.cluster import DECODE, PREFILL, Cluster
from tests.chaos.load import Load
from tests.chaos.report import Report

#: Load before and after what is done.
_STEADY_S = 4.0
_OUTAGE_S = 20.0

Body = Callable[[Arena, Blows, Report, Load], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """what: one line for people. calm: nobody's process may have ended by it.
    cancels: share of requests whose clients leave meanwhile."""

    name: str
    what: str
    body: Body
    calm: bool = False
    cancels: float = 0.0


def _killed(service: str) -> Body:
    async def body(arena: Arena, blows: Blows, report: Report, load: Load) -> None:
        victim = blows.pick(service)
        await blows.kill(victim, f"kill {service}")
        await blows.back(victim)

    return body


async def _etcd_frozen(arena: Arena, blows: Blows, report: Report, load: Load) -> None:
    arena.cluster.etcd.freeze()
    blows.hit("freeze etcd", f"for {_OUTAGE_S:g} s")
    await asyncio.sleep(_OUTAGE_S)
    arena.cluster.etcd.thaw()


async def _etcd_killed(arena: Arena, blows: Blows, report: Report, load: Load) -> None:
    await arena.cluster.etcd.kill()
    blows.hit("kill etcd", f"for {_OUTAGE_S:g} s")
    await asyncio.sleep(_OUTAGE_S)
    await arena.cluster.etcd.restart()


async def _nats_killed(arena: Arena, blows: Blows, report: Report, load: Load) -> None:
    for seconds in (0.0, 1.0, 5.0):
        await arena.cluster.nats.kill()
        blows.hit("kill nats-server", f"for {seconds:g} s")
        await asyncio.sleep(seconds)
        await arena.cluster.nats.restart()
        await asyncio.sleep(_STEADY_S)


def _revoked(service: str) -> Body:
    async def body(arena: Arena, blows: Blows, report: Report, load: Load) -> None:
        cluster, victim = arena.cluster, blows.pick(service)
        pid = victim.state.pid
        async with EtcdStore(cluster.etcd.url) as store:
            await store.revoke(int(victim.state.lease, 16))
        blows.hit(f"revoke {service}", f"{victim.name} pid {pid}")
        await cluster.until(
            lambda: victim.state.state == "stopped", timeout_s=60, what=f"{victim.name} has left"
        )
        if f"{victim.name} " not in cluster.main.output or _ended_badly(cluster, victim.name):
            report.trouble.append(f"{victim.name} did not leave in order")
        await cluster.join(service)

    return body


def _ended_badly(cluster: Cluster, name: str) -> bool:
    lines = [line for line in cluster.main.output.splitlines() if name in line]
    return not any("left the graph (exit 0)" in line for line in lines)


SCENARIOS = (
    Scenario("prefill-killed", "the only prefill worker is killed (-9)", _killed(PREFILL)),
    Scenario("decode-killed", "one of two decode workers is killed (-9)", _killed(DECODE)),
    Scenario("etcd-frozen", "etcd is stopped for 20 s", _etcd_frozen, calm=True),
    Scenario("etcd-killed", "etcd is killed, and started after 20 s", _etcd_killed, calm=True),
    Scenario("nats-killed", "nats-server is killed and started thrice", _nats_killed, calm=True),
    Scenario("prefill-revoked", "the only prefill worker's lease is revoked", _revoked(PREFILL)),
    Scenario("decode-revoked", "a decode worker's lease is revoked", _revoked(DECODE)),
)


async def play(arena: Arena, scenario: Scenario, seed: int) -> Report:
    import random

    report = Report(what=f"scenario {scenario.name}", seed=seed, refusals_allowed=False)
    blows = Blows(arena.cluster, random.Random(seed), arena.say)

    async def body(load: Load) -> None:
        await asyncio.sleep(_STEADY_S)
        began = time.monotonic()
        await scenario.body(arena, blows, report, load)
        arena.say(f"{scenario.name}: over after {time.monotonic() - began:.1f} s")
        await asyncio.sleep(_STEADY_S)

    await arena.run(report, body, cancels=scenario.cancels)
    report.blows = dict(blows.counts)
    if scenario.calm and report.exits:
        report.trouble.append(f"processes ended: {report.exits}")
    return report

"""Scenarios: one process, or one server, is away for a while."""

import asyncio

from tests.chaos.cluster import DECODE, ROUTER
from tests.chaos.scenario import STEADY_S, Scenario, Scene

_OUTAGE_S = 20.0


def _killed(service: str):
    async def body(scene: Scene) -> None:
        victim = scene.blows.pick(service)
        await scene.blows.kill(victim, f"kill {service}")
        await scene.blows.back(victim)

    return body


async def _router_killed(scene: Scene) -> None:
    """Requests are placed by turns meanwhile, and by the new Router once it is up."""
    meters = scene.arena.meters
    await meters.ask()
    by_turns = meters.total("router_fallbacks")
    await _killed(ROUTER)(scene)
    await meters.ask()
    by_router = meters.total("router_choices")
    await asyncio.sleep(STEADY_S)
    await meters.ask()
    if meters.total("router_fallbacks") == by_turns:
        scene.report.trouble.append("no request was placed while the Router was away")
    if meters.total("router_choices") == by_router:
        scene.report.trouble.append("the new Router has placed no request")


async def _etcd_frozen(scene: Scene) -> None:
    etcd = scene.arena.cluster.etcd
    etcd.freeze()
    scene.blows.hit("freeze etcd", f"for {_OUTAGE_S:g} s")
    await asyncio.sleep(_OUTAGE_S)
    etcd.thaw()


async def _etcd_killed(scene: Scene) -> None:
    etcd = scene.arena.cluster.etcd
    await etcd.kill()
    scene.blows.hit("kill etcd", f"for {_OUTAGE_S:g} s")
    await asyncio.sleep(_OUTAGE_S)
    await etcd.restart()


async def _nats_killed(scene: Scene) -> None:
    nats = scene.arena.cluster.nats
    for seconds in (0.0, 1.0, 5.0):
        await nats.kill()
        scene.blows.hit("kill nats-server", f"for {seconds:g} s")
        await asyncio.sleep(seconds)
        await nats.restart()
        await asyncio.sleep(STEADY_S)


OUTAGES = (
    Scenario("decode-killed", "one of two decode workers is killed (-9)", _killed(DECODE)),
    Scenario("router-killed", "the Router is killed (-9)", _router_killed),
    Scenario("etcd-frozen", "etcd is stopped for 20 s", _etcd_frozen, calm=True),
    Scenario("etcd-killed", "etcd is killed, and started after 20 s", _etcd_killed, calm=True),
    Scenario("nats-killed", "nats-server is killed and started thrice", _nats_killed, calm=True),
)

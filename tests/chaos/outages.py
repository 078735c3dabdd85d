"""Scenarios: one process, or one server, is away for a while."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from tests.chaos.blows import ETCD, NATS, Blow, freezing, killing, restarting
from tests.chaos.cluster import DECODE, FRONTEND, ROUTER
from tests.chaos.scenario import STEADY_S, Scenario, Scene

_OUTAGE_S = 20.0
#: When a frozen server has been noticed.
_NOTICED_S = 9.0


def _hit(kind: str, *blows: Blow) -> Callable[[Scene], Awaitable[None]]:
    """One after the other."""

    async def body(scene: Scene) -> None:
        for number, blow in enumerate(blows):
            await asyncio.sleep(STEADY_S if number else 0.0)
            await blow(scene.blows, kind)

    return body


async def _router_killed(scene: Scene) -> None:
    """Requests are placed by turns meanwhile, and by the new Router once it is up."""
    meters = scene.arena.meters
    await meters.ask()
    by_turns = meters.total("router_fallbacks")
    await killing(ROUTER, again=0.0)(scene.blows, "kill Router")
    await meters.ask()
    by_router = meters.total("router_choices")
    await asyncio.sleep(STEADY_S)
    await meters.ask()
    if meters.total("router_fallbacks") == by_turns:
        scene.report.trouble.append("no request was placed while the Router was away")
    if meters.total("router_choices") == by_router:
        scene.report.trouble.append("the new Router has placed no request")


async def _nats_frozen(scene: Scene) -> None:
    """The longest gap in a stream is in the report. The Frontend serves requests, and shows that
    the broker is away."""
    url = scene.blows.pick(FRONTEND).state.status_url
    async with asyncio.TaskGroup() as tasks, httpx.AsyncClient(timeout=5) as http:
        tasks.create_task(_hit("freeze nats-server", freezing(NATS, 10.0, 10.0))(scene))
        await asyncio.sleep(_NOTICED_S)
        ready = (await http.get(f"{url}/ready")).json()
        health = (await http.get(f"{url}/health")).json()
    if not ready["ok"] or "NATS is not connected" not in ready["checks"]["broker"]["detail"]:
        scene.report.trouble.append(f"/ready of the Frontend without NATS: {ready}")
    if health["nats_connected"]:
        scene.report.trouble.append("/health of the Frontend does not show that NATS is away")


OUTAGES = (
    Scenario(
        "decode-killed",
        "one of two decode workers is killed (-9)",
        _hit("kill decode worker", killing(DECODE, again=0.0)),
    ),
    Scenario("router-killed", "the Router is killed (-9)", _router_killed),
    Scenario(
        "etcd-frozen",
        "etcd is stopped for 20 s",
        _hit("freeze etcd", freezing(ETCD, _OUTAGE_S, _OUTAGE_S)),
        calm=True,
    ),
    Scenario(
        "etcd-killed",
        "etcd is killed, and started after 20 s",
        _hit("kill etcd", restarting(ETCD, _OUTAGE_S, _OUTAGE_S)),
        calm=True,
    ),
    Scenario("nats-frozen", "nats-server is stopped for 10 s", _nats_frozen, calm=True),
    Scenario(
        "nats-killed",
        "nats-server is killed and started thrice",
        _hit("kill nats-server", *(restarting(NATS, s, s) for s in (0.0, 1.0, 5.0))),
        calm=True,
    ),
)

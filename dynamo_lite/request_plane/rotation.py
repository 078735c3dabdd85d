"""A Frontend's decode workers: which of them get requests, and which lose theirs."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Members, Roster
from dynamo_lite.runtime.tasks import running

#: How long a worker may be unresponsive before its requests migrate.
MIGRATE_AFTER_S = 10.0
_LOOK_S = 0.2
_SEE_LOGS = "see `dynamo-lite ps` and their logs"


@dataclass(frozen=True)
class WorkerCheck:
    """At most one of the two texts is not empty."""

    #: Why no request can be answered; empty if some worker can be reached.
    trouble: str = ""
    #: How requests are served without NATS; empty while NATS is connected, or if none are served.
    without_broker: str = ""


def check_workers(
    roster: Roster, health: HealthMonitor, transport: RemoteGenerateClient
) -> WorkerCheck:
    """Whether requests can be sent to a decode worker, for `/ready`.

    With NATS, heartbeats show which workers respond. Without it, an open TCP connection does,
    because the connection of a process that has ended is broken. transport: connects to the
    members of `roster`.
    """
    workers = len(roster.members)
    if not workers:
        return WorkerCheck(
            trouble="no decode worker is registered: start one, or wait until it has loaded its"
            " model"
        )
    if health.receives_heartbeats:
        if health.responsive:
            return WorkerCheck()
        return WorkerCheck(trouble=f"none of {workers} decode workers is responsive: {_SEE_LOGS}")
    connected = sum(
        transport.is_connected(member) and not health.is_known_unwell(member.lease_id)
        for member in candidates(roster, health)
    )
    if connected:
        return WorkerCheck(
            without_broker=f"Requests are still served: {connected} of {workers} decode workers are"
            " connected by TCP. Without heartbeats a worker that does not respond is not noticed."
        )
    return WorkerCheck(
        trouble=f"there are no heartbeats without NATS, and none of {workers} decode workers is"
        f" connected: {_SEE_LOGS}"
    )


def candidates(roster: Roster, health: HealthMonitor) -> Members:
    """The workers that respond; if there are none, all."""
    return health.responsive or roster.members


async def rotate(
    stack: AsyncExitStack,
    roster: Roster,
    health: HealthMonitor,
    transport: RemoteGenerateClient,
    changed: Callable[[Members], None],
) -> None:
    """Updates which workers get requests, and which ones lose theirs, until `stack` is closed.

    An unresponsive worker gets no new requests while another one is responsive. Its running
    requests wait for `MIGRATE_AFTER_S`, because a migration computes the prompt again. While no
    worker is responsive they stay.

    changed: takes the workers for new requests, now and when they change.
    """

    def migrate_overdue() -> None:
        if not health.responsive:
            return
        for member in roster.members:
            why = health.trouble(member.lease_id)
            overdue = health.silent_for(member.lease_id) >= MIGRATE_AFTER_S
            if why and overdue and transport.is_connected(member):
                transport.drop(member, why)

    def on_roster(*_: object) -> None:
        transport.retain(roster.members)
        changed(candidates(roster, health))

    def on_health(*_: object) -> None:
        changed(candidates(roster, health))
        migrate_overdue()

    async def look() -> None:
        while True:
            migrate_overdue()
            await asyncio.sleep(_LOOK_S)

    on_roster()
    stack.enter_context(roster.on_change(on_roster))
    stack.enter_context(health.on_change(on_health))
    await stack.enter_async_context(running(look(), name="rotation"))

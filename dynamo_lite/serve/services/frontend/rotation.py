"""Which workers get requests, and which ones lose theirs.

An unresponsive worker gets no new requests while another one is responsive
(`HealthMonitor.members_or_all`). Its running requests wait for `MIGRATE_AFTER_S`, because
a migration computes the prompt again. While no worker is responsive they stay.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.tasks import running

#: How long a worker may be unresponsive before its requests migrate.
MIGRATE_AFTER_S = 10.0
_LOOK_S = 0.2


async def rotate(
    stack: AsyncExitStack,
    roster: Roster,
    health: HealthMonitor,
    transport: RemoteGenerateClient,
    changed: Callable[[], None],
) -> None:
    """Updates the transport's workers from the roster and their health, until `stack` is closed.

    changed: called when the set of workers for new requests changes.
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
        changed()

    def on_health(*_: object) -> None:
        changed()
        migrate_overdue()

    async def look() -> None:
        while True:
            migrate_overdue()
            await asyncio.sleep(_LOOK_S)

    transport.retain(roster.members)
    stack.enter_context(roster.on_change(on_roster))
    stack.enter_context(health.on_change(on_health))
    await stack.enter_async_context(running(look(), name="rotation"))

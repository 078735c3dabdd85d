"""Whether a Frontend can send requests to a decode worker, for `/ready`.

With NATS, heartbeats show which workers respond. Without it, an open TCP connection does, because
the connection of a process that has ended is broken.
"""

from dataclasses import dataclass

from dynamo_lite.request_plane.base import GenerateClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster

_SEE_LOGS = "see `dynamo-lite ps` and their logs"


@dataclass(frozen=True)
class WorkerCheck:
    """At most one of the two texts is not empty."""

    #: Why no request can be answered; empty if some worker can be reached.
    trouble: str = ""
    #: How requests are served without NATS; empty while NATS is connected, or if none are served.
    without_broker: str = ""


NONE_REGISTERED = WorkerCheck(
    trouble="no decode worker is registered: start one, or wait until it has loaded its model"
)


def check_workers(roster: Roster, health: HealthMonitor, transport: GenerateClient) -> WorkerCheck:
    """transport: connects to the members of `roster`."""
    workers = len(roster.members)
    if not workers:
        return NONE_REGISTERED
    if health.receives_heartbeats:
        if health.responsive:
            return WorkerCheck()
        return WorkerCheck(trouble=f"none of {workers} decode workers is responsive: {_SEE_LOGS}")
    connected = sum(
        transport.is_connected(member) and not health.is_known_unwell(member.lease_id)
        for member in health.members_or_all
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

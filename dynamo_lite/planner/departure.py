"""A worker whose lease was revoked, until it is safe to kill (`planner/policy/drain.py`)."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from dynamo_lite.planner.connector import ROLES
from dynamo_lite.planner.drains import Facts, in_flight, listens, look
from dynamo_lite.planner.policy.drain import Leaving, Safe, Unsafe, safe, written_s
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.planner import LeavingWorker
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.runtime.certificates import Certificates

#: Of a process that does not say.
_GRACE_S, _TTL_S = 30.0, 30.0


class Departure:
    """now: monotonic. lives: whether the process of a record is there. certificates: of who asks,
    if it has any."""

    def __init__(
        self,
        worker: EndpointRecord,
        now: Callable[[], float],
        lives: Callable[[EndpointRecord], Awaitable[bool]] | None = None,
        certificates: Certificates | None = None,
    ):
        self._worker, self._now, self._lives = worker, now, lives or listens
        self._certificates = certificates
        self.began = now()
        role = ROLES.get(worker.component, Role.DECODE)
        #: As it was last observed.
        self.leaving = Leaving(role=role, lease_id=worker.lease_id, listed=True)
        #: Whether it had work after its grace.
        self.overdue = False

    async def look(self, members: Iterable[EndpointRecord]) -> Safe | Unsafe:
        """Asks it and all decode workers. Takes 2 s at most."""
        asked_at, before = self._now(), self.leaving
        members = list(members)
        listed = any(member.lease_id == before.lease_id for member in members)
        seen = await look([*members, self._worker], self._certificates)
        facts = seen.facts.get(before.lease_id, {})
        running = in_flight(facts)
        now = self._now()
        idle_at = (now if before.idle_at is None else before.idle_at) if running == 0 else None
        unlisted_at = now if before.unlisted_at is None else before.unlisted_at
        self.leaving = replace(
            before,
            listed=listed,
            unlisted_at=None if listed else unlisted_at,
            ended=not listed and not facts and not await self._lives(self._worker),
            in_flight=running,
            idle_at=idle_at,
        )
        grace_s, ttl_s = (
            _seconds(facts, "grace_s", _GRACE_S),
            _seconds(facts, "lease_ttl_s", _TTL_S),
        )
        self.overdue |= bool(running) and _seconds(facts, "draining_s", 0.0) > grace_s
        landed_s = written_s(grace_s, ttl_s)
        return safe(self.leaving, seen.writers(asked_at), now=asked_at, landed_s=landed_s)


def worker_of(component: str, leaving: LeavingWorker, namespace: str) -> EndpointRecord:
    """A worker whose own record is gone."""
    return EndpointRecord(
        component=component,
        endpoint="",
        namespace=namespace,
        lease_id=leaving.lease_id,
        transport=EndpointTransport(nats_tcp="left"),
        host=leaving.host,
        status_url=leaving.status_url,
    )


def _seconds(facts: Facts, name: str, otherwise: float) -> float:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else otherwise

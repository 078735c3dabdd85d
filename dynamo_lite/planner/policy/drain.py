"""Which worker is removed, and when a draining worker may be killed.

All times are monotonic seconds of the process that asks.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.records import EndpointRecord


@dataclass(frozen=True, kw_only=True)
class WorkerSeen:
    """A live worker."""

    record: EndpointRecord
    #: See `compose.state_of`.
    state: str
    #: Requests of a decode worker, jobs of a prefill worker; None: not known.
    in_flight: int | None

    @property
    def lease_id(self) -> int:
        return self.record.lease_id

    @property
    def serves(self) -> bool:
        """Whether it can work: it is ready, and its engine is healthy."""
        return self.state == "ready"


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The worker to remove; None: none may be."""

    record: EndpointRecord | None = None
    reason: str


def victim(
    workers: Sequence[WorkerSeen],
    *,
    among: Container[int] | None = None,
    force: bool = False,
) -> Victim:
    """A worker that cannot work, or else the least busy one; of equal ones the youngest.

    workers: all of a role. among: the leases that may be chosen; None: all. force: allow even the
    last worker that can work.
    """
    ranked = sorted(
        (one for one in workers if among is None or one.lease_id in among),
        key=lambda one: (
            *(one.serves, one.in_flight is None, one.in_flight or 0),
            *(-one.record.started_at, one.lease_id),
        ),
    )
    if not ranked:
        return Victim(reason="there is no worker")
    chosen = ranked[0]
    if not force and not any(one.serves for one in workers if one is not chosen):
        return Victim(reason="no other worker of this role could work")
    state = f"{'?' if chosen.in_flight is None else chosen.in_flight} in flight"
    state = state if chosen.serves else "it cannot work now"
    return Victim(record=chosen.record, reason=f"least busy of {len(ranked)}: {state}")


# When it may be killed


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """A worker with a revoked lease, as it was last observed."""

    role: Role
    lease_id: int
    #: When its keys were gone; None while they are in etcd: it is listed.
    unlisted_at: float | None = None
    #: Requests or jobs in flight; None: not known.
    in_flight: int | None = None
    #: When its last request or job had ended; None while there are any, or that is not known.
    idle_at: float | None = None


#: By decode worker: the leases of the writers that its ledger names, and the time of this report;
#: None: it does not report them.
Writers = Mapping[int, tuple[frozenset[int], float] | None]


def written_s(grace_s: float, lease_ttl_s: float) -> float:
    """How long after the end of its lease a prefill worker's last write lands, at most.

    It starts within its grace, or, if the worker is cut off, before its claims have run out, which
    is earlier than a time-to-live. It lands within another one (`disagg/attempts/ledger.py`).
    """
    return max(grace_s, lease_ttl_s) + lease_ttl_s


def danger(leaving: Leaving, writers: Writers, *, now: float, landed_s: float) -> str:
    """What the end of a leaving worker could harm; empty: it may be killed.

    An idle prefill worker may still have a write in flight, and its death does not stop a write
    that the network card has. The owner of the blocks would use them again. So every decode worker
    must have ended its attempts since, or enough time must have passed. A decode worker must itself
    have no attempt, because a late write would go to memory that another process has got.

    landed_s: see `written_s`.
    """
    decodes, idle_at = leaving.role is Role.DECODE, leaving.idle_at
    if leaving.unlisted_at is None:
        return "it is still listed: it may get work"
    if not decodes and now - leaving.unlisted_at > landed_s:
        return ""
    if leaving.in_flight is None or idle_at is None:
        return "it does not report its running work"
    if leaving.in_flight:
        return f"{leaving.in_flight} {'requests' if decodes else 'jobs'} in flight"
    asked = {leaving.lease_id: writers.get(leaving.lease_id)} if decodes else writers
    said = {lease: each[0] for lease, each in asked.items() if each and each[1] >= idle_at}
    if unknown := asked.keys() - said.keys():
        return f"decode workers that have not reported their writers since: {_leases(unknown)}"
    if decodes:
        into = said[leaving.lease_id]
        return f"{len(into)} writers may still write into its blocks" if into else ""
    naming = [lease for lease, each in said.items() if leaving.lease_id in each]
    return f"attempts that it may write: of {_leases(naming)}" if naming else ""


def _leases(leases: Iterable[int]) -> str:
    return ", ".join(f"{lease:x}" for lease in sorted(leases))

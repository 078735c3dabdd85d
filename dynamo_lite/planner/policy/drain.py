"""Which worker is removed, and when a draining worker may be killed.

All times are monotonic seconds of the process that asks.
"""

from collections.abc import Container, Mapping, Sequence
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
    """The worker to remove."""

    record: EndpointRecord
    reason: str


@dataclass(frozen=True, kw_only=True)
class NoVictim:
    """No worker may be removed."""

    reason: str


def victim(
    workers: Sequence[WorkerSeen],
    *,
    among: Container[int] | None = None,
    force: bool = False,
) -> Victim | NoVictim:
    """A worker that cannot work, or else the least busy one; of equal ones the youngest.

    workers: all of a role. among: the leases that may be chosen; None: all. force: allow even the
    last worker that can work.
    """
    ranked = sorted(
        (one for one in workers if among is None or one.lease_id in among),
        key=lambda one: (*_rank(one), -one.record.started_at, one.lease_id),
    )
    if not ranked:
        return NoVictim(reason="there is no worker")
    chosen = ranked[0]
    if not force and not any(one.serves for one in workers if one is not chosen):
        return NoVictim(reason="no other worker of this role could work")
    how = "least busy"
    if len(ranked) > 1 and _rank(ranked[1]) == _rank(chosen):
        how = "youngest of the least busy"
    return Victim(record=chosen.record, reason=f"{how} of {len(ranked)}: {_state(chosen)}")


def _rank(one: WorkerSeen) -> tuple[bool, bool, int]:
    return one.serves, one.in_flight is None, one.in_flight or 0


def _state(one: WorkerSeen) -> str:
    if not one.serves:
        return "it cannot work now"
    return "what it runs is not known" if one.in_flight is None else f"{one.in_flight} in flight"


# When it may be killed


@dataclass(frozen=True, kw_only=True)
class Leaving:
    """A worker with a revoked lease, as it was last observed."""

    role: Role
    lease_id: int
    #: Whether its keys are in etcd.
    listed: bool
    #: When its keys were gone; None while they are in etcd.
    unlisted_at: float | None = None
    #: Whether its process has ended.
    ended: bool = False
    #: Requests or jobs in flight; None: not known.
    in_flight: int | None = None
    #: When its last request or job had ended; None while there are any, or that is not known.
    idle_at: float | None = None


#: By decode worker: the leases of the writers that its ledger names, and the time of this report;
#: None: it does not report them.
Writers = Mapping[int, tuple[frozenset[int], float] | None]


@dataclass(frozen=True, kw_only=True)
class Safe:
    """Its end costs no request and harms no memory that is in use."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Unsafe:
    reason: str


def written_s(grace_s: float, lease_ttl_s: float) -> float:
    """How long after the end of its lease a prefill worker's last write lands, at most.

    It starts within its grace, or, if the worker is cut off, before its claims have run out, which
    is earlier than a time-to-live. It lands within another one (`disagg/attempts/ledger.py`).
    """
    return max(grace_s, lease_ttl_s) + lease_ttl_s


def safe(leaving: Leaving, writers: Writers, *, now: float, landed_s: float) -> Safe | Unsafe:
    """Whether a leaving worker may be killed.

    An idle prefill worker may still have a write in flight, and its death does not stop a write
    that the network card has. The owner of the blocks would use them again. So every decode worker
    must have ended its attempts since, or enough time must have passed. A decode worker must itself
    have no attempt, because a late write would go to memory that another process has got.

    landed_s: see `written_s`.
    """
    if leaving.ended:
        return Safe(reason="its process has ended")
    if leaving.listed:
        return Unsafe(reason="it is still listed: it may get work")
    if leaving.in_flight is None or leaving.idle_at is None:
        return _after_ttl(leaving, now, landed_s, "it does not report its running work")
    if leaving.in_flight:
        what = "requests" if leaving.role is Role.DECODE else "jobs"
        return _after_ttl(leaving, now, landed_s, f"{leaving.in_flight} {what} in flight")
    if leaving.role is Role.DECODE:
        return _own_ledger(writers.get(leaving.lease_id), leaving.idle_at)
    return _all_ledgers(leaving, leaving.idle_at, writers, now, landed_s)


def _own_ledger(said: tuple[frozenset[int], float] | None, idle_at: float) -> Safe | Unsafe:
    if said is None or said[1] < idle_at:
        return Unsafe(reason="its ledger was not reported after it became idle")
    if said[0]:
        return Unsafe(reason=f"{len(said[0])} writers may still write into its blocks")
    return Safe(reason="no request, and no writer")


def _all_ledgers(
    leaving: Leaving, idle_at: float, writers: Writers, now: float, landed_s: float
) -> Safe | Unsafe:
    unknown = [lease for lease, said in writers.items() if said is None or said[1] < idle_at]
    if unknown:
        leases = ", ".join(f"{lease:x}" for lease in sorted(unknown))
        return _after_ttl(
            leaving, now, landed_s, f"decode workers that do not report their writers: {leases}"
        )
    naming = [
        lease for lease, said in writers.items() if said is not None and leaving.lease_id in said[0]
    ]
    if naming:
        leases = ", ".join(f"{lease:x}" for lease in sorted(naming))
        return _after_ttl(leaving, now, landed_s, f"attempts that it may write: of {leases}")
    return Safe(reason="idle, and no decode worker waits for a write of it")


def _after_ttl(leaving: Leaving, now: float, landed_s: float, why: str) -> Safe | Unsafe:
    gone_at = leaving.unlisted_at
    if leaving.role is Role.PREFILL and gone_at is not None and now - gone_at > landed_s:
        return Safe(reason=f"its lease is gone for {landed_s:g} s: none of its writes can land")
    return Unsafe(reason=why)

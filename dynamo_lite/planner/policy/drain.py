"""Which worker is removed, and when a draining worker may be killed."""

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

#: By decode worker: the leases of the writers that its ledger names, and the time of this report;
#: None: it does not report them.
Writers = Mapping[int, tuple[frozenset[int], float] | None]


def danger(
    role: Role,
    lease_id: int,
    writers: Writers,
    *,
    listed: bool,
    in_flight: int | None,
    idle_at: float,
) -> str:
    """What the end of a worker with a revoked lease could harm; empty: it may be killed.

    An idle prefill worker may still have a write in flight, and its death does not stop a write
    that the network card has. The owner of the blocks would use them again. So every decode worker
    must have ended its attempts since. A decode worker must itself have no attempt, because a late
    write would go to memory that another process has got.

    listed: whether its keys are in etcd. in_flight: its requests or jobs; None: not known. idle_at:
    when the last of them had ended, in monotonic seconds of this process.
    """
    decodes = role is Role.DECODE
    if listed:
        return "it is still listed: it may get work"
    if in_flight is None:
        return "it does not report its running work"
    if in_flight:
        return f"{in_flight} {'requests' if decodes else 'jobs'} in flight"
    asked = {lease_id: writers.get(lease_id)} if decodes else writers
    said = {lease: each[0] for lease, each in asked.items() if each and each[1] >= idle_at}
    if unknown := asked.keys() - said.keys():
        return f"decode workers that have not reported their writers since: {_leases(unknown)}"
    if decodes:
        into = said[lease_id]
        return f"{len(into)} writers may still write into its blocks" if into else ""
    naming = [lease for lease, each in said.items() if lease_id in each]
    return f"attempts that it may write: of {_leases(naming)}" if naming else ""


def _leases(leases: Iterable[int]) -> str:
    return ", ".join(f"{lease:x}" for lease in sorted(leases))

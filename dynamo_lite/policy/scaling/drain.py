"""Which worker is the cheapest to remove, and when a draining worker may be killed.

Costs are seconds of computing. All times are monotonic seconds of the process that asks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dynamo_lite.policy.scaling.inputs import Role


@dataclass(frozen=True, kw_only=True)
class DrainCandidate:
    """A worker that may be removed."""

    lease_id: int
    #: Seconds until its requests are finished, or moved where that is cheaper; None: not known.
    busy_s: float | None
    #: Seconds to compute again what its prefix cache would have saved.
    cache_s: float = 0.0
    #: Devices that its removal frees.
    devices: int = 1
    #: Whether it can work: it is ready, and its engine is healthy.
    serves: bool = True
    #: Seconds since the epoch.
    started_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RemovalCost:
    """What a removal costs, per device that it frees."""

    total_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The worker to remove."""

    lease_id: int
    cost: RemovalCost
    reason: str


@dataclass(frozen=True, kw_only=True)
class NoVictim:
    """No worker may be removed."""

    reason: str


def cost(candidate: DrainCandidate) -> RemovalCost:
    """`(busy + cache) / devices`; 0 for a worker that cannot work, infinite if not known."""
    if not candidate.serves:
        return RemovalCost(total_s=0.0, reason="it cannot work now")
    if candidate.busy_s is None:
        return RemovalCost(total_s=math.inf, reason="what it runs is not known")
    total_s = (candidate.busy_s + candidate.cache_s) / max(candidate.devices, 1)
    parts = f"running {candidate.busy_s:.2f} s, cache {candidate.cache_s:.2f} s"
    return RemovalCost(total_s=total_s, reason=f"{parts}, devices {candidate.devices}")


def victim(candidates: Sequence[DrainCandidate], *, force: bool = False) -> Victim | NoVictim:
    """A worker that cannot work, or else the cheapest worker of a role; of equal ones the
    youngest.

    force: allow even the last worker that can work.
    """
    if not candidates:
        return NoVictim(reason="there is no worker")
    ranked = sorted(
        candidates,
        key=lambda one: (one.serves, cost(one).total_s, -one.started_at, one.lease_id),
    )
    chosen = ranked[0]
    if not force and not any(one.serves for one in ranked[1:]):
        return NoVictim(reason="no other worker of this role could work")
    how = "cheapest"
    if len(ranked) > 1 and cost(ranked[1]).total_s == cost(chosen).total_s:
        how = "youngest of the cheapest"
    return Victim(lease_id=chosen.lease_id, cost=cost(chosen), reason=f"{how} of {len(ranked)}")


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

    It starts within its grace, or, if the worker is cut off, within the lease's time-to-live. It
    lands within another one, as in `writer_deadlines.py`.
    """
    return max(grace_s, lease_ttl_s) + lease_ttl_s


def safe(leaving: Leaving, writers: Writers, *, now: float, fence_s: float) -> Safe | Unsafe:
    """Whether a leaving worker may be killed.

    An idle prefill worker may still have a write in flight, and its death does not stop a write
    that the network card has. The owner of the blocks would use them again. So every decode worker
    must have ended its attempts since, or the fence must have closed. A decode worker must itself
    have no attempt, because a late write would go to memory that another process has got.

    fence_s: see `written_s`.
    """
    if leaving.ended:
        return Safe(reason="its process has ended")
    if leaving.listed:
        return Unsafe(reason="it is still listed: it may get work")
    if leaving.in_flight is None or leaving.idle_at is None:
        return _after_ttl(leaving, now, fence_s, "it does not report its running work")
    if leaving.in_flight:
        what = "requests" if leaving.role is Role.DECODE else "jobs"
        return _after_ttl(leaving, now, fence_s, f"{leaving.in_flight} {what} in flight")
    if leaving.role is Role.DECODE:
        return _own_ledger(writers.get(leaving.lease_id), leaving.idle_at)
    return _all_ledgers(leaving, leaving.idle_at, writers, now, fence_s)


def _own_ledger(said: tuple[frozenset[int], float] | None, idle_at: float) -> Safe | Unsafe:
    if said is None or said[1] < idle_at:
        return Unsafe(reason="its ledger was not reported after it became idle")
    if said[0]:
        return Unsafe(reason=f"{len(said[0])} writers may still write into its blocks")
    return Safe(reason="no request, and no writer")


def _all_ledgers(
    leaving: Leaving, idle_at: float, writers: Writers, now: float, fence_s: float
) -> Safe | Unsafe:
    unknown = [lease for lease, said in writers.items() if said is None or said[1] < idle_at]
    if unknown:
        leases = ", ".join(f"{lease:x}" for lease in sorted(unknown))
        return _after_ttl(
            leaving, now, fence_s, f"decode workers that do not report their writers: {leases}"
        )
    naming = [
        lease for lease, said in writers.items() if said is not None and leaving.lease_id in said[0]
    ]
    if naming:
        leases = ", ".join(f"{lease:x}" for lease in sorted(naming))
        return _after_ttl(leaving, now, fence_s, f"attempts that it may write: of {leases}")
    return Safe(reason="idle, and no decode worker waits for a write of it")


def _after_ttl(leaving: Leaving, now: float, fence_s: float, why: str) -> Safe | Unsafe:
    gone_at = leaving.unlisted_at
    if leaving.role is Role.PREFILL and gone_at is not None and now - gone_at > fence_s:
        return Safe(reason=f"its lease is gone for {fence_s:g} s: its fence has closed")
    return Unsafe(reason=why)


# Which requests of a draining decode worker move


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of the requests so far; None: not measured."""

    #: Seconds between two tokens of a request.
    token_s: float | None = None
    #: Uncached prompt tokens per second, from the submission to the first token,
    prefill_tokens_per_s: float | None = None
    #: and the seconds of that time that do not depend on their number.
    prefill_fixed_s: float = 0.0
    #: Length, in tokens, that nine of ten answers do not exceed.
    output_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunningRequest:
    """A request of a decode worker."""

    prompt_tokens: int
    #: Tokens generated so far.
    output_tokens: int
    #: How many tokens it may generate in all; None: no limit.
    limit_tokens: int | None
    #: See `policy/routing/migration.py`; "fresh": no token was sent.
    how: Literal["fresh", "continue", "replay", "stay"]
    #: Seconds between its own tokens; None: not measured.
    token_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Move:
    """Another worker is to continue it. saves_s: instead of waiting for its end."""

    cost_s: float
    saves_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Its worker finishes it, in about `cost_s`; None: not known."""

    cost_s: float | None
    reason: str


def move_or_finish(running: RunningRequest, pace: Pace) -> Move | Finish:
    """Moves a request if that takes less time than its end would.

    A move computes prompt and output again; a replay also generates the output again.
    """
    token_s = running.token_s if running.token_s is not None else pace.token_s
    left = _left_tokens(running, pace)
    if token_s is None or left is None:
        return Finish(cost_s=None, reason="its length is not known")
    finish_s = left * token_s
    if running.how == "stay":
        return Finish(cost_s=finish_s, reason="it cannot move")
    if not pace.prefill_tokens_per_s:
        return Finish(cost_s=finish_s, reason="the cost of a prefill is not known")
    replays = running.how == "replay"
    tokens = running.prompt_tokens + (0 if replays else running.output_tokens)
    move_s = pace.prefill_fixed_s + tokens / pace.prefill_tokens_per_s
    move_s += running.output_tokens * token_s if replays else 0.0
    if move_s < finish_s:
        why = f"{move_s:.2f} s to move, {finish_s:.2f} s to finish"
        return Move(cost_s=move_s, saves_s=finish_s - move_s, reason=why)
    return Finish(cost_s=finish_s, reason="it ends sooner than it moves")


def _left_tokens(running: RunningRequest, pace: Pace) -> int | None:
    """The usual length is that of whole answers. An answer that is already as long may
    continue."""
    limits = [] if pace.output_tokens is None else [pace.output_tokens]
    if running.limit_tokens is not None:
        limits.append(max(running.limit_tokens - running.output_tokens, 0))
    return min(limits, default=None)


def busy_s(running: Iterable[RunningRequest], pace: Pace) -> float | None:
    """Seconds until all these requests are finished or moved, one after the other; None: not
    known."""
    total = 0.0
    for one in running:
        found = move_or_finish(one, pace).cost_s
        if found is None:
            return None
        total += found
    return total

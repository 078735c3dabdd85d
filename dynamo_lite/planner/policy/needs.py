"""How many workers of a role a load needs. Pure.

So many stay below the share of their capacity that the options allow. Where the arrivals are known,
workers are added only while there are fewer than `sure`, which are needed even if the true load is
lower than measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_lite.planner.policy.inputs import DecodeLoad, PrefillLoad
from dynamo_lite.planner.policy.work import Work
from dynamo_lite.protocol.options import PlannerOptions

#: A backlog is to be gone after the time of a start, but no faster than this.
_SHORTEST_DRAIN_S = 10.0
#: What is left after a start is to be gone in so long at least.
_SHORTEST_QUEUE_S = 60.0
#: See `_prefill_workers`.
_SPARE = 0.5


@dataclass(frozen=True)
class Need:
    """Workers of one role; None: not known."""

    workers: int | None
    #: What they are needed for, as a sentence part.
    reason: str
    #: Whether no part of the load is unknown: else no worker is removed.
    complete: bool = True
    #: Workers are added only while there are fewer than this; None: than `workers`.
    sure: int | None = None

    def wanted(self, count: int) -> int | None:
        """`workers`, but not more than the present `count` if these could be enough."""
        if self.workers is None or self.sure is None or self.sure > count:
            return self.workers
        return min(self.workers, count)


def prefill_need(
    load: PrefillLoad,
    limits: PlannerOptions,
    *,
    count: int,
    rate: float | None,
    work: Work,
) -> Need:
    """While the arrivals are known: `max(tokens/s / (share * rate), b + 0.5 sqrt(b))`, b: busy
    workers. tokens/s contains what `_late` leaves of the backlog. While they are not known:
    `(tokens/s + backlog / T) / (share * rate)`, T: the time of a start, at least 10 s. Rounded up.

    count: prefill workers now. rate: tokens per second of one busy worker; None: never measured.
    work: what requests need.
    """
    start_s, backlog = limits.start_s, load.backlog
    known = load.arriving_per_s is not None and backlog is not None
    arriving = (load.asked_per_s or 0.0) + (load.refused_per_s or 0.0)
    each, spare, doubt = work.prefill_tokens, 0.0, 0.0
    if work.per_s is not None and each is not None:
        arriving, spare = work.per_s * each, _SPARE
        doubt = work.doubt * each
    if work.per_s is not None and rate:
        extra = _late(backlog or 0.0, count * rate - arriving, start_s)
    else:
        extra = (backlog or 0.0) / max(start_s, _SHORTEST_DRAIN_S)
    demand = arriving + extra
    if not demand:
        return Need(0, "no long prompts") if known else _unknown("load unknown")
    if not rate:
        if load.refused_per_s:
            reason = "prompts find no room, and no rate is measured yet"
            return Need(count + 1, reason, complete=False)
        return _unknown("no rate of a prefill worker is measured yet")
    reason = f"{demand:.0f} tokens/s at {rate:.0f} for each worker"
    up = _prefill_workers(demand / rate, limits.prefill_up_share, spare)
    sure = _prefill_workers(max(demand - doubt, 0.0) / rate, limits.prefill_up_share, spare)
    return Need(up, reason, known, sure)


def _prefill_workers(busy: float, share: float, spare: float) -> int:
    """For a load that keeps `busy` of them busy on average.

    At few workers prompts wait longer, at the same share: so at least `busy + spare sqrt(busy)`, as
    in Halfin and Whitt, "Heavy-traffic limits for queues with many exponential servers" (1981).
    """
    return max(_ceil(busy / share), _ceil(busy + spare * math.sqrt(busy)))


def _late(waiting: float, spare_per_s: float, start_s: float) -> float:
    """What waits, as a rate: only what the present workers leave until a new one could be there."""
    left = waiting - max(spare_per_s, 0.0) * start_s
    return max(left, 0.0) / max(start_s, _SHORTEST_QUEUE_S)


def decode_need(load: DecodeLoad, limits: PlannerOptions, *, count: int, work: Work) -> Need:
    """The most that tokens and running requests need; while the tokens of the arrivals are not
    known, the most that KV blocks, and requests that run or wait, need.

    count: decode workers now. work: what requests need.
    """
    if rate := _rate_need(load, limits, work, count):
        return _most([rate, _sequence_need(load, limits, load.running)])
    requests = load.running
    if requests is not None:
        requests = None if load.waiting is None else requests + load.waiting
    return _most([_kv_need(load, limits), _sequence_need(load, limits, requests)])


def _rate_need(load: DecodeLoad, limits: PlannerOptions, work: Work, count: int) -> Need | None:
    """`N = ceil(tokens/s / (share * tokens/s of one worker))`, with the requests that wait; None:
    not known."""
    each = work.output_tokens
    one = work.tokens_of_one(load.max_running)
    queued = load.queued
    if work.per_s is None or each is None or one is None or queued is None:
        return None
    late = _late(queued, count * one / each - work.per_s, limits.start_s)
    demand = (work.per_s + late) * each
    share = limits.decode_up_share * one
    reason = f"{demand:.0f} output tokens/s at {one:.0f} for each worker"
    sure = _ceil(max(demand - work.doubt * each, 0.0) / share)
    return Need(_ceil(demand / share), reason, sure=sure)


def _kv_need(load: DecodeLoad, limits: PlannerOptions) -> Need:
    used, waiting = load.kv_used, load.kv_waiting
    if used is None:
        return _unknown("KV use unknown")
    wanted = used + (waiting or 0.0)
    workers = _ceil(wanted / limits.decode_up_share)
    return Need(workers, f"KV of {wanted:.2f} workers", waiting is not None)


def _sequence_need(load: DecodeLoad, limits: PlannerOptions, requests: float | None) -> Need:
    if requests is None:
        return _unknown("requests unknown")
    if not load.max_running:
        # Without the limit the KV blocks alone tell.
        return Need(0, "limit of requests unknown")
    workers = _ceil(requests / load.max_running / limits.decode_up_share)
    return Need(workers, f"{requests:.0f} requests at {load.max_running} for each worker")


def _most(parts: Sequence[Need]) -> Need:
    """The most that is known; complete only if every part is."""
    known = [(part.workers, part) for part in parts if part.workers is not None]
    if not known:
        return parts[0]
    workers, top = max(known, key=lambda one: one[0])
    sure = max(most if part.sure is None else part.sure for most, part in known)
    return Need(workers, top.reason, all(part.complete for part in parts), sure)


def _unknown(reason: str) -> Need:
    return Need(None, reason, complete=False)


def _ceil(value: float) -> int:
    # A share of exactly one worker is one worker, whatever the last bit says.
    return math.ceil(min(value, 1e9) - 1e-9)

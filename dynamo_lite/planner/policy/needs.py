"""How many workers of a role a load needs. Pure.

`up` workers stay below the share at which more are added, `down` ones below the lower share at
which one may be removed. Between both nothing changes. Where the arrivals are known, the distance
between both also covers chance: `sure` workers are needed even if the true load is lower than
measured, and workers are added only while there are fewer; `down` workers are enough even if the
true load is higher than measured.
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
#: A worker is removed if the others stay below this part of the share above which one is added.
_DOWN = 15 / 16


@dataclass(frozen=True)
class Need:
    """Workers of one role; None: not known."""

    up: int | None
    down: int | None
    #: What they are needed for, as a sentence part.
    reason: str
    #: Workers are added only while there are fewer than this; None: than `up`.
    sure: int | None = None

    def wanted(self, count: int) -> int | None:
        """`up`, but not more than the present `count` if these could be enough."""
        if self.up is None or self.sure is None or self.sure > count:
            return self.up
        return min(self.up, count)


def down_share(limits: PlannerOptions) -> float:
    """Below this share, with one worker less, a worker is removed."""
    return _DOWN * min(limits.prefill_up_share, limits.decode_up_share)


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
    each, spare, doubt = work.prefill_tokens.value, 0.0, 0.0
    if work.per_s is not None and each is not None:
        arriving, spare = work.per_s * each * work.growth(start_s), _SPARE
        doubt = work.doubt * each
    if work.per_s is not None and rate:
        extra = _late(backlog or 0.0, count * rate - arriving, start_s)
    else:
        extra = (backlog or 0.0) / max(start_s, _SHORTEST_DRAIN_S)
    demand = arriving + extra
    if not demand:
        return Need(0, 0, "no long prompts") if known else Need(None, None, "load unknown")
    if not rate:
        if load.refused_per_s:
            return Need(count + 1, None, "prompts find no room, and no rate is measured yet")
        return Need(None, None, "no rate of a prefill worker is measured yet")
    reason = f"{demand:.0f} tokens/s at {rate:.0f} for each worker"
    up = _prefill_workers(demand / rate, limits.prefill_up_share, spare)
    sure = _prefill_workers(max(demand - doubt, 0.0) / rate, limits.prefill_up_share, spare)
    down = _prefill_workers((demand + doubt) / rate, down_share(limits), spare) if known else None
    return Need(up, down, reason, sure)


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
    each = work.output_tokens.value
    one = work.tokens_of_one(load.max_running)
    queued = load.queued
    if work.per_s is None or each is None or one is None or queued is None:
        return None
    start_s = limits.start_s
    arriving = work.per_s * work.growth(start_s)
    demand = (arriving + _late(queued, count * one / each - arriving, start_s)) * each
    share = limits.decode_up_share * one
    return Need(
        _ceil(demand / share),
        _ceil((demand + work.doubt * each) / (down_share(limits) * one)),
        f"{demand:.0f} output tokens/s at {one:.0f} for each worker",
        _ceil(max(demand - work.doubt * each, 0.0) / share),
    )


def _kv_need(load: DecodeLoad, limits: PlannerOptions) -> Need:
    used, waiting = load.kv_used, load.kv_waiting
    if used is None:
        return Need(None, None, "KV use unknown")
    wanted = used + (waiting or 0.0)
    down = _ceil(wanted / down_share(limits)) if waiting is not None else None
    return Need(_ceil(wanted / limits.decode_up_share), down, f"KV of {wanted:.2f} workers")


def _sequence_need(load: DecodeLoad, limits: PlannerOptions, requests: float | None) -> Need:
    if requests is None:
        return Need(None, None, "requests unknown")
    if not load.max_running:
        # Without the limit the KV blocks alone tell.
        return Need(0, 0, "limit of requests unknown")
    share = requests / load.max_running
    return Need(
        _ceil(share / limits.decode_up_share),
        _ceil(share / down_share(limits)),
        f"{requests:.0f} requests at {load.max_running} for each worker",
    )


def _most(parts: Sequence[Need]) -> Need:
    """`up`: the most that is known. `down`: known only if every part is."""
    known = [part for part in parts if part.up is not None]
    if not known:
        return Need(None, None, parts[0].reason)
    top = max(known, key=lambda part: part.up or 0)
    downs = [part.down for part in parts]
    down = None if None in downs else max(d for d in downs if d is not None)
    sure = max(part.up or 0 if part.sure is None else part.sure for part in known)
    return Need(top.up, down, top.reason, sure)


def _ceil(value: float) -> int:
    # A share of exactly one worker is one worker, whatever the last bit says.
    return math.ceil(min(value, 1e9) - 1e-9)

"""What the planner sees of the load: metrics as the load of each role.

What a worker does not report is unknown and not 0: sums are then only what is needed at least, and
something beside them is left out, so that no worker is removed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynamo_lite.planner.policy.inputs import DecodeLoad, PrefillLoad, Role
from dynamo_lite.runtime.overview import compose
from dynamo_lite.runtime.overview.metrics import CounterHistory, Samples, total
from dynamo_lite.runtime.overview.model import LiveProcess, Overview
from dynamo_lite.runtime.overview.observer import Observer

#: Every prompt has one of them once it has KV blocks.
_VERDICTS = ("local", "remote")
#: Windows of the rates of demand, and of the rate of a prefill worker.
_DEMAND_S, _RATE_S = 15.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One look."""

    prefill: PrefillLoad
    decode: DecodeLoad
    #: The live workers of each role.
    workers: Mapping[Role, Sequence[LiveProcess]]

    def serving(self, role: Role) -> set[int]:
        """Leases of those that are not leaving."""
        states = ("ready", "unwell", "unfit")
        return {int(one.lease, 16) for one in self.workers[role] if one.state in states}


class Observation:
    """now: monotonic."""

    def __init__(self, observer: Observer, now: Callable[[], float]):
        self._observer, self._now = observer, now
        self._history = CounterHistory(_RATE_S)

    async def look(self) -> Observed:
        """The load now. Takes as long as the slowest process needs to respond, 1 s at most."""
        seen = await self._observer.look()
        workers = {role: tuple(w for w in seen.workers if w.component == role) for role in Role}
        pages = {
            worker.lease: page
            for worker in (*workers[Role.PREFILL], *workers[Role.DECODE])
            if (page := self._observer.pages.get(str(int(worker.lease, 16)))) is not None
        }
        # What a process counted while it did not respond belongs to no period: start again.
        self._history.add(self._now(), pages)
        decode = [(worker, pages.get(worker.lease)) for worker in workers[Role.DECODE]]
        return Observed(
            prefill=self._prefill([page for _, page in decode]),
            decode=_decode(decode, seen),
            workers=workers,
        )

    def _prefill(self, decode: Sequence[Samples | None]) -> PrefillLoad:
        """Demand is known if every decode worker has told of it. decode: their pages."""
        seconds, lately = self._history.window(_DEMAND_S)
        _, longer = self._history.window(_RATE_S)
        written, busy_s = total(longer, compose.WRITTEN_TOKENS), total(longer, compose.BUSY_S)
        rate = written / busy_s if written and busy_s else None
        told = [page for page in decode if page is not None and (compose.ASKED, ()) in page]
        if not told:
            self._history = CounterHistory(_RATE_S)  # time without news is no time without load
            return PrefillLoad(rate=rate)
        backlog = _sum(told, compose.OUTSTANDING_TOKENS)
        if not seconds:
            return PrefillLoad(backlog=backlog, rate=rate)
        asked, refused = total(lately, compose.ASKED), total(lately, compose.OVERFLOW)
        per_s = {"asked_per_s": asked / seconds, "refused_per_s": refused / seconds}
        if len(told) < len(decode):
            per_s = {"asked_per_s": (asked + refused) / seconds}
        return PrefillLoad(backlog=backlog, rate=rate, **per_s)


def _decode(decode: Sequence[tuple[LiveProcess, Samples | None]], seen: Overview) -> DecodeLoad:
    """decode: the workers with their pages."""
    admitted = [one.per_s for one in seen.decisions if one.verdict in _VERDICTS]
    pages = [page for _, page in decode if page is not None]
    remote = None
    # A page without this metric is that of a worker without remote prefills.
    if all(page is not None or worker.waiting is None for worker, page in decode):
        remote = round(_sum(pages, compose.OUTSTANDING_JOBS))
    return replace(
        decode_load([worker for worker, _ in decode], remote),
        admitted_per_s=sum(admitted) if seen.rate_s else None,
        tokens_per_s=seen.tokens.per_s if seen.rate_s else None,
        token_s=seen.tokens.mean_s,
    )


def decode_load(workers: Sequence[LiveProcess], remote: int | None) -> DecodeLoad:
    """Without rates. remote: requests that wait for a remote prefill; None: not known."""
    known = [w for w in workers if w.running is not None and w.waiting is not None]
    if not known:
        return DecodeLoad()
    running = sum(w.running or 0 for w in known)
    waiting = sum(w.waiting or 0 for w in known)
    usages = [w.kv_usage for w in known if w.kv_usage is not None]
    used = sum(usages)
    # Those that wait for a remote prefill hold their blocks already.
    without_blocks = max(waiting - (remote or 0), 0)
    waiting_known = remote is not None or not waiting
    each = used / running if running else 0.0
    complete = len(known) == len(workers)
    return DecodeLoad(
        kv_used=used if usages else None,
        kv_waiting=(
            each * without_blocks if waiting_known and len(usages) == len(workers) else None
        ),
        running=running,
        waiting=waiting if complete else None,
        queued=without_blocks if waiting_known and complete else None,
        max_running=min((w.max_running for w in workers if w.max_running), default=None),
    )


def _sum(pages: Sequence[Samples], gauge: str) -> float:
    return sum(page.get((gauge, ()), 0.0) for page in pages)

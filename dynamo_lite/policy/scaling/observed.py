"""Loads for the planner, made of what workers and decode engines report. Pure.

What a worker does not report is unknown and not 0: the sums are then only what is needed at least,
and something beside them is left out, so that no worker is removed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.policy.decision.backlog import BacklogTotals
from dynamo_lite.policy.scaling.inputs import DecodeLoad, PrefillLoad

#: Window of the rates of demand.
_RATE_S = 15.0


class ReportsLoad(Protocol):
    """A decode worker. None: it does not say."""

    @property
    def running(self) -> int | None: ...
    @property
    def waiting(self) -> int | None:
        """Requests, also those that wait for a remote prefill."""
        ...

    @property
    def kv_usage(self) -> float | None: ...
    @property
    def kv_tokens(self) -> int | None:
        """That its KV blocks hold."""
        ...

    @property
    def max_running(self) -> int | None:
        """Requests that it runs at a time, at most."""
        ...


class DemandRates:
    """Rates of the demand for prefill workers, from counters that never decrease."""

    def __init__(self) -> None:
        #: (time, tokens asked for, tokens that found no room), of all engines.
        self._demand: deque[tuple[float, int, int]] = deque()

    def forget(self) -> None:
        """The counters were not heard for a while."""
        self._demand.clear()

    def load(
        self, totals: BacklogTotals, rate: float | None, now: float, *, complete: bool
    ) -> PrefillLoad:
        """With one reading more. rate: tokens per second of a busy prefill worker. complete:
        whether every decode engine is in the totals."""
        self._demand.append((now, totals.asked_tokens, totals.overflow_tokens))
        while now - self._demand[0][0] > _RATE_S and len(self._demand) > 2:
            self._demand.popleft()
        began, asked, refused = self._demand[0]
        backlog = totals.tokens
        if now <= began:
            return PrefillLoad(backlog=backlog, rate=rate)
        asked_per_s = (totals.asked_tokens - asked) / (now - began)
        refused_per_s = (totals.overflow_tokens - refused) / (now - began)
        if not complete:
            both = asked_per_s + refused_per_s
            return PrefillLoad(asked_per_s=both, backlog=backlog, rate=rate)
        return PrefillLoad(
            asked_per_s=asked_per_s,
            refused_per_s=refused_per_s,
            backlog=backlog,
            rate=rate,
        )


@dataclass(frozen=True, kw_only=True)
class TokenRates:
    """Of all decode workers together, over the last seconds; None: not known."""

    #: Requests that got KV blocks, per second.
    admitted_per_s: float | None
    #: Output tokens per second, and the mean time between two of a request.
    tokens_per_s: float | None
    token_s: float | None


def decode_load(
    workers: Sequence[ReportsLoad], totals: BacklogTotals | None, rates: TokenRates
) -> DecodeLoad:
    """totals: of all decode engines; None: not known, and so not how many requests wait for a
    remote prefill."""
    known = [
        (w, w.running, w.waiting)
        for w in workers
        if w.running is not None and w.waiting is not None
    ]
    if not known:
        return DecodeLoad()
    running = sum(running for _, running, _ in known)
    waiting = sum(waiting for _, _, waiting in known)
    usages = [w.kv_usage for w, _, _ in known if w.kv_usage is not None]
    used = sum(usages)
    sizes = [w.kv_tokens for w in workers if w.kv_tokens]
    backlog = totals or BacklogTotals()
    parked = backlog.tokens * len(sizes) / sum(sizes) if sizes else 0.0
    # Those that wait for a remote prefill hold their blocks already.
    without_blocks = max(waiting - backlog.jobs, 0)
    waiting_known = totals is not None or not waiting
    each = used / running if running else 0.0
    complete = len(known) == len(workers)
    return DecodeLoad(
        kv_used=used if usages else None,
        kv_parked=None if totals is None else min(parked, used),
        kv_waiting=(
            each * without_blocks if waiting_known and len(usages) == len(workers) else None
        ),
        running=running,
        waiting=waiting if complete else None,
        queued=without_blocks if waiting_known and complete else None,
        admitted_per_s=rates.admitted_per_s,
        tokens_per_s=rates.tokens_per_s,
        token_s=rates.token_s,
        max_running=min((w.max_running for w in workers if w.max_running), default=None),
    )

"""What the planner sees of the load: metrics and backlog as the load of each role.

The sums and rates are made in `policy/scaling/observed.py`.
"""

import asyncio
from collections.abc import Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from dynamo_lite.overview.model import LiveProcess, Overview
from dynamo_lite.overview.observer import Observer
from dynamo_lite.policy.decision.backlog import DrainRate
from dynamo_lite.policy.scaling.inputs import DecodeLoad, PrefillLoad, Role
from dynamo_lite.policy.scaling.observed import DemandRates, TokenRates, decode_load
from dynamo_lite.protocol.backlog import Backlog
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.members.backlog import BacklogFollower
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.services.planner.connector import COMPONENTS

#: Every prompt has one of them once it has KV blocks.
_VERDICTS = ("local", "remote")


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One look."""

    prefill: PrefillLoad
    decode: DecodeLoad
    #: The live workers of each role.
    workers: Mapping[Role, Sequence[LiveProcess]]

    def serving(self, role: Role, without: Set[int]) -> int:
        """without: leases that do not count."""
        return sum(
            worker.state in ("ready", "unwell") and int(worker.lease, 16) not in without
            for worker in self.workers[role]
        )

    def youngest_s(self, role: Role) -> float | None:
        """Age of the youngest one; None if none is known."""
        return min((w.age_s for w in self.workers[role] if w.age_s > 0), default=None)


class Observation:
    """Async context manager. Raises StoreUnavailable without a first list of members."""

    def __init__(self, host: Host):
        self._host = host
        self._now = host.clock.monotonic
        self._observer = Observer(host.store, host.spec.namespace, host.drops, host.clock.wall)
        self._backlog = BacklogFollower(
            host.spec.namespace, self._now, on_backlog=self._on_backlog, on_drop=host.drops
        )
        self._drain = DrainRate()
        self._prefill_workers = 0
        #: Whether any engine has told of its backlog.
        self._told = False
        self._demand = DemandRates()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._observer)
            await stack.enter_async_context(self._backlog.follow(self._host.messaging))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def members(self) -> Mapping[int, EndpointRecord]:
        """The main record of each live process, by its lease."""
        return self._observer.members

    async def look(self) -> Observed:
        """The load now. Takes as long as the slowest process needs to respond, 1 s at most."""
        seen = await self._observer.look()
        workers = {
            role: tuple(w for w in seen.workers if w.component == component)
            for role, component in COMPONENTS.items()
        }
        self._prefill_workers = sum(w.state == "ready" for w in workers[Role.PREFILL])
        return Observed(
            prefill=self._prefill(workers[Role.DECODE]),
            decode=self._decode(workers[Role.DECODE], seen),
            workers=workers,
        )

    def _prefill(self, decode: Sequence[LiveProcess]) -> PrefillLoad:
        """Demand is known if every decode worker's engine has told of its backlog lately."""
        now = self._now()
        rate = self._drain.tokens_per_s(now)
        if not self._host.messaging.connected or not self._backlog.engines:
            self._demand.forget()
            return PrefillLoad(rate=rate)
        complete = self._backlog.engines >= len(decode)
        return self._demand.load(self._backlog.totals(), rate, now, complete=complete)

    def _decode(self, workers: Sequence[LiveProcess], seen: Overview) -> DecodeLoad:
        admitted = [one.per_s for one in seen.decisions if one.verdict in _VERDICTS]
        rates = TokenRates(
            admitted_per_s=sum(admitted) if seen.rate_s else None,
            tokens_per_s=seen.tokens.per_s if seen.rate_s else None,
            token_s=seen.tokens.mean_s,
        )
        # Engines that never tell have no remote prefills.
        known = self._host.messaging.connected and (self._backlog.engines > 0 or not self._told)
        return decode_load(workers, self._backlog.totals() if known else None, rates)

    def _on_backlog(self, _backlog: Backlog, done_tokens: int) -> None:
        self._told = True
        self._drain.moved(
            self._now(),
            done_tokens=done_tokens,
            claimed_jobs=self._backlog.totals().claimed_jobs,
            workers=self._prefill_workers,
        )


async def until(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for the event, `timeout_s` at most, and clears it."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    finally:
        event.clear()

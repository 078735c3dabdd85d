"""What stand-ins for workers tell a planner of remote prefills, in their metrics."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_lite.runtime.process.component import Host

PERIOD_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Period:
    """What happened in a period; tokens. jobs: outstanding at its end."""

    asked: float = 0.0
    overflow: float = 0.0
    written: float = 0.0
    busy_s: float = 0.0
    jobs: int = 0


class PrefillReports:
    """The metrics of workers of both roles."""

    def __init__(self, registry: CollectorRegistry):
        name, about = "dynamo_lite_prefill", "of a stand-in"
        self._asked = Counter(f"{name}_asked_tokens", about, registry=registry)
        self._overflow = Counter(f"{name}_overflow_tokens", about, registry=registry)
        self._written = Counter(f"{name}_written_tokens", about, registry=registry)
        self._busy_s = Counter(f"{name}_busy_seconds", about, registry=registry)
        self._jobs = Gauge(f"{name}_outstanding_jobs", about, registry=registry)

    def add(self, period: Period) -> None:
        self._asked.inc(period.asked)
        self._overflow.inc(period.overflow)
        self._written.inc(period.written)
        self._busy_s.inc(period.busy_s)
        self._jobs.set(period.jobs)


async def report_prefills(host: Host, last: Callable[[], Period]) -> None:
    """Every `PERIOD_S`, until it is cancelled."""
    reports = PrefillReports(host.registry)
    while True:
        reports.add(last())
        await asyncio.sleep(PERIOD_S)

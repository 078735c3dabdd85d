"""What a graph's workers have in flight, and whom they wait for, from their /health."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_lite.planner.policy.drain import WorkerSeen, Writers
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.certificates import Certificates
from dynamo_lite.runtime.overview.compose import natural, processes, state_of
from dynamo_lite.runtime.overview.fetch import fetch_health

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class GraphSeen:
    """All live processes at one moment."""

    #: By lease id.
    records: Mapping[int, EndpointRecord]
    #: Facts at /health; empty for a process that did not respond.
    facts: Mapping[int, Facts]

    def workers(self, component: str) -> list[WorkerSeen]:
        """Sorted by the time of their start."""
        return [
            WorkerSeen(record=record, state=state_of(facts), in_flight=in_flight(facts))
            for record in sorted(self.records.values(), key=lambda r: r.started_at)
            if record.component == component
            for facts in [self.facts.get(record.lease_id, {})]
        ]

    def writers(self, asked_at: float) -> Writers:
        """What each decode worker reported about its writers. asked_at: time of these facts, in
        monotonic seconds of this process."""
        return {
            lease_id: _writers(self.facts.get(lease_id, {}), asked_at)
            for lease_id, record in self.records.items()
            if record.component == Role.DECODE
        }


async def look(
    records: Iterable[EndpointRecord], certificates: Certificates | None = None
) -> GraphSeen:
    """Asks all processes. Takes 1 s at most."""
    found = processes(records)
    asked = (fetch_health(record.status_url, certificates) for record in found.values())
    reports = await asyncio.gather(*asked)
    return GraphSeen(records=found, facts=dict(zip(found, reports, strict=True)))


def in_flight(facts: Facts) -> int | None:
    """Requests of a decode worker, jobs of a prefill worker; None if it does not report them."""
    return natural(facts, "in_flight", "jobs")


def seconds(facts: Facts, name: str, otherwise: float) -> float:
    """A duration among the facts; `otherwise` if it is missing or no duration."""
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else otherwise


def _writers(facts: Facts, asked_at: float) -> tuple[frozenset[int], float] | None:
    age_s, listed = seconds(facts, "writers_age_s", -1.0), facts.get("writers")
    if age_s < 0 or not isinstance(listed, list):
        return None
    try:
        return frozenset(int(lease, 16) for lease in listed), asked_at - age_s
    except (TypeError, ValueError):
        return None

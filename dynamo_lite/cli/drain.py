"""`dynamo-lite drain`: chooses a worker, revokes its lease, and watches it leave."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dynamo_lite.cli.listing import Place, as_time, members, open_store, table
from dynamo_lite.overview.drains import (
    ROLES,
    GraphSeen,
    WorkerSeen,
    in_flight,
    is_here,
    listens,
    look,
)
from dynamo_lite.policy.scaling.drain import Leaving, NoVictim, Safe, cost, safe, victim, written_s
from dynamo_lite.policy.scaling.inputs import Role
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.serve.processes import is_alive

#: The end of its work is no event that is seen here.
_POLL_S = 0.2
#: Of a process that does not say.
_GRACE_S, _TTL_S = 30.0, 30.0

_COLUMNS = ("", "component", "lease", "state", "in_flight", "running", "cache", "devices", "cost")

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DrainChoice:
    """The worker to drain."""

    record: EndpointRecord
    reason: str
    #: All of its role, for people.
    table: str


def parse_lease(text: str) -> int:
    """Raises ConfigError."""
    try:
        value = int(text, 16)
    except ValueError:
        value = 0
    if not 0 < value < 1 << 63:
        raise ConfigError(
            [f"{text}: not a lease id; lease ids are hexadecimal, see `dynamo-lite ps`"]
        )
    return value


async def pick(
    place: Place, component: str, *, force: bool, only: Iterable[int] | None = None
) -> DrainChoice:
    """The cheapest worker of a component. only: one of these leases.

    Raises ConfigError when it is the last one and not `force`; StartupError when there is none.
    """
    if component not in ROLES:
        raise ConfigError([f"--pick {component}: accepted: {', '.join(ROLES)}"])
    seen = await look(await members(place))
    workers = seen.workers(component)
    if not workers:
        raise StartupError(f"no live worker of component {component}")
    wanted = None if only is None else set(only)
    may = [w.candidate for w in workers if wanted is None or w.record.lease_id in wanted]
    others = any(w.candidate.serves and w.candidate not in may for w in workers)
    found = victim(may, force=force or others)
    if isinstance(found, NoVictim):
        raise ConfigError([f"--pick {component}: {found.reason}; --force does it nevertheless"])
    chosen = next(w for w in workers if w.record.lease_id == found.lease_id)
    reason = f"{found.reason}: {found.cost.reason}"
    return DrainChoice(
        record=chosen.record, reason=reason, table=_as_table(workers, found.lease_id)
    )


async def find(place: Place, lease_id: int, *, force: bool) -> DrainChoice:
    """The process with this lease. Raises as `pick`."""
    seen = await look(await members(place))
    record = seen.records.get(lease_id)
    if record is None:
        known = ", ".join(sorted(f"{lease:x}" for lease in seen.records)) or "none"
        raise StartupError(f"no live process has lease {lease_id:x}; live: {known}")
    workers = seen.workers(record.component)
    others = [w for w in workers if w.candidate.serves and w.record.lease_id != lease_id]
    if record.component in ROLES and not others and not force:
        raise ConfigError(
            [f"{lease_id:x} is the last {record.component} that can work; --force drains it"]
        )
    chosen = _as_table(workers, lease_id)
    return DrainChoice(record=record, reason="as asked", table=chosen)


def _as_table(workers: Iterable[WorkerSeen], chosen: int) -> str:
    return table(_COLUMNS, [_cells(worker, chosen) for worker in workers])


def as_json(choice: DrainChoice) -> dict[str, Any]:
    record = choice.record
    return {
        "component": record.component,
        "lease": f"{record.lease_id:x}",
        "host": record.host,
        "reason": choice.reason,
    }


async def revoke(place: Place, lease_ids: Iterable[int], say: Say) -> None:
    """Revokes leases: their owners leave the listing at once, and drain."""
    async with open_store(place) as store:
        for lease_id in sorted(set(lease_ids)):
            if await store.revoke(lease_id):
                say(f"revoked {lease_id:x}")
            else:
                say(f"lease {lease_id:x} had already expired or been revoked")


async def wait_until_gone(place: Place, chosen: list[EndpointRecord], timeout_s: float) -> None:
    """Waits until keys, and processes of this host, are gone. Raises StartupError."""
    leases = {record.lease_id for record in chosen}
    pids = {record.pid for record in chosen if is_here(record)}
    deadline = time.monotonic() + timeout_s
    while True:
        present = {record.lease_id for record in await members(place)} & leases
        running = {pid for pid in pids if is_alive(pid)}
        if not present and not running:
            return
        if time.monotonic() > deadline:
            left = [*(f"lease {lease:x}" for lease in present), *(f"pid {p}" for p in running)]
            raise StartupError(f"timeout: still there after {timeout_s:g} s: {', '.join(left)}")
        await asyncio.sleep(_POLL_S)


class Watch:
    """The way of one worker from its revocation to its end.

    UNLISTED, DRAINING, MOVING while Frontends move its requests, SAFE, GONE; FORCED when its
    grace ends before its work.
    """

    def __init__(self, place: Place, record: EndpointRecord, say: Say):
        self._place, self._record, self._say = place, record, say
        self._leaving = Leaving(
            role=ROLES.get(record.component, Role.DECODE), lease_id=record.lease_id, listed=True
        )
        self._began = time.monotonic()
        self._told = ""
        self.forced = False

    async def until_gone(self, timeout_s: float) -> None:
        """Raises StartupError after `timeout_s`."""
        while not await self._step():
            if time.monotonic() - self._began > timeout_s:
                raise StartupError(f"timeout: still there after {timeout_s:g} s: {self._told}")
            await asyncio.sleep(_POLL_S)

    async def _step(self) -> bool:
        """Returns whether it is gone."""
        asked_at = time.monotonic()
        records = await members(self._place)
        listed = any(one.lease_id == self._record.lease_id for one in records)
        seen = await look([*records, self._record])
        ended = not listed and not await self._lives()
        facts = seen.facts.get(self._record.lease_id, {})
        self._take(listed, ended, in_flight(facts), time.monotonic())
        grace_s = float(facts.get("grace_s", _GRACE_S))
        self.forced |= bool(self._leaving.in_flight) and facts.get("draining_s", 0.0) > grace_s
        fence_s = written_s(grace_s, float(facts.get("lease_ttl_s", _TTL_S)))
        verdict = safe(self._leaving, seen.writers(asked_at), now=asked_at, fence_s=fence_s)
        self._tell(verdict, seen)
        return ended

    async def _lives(self) -> bool:
        record = self._record
        return is_alive(record.pid) if is_here(record) else await listens(record)

    def _take(self, listed: bool, ended: bool, running: int | None, now: float) -> None:
        before = self._leaving
        idle_at = (before.idle_at if before.idle_at is not None else now) if running == 0 else None
        unlisted_at = before.unlisted_at if before.unlisted_at is not None else now
        self._leaving = replace(
            before,
            listed=listed,
            unlisted_at=None if listed else unlisted_at,
            ended=ended,
            in_flight=running,
            idle_at=idle_at,
        )

    def _tell(self, verdict: Any, seen: GraphSeen) -> None:
        moving = seen.moving(self._record.lease_id)
        lines: list[str] = []
        if not self._leaving.listed and self._told == "":
            lines.append("UNLISTED  it gets nothing new")
        if self._leaving.ended:
            lines.append("GONE      its process has ended")
        elif isinstance(verdict, Safe):
            lines.append(f"SAFE      it may be killed: {verdict.reason}")
        elif self.forced:
            lines.append(f"FORCED    its grace is over: {verdict.reason}")
        elif not self._leaving.listed:
            phase = "MOVING  " if moving else "DRAINING"
            more = f", {moving} on their way to other workers" if moving else ""
            lines.append(f"{phase}  {verdict.reason}{more}")
        for line in lines:
            if line != self._told:
                self._say(f"{time.monotonic() - self._began:6.1f}s  {line}")
            self._told = line


def _cells(worker: WorkerSeen, chosen: int) -> list[str]:
    one = worker.candidate
    total_s = cost(one).total_s
    return [
        "->" if one.lease_id == chosen else "",
        worker.record.component,
        f"{one.lease_id:x}",
        worker.state,
        "?" if worker.in_flight is None else str(worker.in_flight),
        "?" if one.busy_s is None else as_time(one.busy_s),
        as_time(one.cache_s),
        str(one.devices),
        "?" if total_s == float("inf") else as_time(total_s),
    ]

"""`dynamo-lite drain`: chooses a worker, revokes its lease, and watches it leave."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any

from dynamo_lite.cli.listing import Place, members, open_store, table
from dynamo_lite.overview.drains import ROLES, WorkerSeen, listens, look
from dynamo_lite.policy.scaling.drain import NoVictim, Safe, Unsafe, victim
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.serve.processes import is_alive
from dynamo_lite.services.planner.departure import Departure

#: The end of its work is no event that is seen here.
_POLL_S = 0.2

_COLUMNS = ("", "component", "lease", "state", "in_flight")

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
    place: Place, component: str, *, force: bool, among: Set[int] | None = None
) -> DrainChoice:
    """The least busy worker of a component. among: the leases that may be chosen; None: all.

    Raises ConfigError when it is the last one and not `force`; StartupError when there is none.
    """
    if component not in ROLES:
        raise ConfigError([f"--pick {component}: accepted: {', '.join(ROLES)}"])
    seen = await look(await members(place))
    workers = seen.workers(component)
    if not workers:
        raise StartupError(f"no live worker of component {component}")
    found = victim([worker.candidate for worker in workers], among=among, force=force)
    if isinstance(found, NoVictim):
        raise ConfigError([f"--pick {component}: {found.reason}; --force does it nevertheless"])
    chosen = next(w for w in workers if w.record.lease_id == found.lease_id)
    shown = _as_table(workers, found.lease_id)
    return DrainChoice(record=chosen.record, reason=found.reason, table=shown)


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
    pids = {record.pid for record in chosen if _is_here(record)}
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

    UNLISTED, DRAINING, SAFE, GONE; FORCED when its grace ends before its work.
    """

    def __init__(self, place: Place, record: EndpointRecord, say: Say):
        self._place, self._say = place, say
        self._departure = Departure(record, time.monotonic, _lives)
        self._began = time.monotonic()
        self._told = ""

    @property
    def forced(self) -> bool:
        return self._departure.overdue

    async def until_gone(self, timeout_s: float) -> None:
        """Raises StartupError after `timeout_s`."""
        while True:
            self._tell(await self._departure.look(await members(self._place)))
            if self._departure.leaving.ended:
                return
            if time.monotonic() - self._began > timeout_s:
                raise StartupError(f"timeout: still there after {timeout_s:g} s: {self._told}")
            await asyncio.sleep(_POLL_S)

    def _tell(self, verdict: Safe | Unsafe) -> None:
        leaving = self._departure.leaving
        lines: list[str] = []
        if not leaving.listed and self._told == "":
            lines.append("UNLISTED  it gets nothing new")
        if leaving.ended:
            lines.append("GONE      its process has ended")
        elif isinstance(verdict, Safe):
            lines.append(f"SAFE      it may be killed: {verdict.reason}")
        elif self.forced:
            lines.append(f"FORCED    its grace is over: {verdict.reason}")
        elif not leaving.listed:
            lines.append(f"DRAINING  {verdict.reason}")
        for line in lines:
            if line != self._told:
                self._say(f"{time.monotonic() - self._began:6.1f}s  {line}")
            self._told = line


async def _lives(record: EndpointRecord) -> bool:
    return is_alive(record.pid) if _is_here(record) else await listens(record)


def _is_here(record: EndpointRecord) -> bool:
    """Whether the process runs on this host."""
    return bool(record.pid) and record.host == socket.gethostname()


def _cells(worker: WorkerSeen, chosen: int) -> list[str]:
    one = worker.candidate
    return [
        "->" if one.lease_id == chosen else "",
        worker.record.component,
        f"{one.lease_id:x}",
        worker.state,
        "?" if one.in_flight is None else str(one.in_flight),
    ]

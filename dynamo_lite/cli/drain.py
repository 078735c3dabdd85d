"""`dynamo-lite drain`: chooses a worker, the least busy one or a given one, revokes its lease, and
watches it leave."""

import asyncio
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Annotated
from urllib.parse import urlsplit

import typer

from dynamo_lite.cli.arguments import EXIT_CUT_OFF, follow, interruptible
from dynamo_lite.cli.listing import OnGraph, Place, members, on_graph, table
from dynamo_lite.planner.drains import GraphSeen, in_flight, look, seconds
from dynamo_lite.planner.policy.drain import WorkerSeen, danger, victim
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.overview.fetch import TIMEOUT_S
from dynamo_lite.runtime.store import Store
from dynamo_lite.serve.processes import is_alive


def _lease_id(text: str) -> int:
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


Lease = Annotated[
    int | None,
    typer.Argument(
        parser=_lease_id, metavar="[LEASE]", help="Lease id, as shown by `dynamo-lite ps`."
    ),
]


@on_graph
def drain(
    graph: OnGraph,
    lease: Lease = None,
    component: Annotated[
        str | None,
        typer.Option(
            "--pick",
            metavar="COMPONENT",
            help="Remove the least busy worker of VllmWorker or PrefillWorker.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show which worker would go.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Remove it also if it is the last one of its component.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return when its lease is revoked.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest wait in seconds; the drain goes on.")
    ] = 300.0,
) -> None:
    """Remove one worker, and say when it is safe to kill.

    Its lease is revoked. It leaves the listing at once, takes nothing new and finishes what it has
    (DRAINING). SAFE: its end costs no request, and no write into or from its memory is under way.
    FORCED: its grace-s was over before its work; what it still had goes on at other workers. GONE:
    its process has ended.

    The least busy worker is one that cannot work, or else the one with the fewest requests or
    jobs in flight. Of equal ones the youngest goes.

    Exit codes: 0: gone (or revoked, with --no-wait); 1: no such worker, no answer from etcd, or
    the time was over; 2: bad input, or the last one without --force; 3: gone, but FORCED.

    \b
    dynamo-lite drain --pick VllmWorker --dry-run
    dynamo-lite drain --pick PrefillWorker
    dynamo-lite drain 694d9a2f3c4e8a05
    """
    if (lease is None) == (component is None):
        raise ConfigError(["give either LEASE or --pick COMPONENT"])
    if component is not None and component not in tuple(Role):
        raise ConfigError([f"--pick {component}: accepted: {', '.join(Role)}"])

    async def work(store: Store, place: Place) -> bool:
        """Returns whether its work was cut off."""
        seen = await place.look(store)
        record, reason, workers = _choose(seen, component, lease, force)
        rows = [
            (
                "->" if one.record is record else "",
                *(one.record.component, f"{one.lease_id:x}", one.state),
                "?" if one.in_flight is None else one.in_flight,
            )
            for one in workers
        ]
        print(table(("", "component", "lease", "state", "in_flight"), rows))
        print(f"{record.component} {record.lease_id:x}: {reason}", flush=True)
        if dry_run:
            print("dry run: nothing was revoked")
            return False
        watch = _Watch(store, place, record)
        await revoke(store, [record.lease_id])
        if not no_wait:
            await follow(watch.look, timeout)
        return watch.forced

    with interruptible("interrupted; a worker whose lease was revoked goes on draining"):
        cut_off = graph.on_store(work)
    if cut_off:
        raise typer.Exit(EXIT_CUT_OFF)


def _choose(
    seen: GraphSeen, component: str | None, lease: int | None, force: bool
) -> tuple[EndpointRecord, str, Sequence[WorkerSeen]]:
    """The worker to remove, why this one, and all of its component.

    lease: None: the least busy one of `component`. Raises StartupError when there is none,
    ConfigError when it is the last one and not `force`.
    """
    if lease is not None and lease not in seen.records:
        known = ", ".join(sorted(f"{one:x}" for one in seen.records)) or "none"
        raise StartupError(f"no live process has lease {lease:x}; live: {known}")
    component = component if lease is None else seen.records[lease].component
    if not (workers := seen.workers(component or "")):
        raise StartupError(f"no live worker of component {component}")
    last_may_go = force or component not in tuple(Role)
    found = victim(workers, among=None if lease is None else {lease}, force=last_may_go)
    if found.record is None:
        raise ConfigError([f"{component}: {found.reason}; --force drains it"])
    return found.record, found.reason if lease is None else "as asked", workers


async def revoke(store: Store, lease_ids: Iterable[int]) -> None:
    """Revokes leases: their owners leave the listing at once, and drain."""
    for lease_id in sorted(set(lease_ids)):
        if await store.revoke(lease_id):
            print(f"revoked {lease_id:x}", flush=True)
        else:
            print(f"lease {lease_id:x} had already expired or been revoked", flush=True)


class _Watch:
    """The way of one worker from its revocation to its end: DRAINING, SAFE, GONE; FORCED when its
    grace ends before its work."""

    def __init__(self, store: Store, place: Place, record: EndpointRecord):
        self._store, self._place, self._record = store, place, record
        self._idle_at: float | None = None
        self._safe = self._ended = False
        #: Whether it had work after its grace.
        self.forced = False

    async def look(self) -> tuple[str, bool]:
        """How it stands, and whether its process has ended."""
        harm = await self.harm()
        if self._ended:
            return "GONE      its process has ended", True
        if self.forced:
            return f"FORCED    its grace is over: {harm or 'it may be killed'}", False
        if harm:
            return f"DRAINING  {harm}", False
        return "SAFE      it may be killed: no write into or from its memory is awaited", False

    async def harm(self) -> str:
        """Asks it and all decode workers what its end could harm; empty if nothing. Takes 2 s at
        most."""
        record, listed = self._record, await members(self._store, self._place.namespace)
        asked_at = time.monotonic()
        seen = await look([*listed, record], self._place.certificates())
        facts = seen.facts.get(record.lease_id, {})
        running, now = in_flight(facts), time.monotonic()
        is_listed = any(member.lease_id == record.lease_id for member in listed)
        if running != 0:
            self._idle_at = None
        elif self._idle_at is None:
            self._idle_at = now
        self._ended = not is_listed and not facts and not await lives(record)
        late = seconds(facts, "draining_s", 0.0) > seconds(facts, "grace_s", 0.0)
        self.forced |= bool(running and late) or bool(facts.get("cut_off"))
        harm = danger(
            Role.PREFILL if record.component == Role.PREFILL else Role.DECODE,
            record.lease_id,
            seen.writers(asked_at),
            listed=is_listed,
            in_flight=running,
            idle_at=self._idle_at or now,
        )
        # Only work takes SAFE back: neither its own silence nor that of a decode worker.
        self._safe = not harm or (self._safe and not running)
        return "" if self._safe else harm


async def lives(record: EndpointRecord) -> bool:
    """Whether its process is there. On another host its status server tells: only a refused
    connection means no."""
    if record.pid and record.host == socket.gethostname():
        return is_alive(record.pid)
    parts = urlsplit(record.status_url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError, TimeoutError):
        return True
    writer.transport.abort()
    return True

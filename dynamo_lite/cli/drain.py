"""`dynamo-lite drain`: chooses a worker, the least busy one or a given one, revokes its lease, and
watches it leave."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated
from urllib.parse import urlsplit

import typer

from dynamo_lite.cli.arguments import EXIT_CUT_OFF, interruptible
from dynamo_lite.cli.listing import OnGraph, Place, members, on_graph, table
from dynamo_lite.planner.drains import GraphSeen, in_flight, look, seconds
from dynamo_lite.planner.policy.drain import Leaving, WorkerSeen, danger, victim, written_s
from dynamo_lite.planner.policy.inputs import Role
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.overview.fetch import TIMEOUT_S
from dynamo_lite.runtime.store import Store
from dynamo_lite.serve.processes import is_alive

#: The end of its work is no event that is seen here.
_POLL_S = 0.2
#: Of a process that does not say.
_GRACE_S, _TTL_S = 30.0, 30.0

_COLUMNS = ("", "component", "lease", "state", "in_flight")

Say = Callable[[str], None]


@on_graph("nats_url")
def drain(
    graph: OnGraph,
    lease: Annotated[
        str, typer.Argument(metavar="[LEASE]", help="Lease id, as shown by `dynamo-lite ps`.")
    ] = "",
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
    if bool(lease) == (component is not None):
        raise ConfigError(["give either LEASE or --pick COMPONENT"])
    wanted = parse_lease(lease) if lease else 0

    async def work(store: Store, place: Place) -> bool:
        """Returns whether its work was cut off."""
        seen = await place.look(store)
        record, reason, workers = _choose(seen, component or "", wanted, force)
        say = partial(print, flush=True)
        say(table(_COLUMNS, [_cells(one, record.lease_id) for one in workers]))
        say(f"{record.component} {record.lease_id:x}: {reason}")
        if dry_run:
            say("dry run: nothing was revoked")
            return False
        watch = _Watch(store, place, record)
        await revoke(store, [record.lease_id], say)
        if not no_wait:
            await watch.until_gone(timeout, say)
        return watch.forced

    with interruptible("interrupted; a worker whose lease was revoked goes on draining"):
        cut_off = graph.on_store(work)
    if cut_off:
        raise typer.Exit(EXIT_CUT_OFF)


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


def _choose(
    seen: GraphSeen, component: str, lease_id: int, force: bool
) -> tuple[EndpointRecord, str, Sequence[WorkerSeen]]:
    """The worker to remove, why this one, and all of its component.

    lease_id: 0: the least busy one of `component`. Raises StartupError when there is none,
    ConfigError when it is the last one and not `force`.
    """
    if not lease_id and component not in tuple(Role):
        raise ConfigError([f"--pick {component}: accepted: {', '.join(Role)}"])
    given = seen.records.get(lease_id)
    if lease_id and given is None:
        known = ", ".join(sorted(f"{lease:x}" for lease in seen.records)) or "none"
        raise StartupError(f"no live process has lease {lease_id:x}; live: {known}")
    component = component if given is None else given.component
    workers = seen.workers(component)
    if not workers:
        raise StartupError(f"no live worker of component {component}")
    last_may_go = force or component not in tuple(Role)
    found = victim(workers, among={lease_id} if lease_id else None, force=last_may_go)
    if found.record is None:
        raise ConfigError([f"{component}: {found.reason}; --force drains it"])
    return found.record, "as asked" if lease_id else found.reason, workers


async def revoke(store: Store, lease_ids: Iterable[int], say: Say) -> None:
    """Revokes leases: their owners leave the listing at once, and drain."""
    for lease_id in sorted(set(lease_ids)):
        if await store.revoke(lease_id):
            say(f"revoked {lease_id:x}")
        else:
            say(f"lease {lease_id:x} had already expired or been revoked")


class _Watch:
    """The way of one worker from its revocation to its end: DRAINING, SAFE, GONE; FORCED when its
    grace ends before its work."""

    def __init__(self, store: Store, place: Place, record: EndpointRecord):
        self._store, self._place, self._record = store, place, record
        role = Role.PREFILL if record.component == Role.PREFILL else Role.DECODE
        self._leaving = Leaving(role=role, lease_id=record.lease_id)
        self._safe = self._ended = False
        #: Whether it had work after its grace.
        self.forced = False

    async def until_gone(self, timeout_s: float, say: Say) -> None:
        """Raises StartupError after `timeout_s`."""
        began, told = time.monotonic(), ""
        while True:
            state = self._state(await self.harm())
            if state != told:
                say(f"{time.monotonic() - began:6.1f}s  {state}")
                told = state
            if self._ended:
                return
            if time.monotonic() - began > timeout_s:
                raise StartupError(f"timeout: still there after {timeout_s:g} s: {told}")
            await asyncio.sleep(_POLL_S)

    async def harm(self) -> str:
        """Asks it and all decode workers what its end could harm; empty if nothing. Takes 2 s at
        most."""
        listed = await members(self._store, self._place.namespace)
        asked_at, before = time.monotonic(), self._leaving
        seen = await look([*listed, self._record], self._place.certificates())
        facts = seen.facts.get(before.lease_id, {})
        running, now = in_flight(facts), time.monotonic()
        is_listed = any(member.lease_id == before.lease_id for member in listed)
        idle_at = now if before.idle_at is None else before.idle_at
        unlisted_at = now if before.unlisted_at is None else before.unlisted_at
        self._ended = not is_listed and not facts and not await _lives(self._record)
        self._leaving = replace(
            before,
            unlisted_at=None if is_listed else unlisted_at,
            in_flight=running,
            idle_at=idle_at if running == 0 else None,
        )
        grace_s = seconds(facts, "grace_s", _GRACE_S)
        late = bool(running) and seconds(facts, "draining_s", 0.0) > grace_s
        self.forced |= late or bool(facts.get("cut_off"))
        landed_s = written_s(grace_s, seconds(facts, "lease_ttl_s", _TTL_S))
        harm = danger(self._leaving, seen.writers(asked_at), now=asked_at, landed_s=landed_s)
        # Only work takes SAFE back: neither its own silence nor that of a decode worker.
        self._safe = not harm or (self._safe and not running)
        return "" if self._safe else harm

    def _state(self, harm: str) -> str:
        if self._ended:
            return "GONE      its process has ended"
        if self.forced:
            return f"FORCED    its grace is over: {harm or 'it may be killed'}"
        if harm:
            return f"DRAINING  {harm}"
        return "SAFE      it may be killed: no write into or from its memory is awaited"


async def _lives(record: EndpointRecord) -> bool:
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


def _cells(worker: WorkerSeen, chosen: int) -> list[str]:
    return [
        "->" if worker.lease_id == chosen else "",
        worker.record.component,
        f"{worker.lease_id:x}",
        worker.state,
        "?" if worker.in_flight is None else str(worker.in_flight),
    ]

"""`dynamo-lite scale`: orders processes from the supervisor of this state directory."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import (
    DEFAULT_STATE_DIR,
    StateDir,
    Targets,
    follow,
    interruptible,
)
from dynamo_lite.cli.listing import OnGraph, open_store
from dynamo_lite.planner.policy.drain import victim
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.planner import MAX_WORKERS, Counts, RoleCounts, Want
from dynamo_lite.runtime.supervisor_client import order
from dynamo_lite.serve.run_state import read_run


def scale(
    targets: Targets,
    force: Annotated[
        bool, typer.Option("--force", help="Also remove the last worker of a component.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return when the orders are given.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest wait in seconds; the orders stay given.")
    ] = 900.0,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Add workers to the graph on this host, or drain and remove some.

    The supervisor (`dynamo-lite serve`) of --state-dir starts and ends the processes; those of
    other hosts are not counted. A process that cannot be started is given up, with the reason,
    and the graph goes on. Devices come from Graph.devices, as many as ServiceArgs.devices says.
    Workers that still start are removed first, then the least busy, as `dynamo-lite drain` finds
    them. Ctrl-C only ends the waiting.

    Exit codes: 0: there are that many; 1: an order was refused or failed, or the time was over;
    2: bad input, and nothing was ordered.

    \b
    dynamo-lite scale VllmWorker=3
    dynamo-lite scale VllmWorker=1 PrefillWorker=2
    """
    work = _scale(state_dir, parse_targets(targets), force, 0.0 if no_wait else timeout)
    with interruptible("interrupted; the supervisor carries out what was ordered"):
        asyncio.run(work)


def parse_targets(texts: list[str]) -> dict[str, int]:
    """Reads COMPONENT=N. Raises ConfigError."""
    targets: dict[str, int] = {}
    mistakes: list[str] = []
    for text in texts:
        name, equals, number = text.partition("=")
        if not name or not equals or not number.isdecimal() or int(number) > MAX_WORKERS:
            mistakes.append(f"{text}: expected COMPONENT=NUMBER, e.g. VllmWorker=3")
        elif name in targets:
            mistakes.append(f"{text}: {name} is given twice")
        else:
            targets[name] = int(number)
    if mistakes:
        raise ConfigError(mistakes)
    return targets


async def _scale(state_dir: Path, targets: Mapping[str, int], force: bool, wait_s: float) -> None:
    """Orders what is missing, retires what is too many, and waits until it is so.

    wait_s: longest wait; 0: none. Raises ConfigError, Unavailable, Refused
    when an order is not possible, and StartupError when one fails later.
    """
    if read_run(state_dir) is None:
        raise StartupError(f"no graph runs on {state_dir}; name its folder with --state-dir")
    _check(targets, (await order(state_dir, Counts())).counts, force)
    for component, target in targets.items():
        await _order(state_dir, component, target)

    async def look() -> tuple[str, bool]:
        counts = (await order(state_dir, Counts())).counts
        for name, target in targets.items():
            if (left := counts[name].starting + counts[name].ready) < target:
                run = read_run(state_dir)
                ended = [one for one in run.processes if one.service == name] if run else []
                why = "".join([f": {one.error}" for one in ended if one.state == "failed"][-1:])
                raise StartupError(f"{name}: {left} of {target} are left{why}")
        done = all(n == counts[name].ready == counts[name].present for name, n in targets.items())
        return "; ".join(_as_text(name, counts[name], targets[name]) for name in targets), done

    if wait_s:
        await follow(look, wait_s)


def _check(targets: Mapping[str, int], counts: Mapping[str, RoleCounts], force: bool) -> None:
    known = ", ".join(counts) or "none"
    mistakes = [
        f"{name}: this graph has no such service that can be scaled; those: {known}"
        for name in targets
        if name not in counts
    ]
    mistakes += [
        f"{name}=0 would remove the last one; --force removes it"
        for name, target in targets.items()
        if target == 0 and name in counts and not force
    ]
    if mistakes:
        raise ConfigError(mistakes)


async def _order(state_dir: Path, component: str, target: int) -> None:
    reply = await order(state_dir, Counts())
    now = reply.counts[component]
    present = now.starting + now.ready
    if target == present:
        return
    print(f"{component}: {target - present:+}", flush=True)
    leases: list[int] = []
    if now.ready > target:
        # A host of workers may have no certificates but theirs.
        place = OnGraph(state_dir=state_dir).place(component)
        async with open_store(place) as store:
            workers = (await place.look(store)).workers(component)
        workers = [one for one in workers if one.state != "draining"]
        own = [one.lease_id for one in workers if one.lease_id in now.leases]
        # Those that are not listed end without being named.
        for _ in range(len(own) - target):
            # Whether the last one may go was decided with the target.
            found = victim(workers, among=own, force=True)
            if found.record is not None:
                leases.append(found.record.lease_id)
                print(f"  lease {found.record.lease_id:x}, {found.reason}", flush=True)
                workers = [one for one in workers if one.record != found.record]
    want = Want(component=component, count=target, leases=tuple(leases), version=reply.version)
    await order(state_dir, want)


def _as_text(name: str, now: RoleCounts, target: int) -> str:
    more = [f", {n} {word}" for word in ("starting", "draining") if (n := getattr(now, word))]
    return f"{name}: {now.ready} ready{''.join(more)} of {target}"

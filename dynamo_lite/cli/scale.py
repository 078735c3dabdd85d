"""`dynamo-lite scale`: orders processes from the supervisor of this state directory."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import DEFAULT_STATE_DIR, StateDir, Targets, interruptible
from dynamo_lite.cli.drain import Say
from dynamo_lite.cli.listing import OnGraph, open_store
from dynamo_lite.planner.policy.drain import victim
from dynamo_lite.protocol.errors import ConfigError, StartupError
from dynamo_lite.protocol.planner import MAX_WORKERS, Counts, RoleCounts, Want
from dynamo_lite.runtime.supervisor_client import order
from dynamo_lite.serve.run_state import ProcessState, read_run

#: Between two looks at what was ordered: the supervisor sends no event when its counts change.
_POLL_S = 0.2


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
    say = partial(print, flush=True)
    work = _scale(state_dir, parse_targets(targets), force, 0.0 if no_wait else timeout, say)
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


async def _scale(
    state_dir: Path, targets: Mapping[str, int], force: bool, wait_s: float, say: Say
) -> None:
    """Orders what is missing, retires what is too many, and waits until it is so.

    wait_s: longest wait; 0: none. Raises ConfigError, Unavailable, Refused
    when an order is not possible, and StartupError when one fails later.
    """
    if read_run(state_dir) is None:
        raise StartupError(f"no graph runs on {state_dir}; name its folder with --state-dir")
    _check(targets, (await order(state_dir, Counts())).counts, force)
    for component, target in targets.items():
        await _order(state_dir, component, target, say)
    if wait_s != 0:
        await _wait(state_dir, targets, time.monotonic() + wait_s, say)


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


async def _order(state_dir: Path, component: str, target: int, say: Say) -> None:
    reply = await order(state_dir, Counts())
    now = reply.counts[component]
    present = now.starting + now.ready
    if target == present:
        return
    say(f"{component}: {target - present:+}")
    processes = _processes(state_dir, component)
    ready = [int(one.lease, 16) for one in processes if one.state == "ready" and one.lease]
    leases: list[int] = []
    # Those that do not serve end without being named.
    if (number := len(ready) - target) > 0:
        # A host of workers may have no certificates but theirs.
        place = OnGraph(state_dir=state_dir).place(component)
        async with open_store(place) as store:
            workers = (await place.look(store)).workers(component)
        for _ in range(number):
            # Whether the last one may go was decided with the target.
            found = victim(workers, among=ready, force=True)
            if found.record is not None:
                leases.append(found.record.lease_id)
                say(f"  lease {found.record.lease_id:x}, {found.reason}")
                workers = [one for one in workers if one.record != found.record]
    want = Want(component=component, count=target, leases=tuple(leases), version=reply.version)
    await order(state_dir, want)


async def _wait(state_dir: Path, targets: Mapping[str, int], limit: float, say: Say) -> None:
    told = ""
    while True:
        counts = (await order(state_dir, Counts())).counts
        text = "; ".join(_as_text(name, counts[name], targets[name]) for name in targets)
        if text != told:
            say(text)
            told = text
        left = 0
        for name, target in targets.items():
            now = counts[name]
            left += abs(target - now.ready) + now.starting + now.draining
            if now.starting + now.ready < target:
                failed = [one for one in _processes(state_dir, name) if one.state == "failed"]
                why = f": {failed[-1].error}" if failed else ""
                raise StartupError(f"{name}: {now.starting + now.ready} of {target} are left{why}")
        if not left:
            return
        if time.monotonic() > limit:
            raise StartupError(f"timeout; the supervisor goes on: {text}")
        await asyncio.sleep(_POLL_S)


def _as_text(name: str, now: RoleCounts, target: int) -> str:
    parts = [f"{now.ready} ready"]
    parts += [f"{now.starting} starting"] if now.starting else []
    parts += [f"{now.draining} draining"] if now.draining else []
    return f"{name}: {', '.join(parts)} of {target}"


def _processes(state_dir: Path, component: str) -> list[ProcessState]:
    """Empty without a graph."""
    run = read_run(state_dir)
    return [one for one in run.processes if one.service == component] if run else []

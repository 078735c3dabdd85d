"""`dynamo-lite drain`: removes one worker, the least busy one or a given one."""

import asyncio
import json
import sys
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import DEFAULT_STATE_DIR, DryRun, EtcdUrl, Namespace, StateDir
from dynamo_lite.cli.exits import EXIT_CUT_OFF, interruptible
from dynamo_lite.protocol.errors import ConfigError


def drain(
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
    dry_run: DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Remove it also if it is the last one of its component.")
    ] = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return when its lease is revoked.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Longest wait in seconds; the drain goes on.")
    ] = 300.0,
    etcd_url: EtcdUrl = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    namespace: Namespace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the choice as JSON.")] = False,
) -> None:
    """Remove one worker, and say when it is safe to kill.

    Its lease is revoked. It leaves the listing at once (UNLISTED), takes nothing new and
    finishes what it has (DRAINING). SAFE: its end costs no request, and no write into or from
    its memory is under way. GONE: its process has ended. FORCED: its grace-s was over before its
    work; what it still had goes on at other workers.

    The least busy worker is one that cannot work, or else the one with the fewest requests or
    jobs in flight. Of equal ones the youngest goes.

    Exit codes: 0: gone (or revoked, with --no-wait); 1: no such worker, no answer from etcd, or
    the time was over; 2: bad input, or the last one without --force; 3: gone, but FORCED.

    \b
    dynamo-lite drain --pick VllmWorker --dry-run
    dynamo-lite drain --pick PrefillWorker
    dynamo-lite drain 694d9a2f3c4e8a05
    """
    from dynamo_lite.cli import drain as draining
    from dynamo_lite.cli.listing import find_place

    if bool(lease) == (component is not None):
        raise ConfigError(["give either LEASE or --pick COMPONENT"])
    wanted = draining.parse_lease(lease) if lease else 0
    place = find_place(state_dir, etcd_url, namespace)

    async def work() -> bool:
        """Returns whether its work was cut off."""
        if component is not None:
            choice = await draining.pick(place, component, force=force)
        else:
            choice = await draining.find(place, wanted, force=force)
        print(json.dumps(draining.as_json(choice)) if as_json else choice.table, flush=True)
        say = _to_stderr if as_json else _to_stdout
        say(f"{choice.record.component} {choice.record.lease_id:x}: {choice.reason}")
        if dry_run:
            say("dry run: nothing was revoked")
            return False
        watch = draining.Watch(place, choice.record, say)
        await draining.revoke(place, [choice.record.lease_id], say)
        if not no_wait:
            await watch.until_gone(timeout)
        return watch.forced

    with interruptible("interrupted; a worker whose lease was revoked goes on draining"):
        cut_off = asyncio.run(work())
    if cut_off:
        raise typer.Exit(EXIT_CUT_OFF)


def _to_stdout(line: str) -> None:
    print(line, flush=True)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""`dynamo-lite scale`: changes the number of workers of a running graph."""

import asyncio
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import DEFAULT_STATE_DIR, StateDir, Targets
from dynamo_lite.cli.exits import interruptible


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
    from dynamo_lite.cli import scale as scaling

    wait_s = 0.0 if no_wait else timeout
    work = scaling.scale(
        state_dir,
        scaling.parse_targets(targets),
        force=force,
        wait_s=wait_s,
        say=lambda line: print(line, flush=True),
    )
    with interruptible("interrupted; the supervisor carries out what was ordered"):
        asyncio.run(work)

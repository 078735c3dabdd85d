"""`dynamo-lite switch`: a worker of one role leaves, and one of the other role gets its devices."""

import asyncio
from typing import Annotated

import typer

from dynamo_lite.cli.arguments import DEFAULT_STATE_DIR, DryRun, StateDir
from dynamo_lite.cli.exits import EXIT_CUT_OFF, interruptible
from dynamo_lite.protocol.errors import ConfigError


def switch(
    giver: Annotated[
        str, typer.Argument(metavar="FROM", help="The role that loses a worker, e.g. VllmWorker.")
    ],
    taker: Annotated[
        str, typer.Argument(metavar="TO", help="The role that gets one, e.g. PrefillWorker.")
    ],
    lease: Annotated[
        str,
        typer.Argument(
            metavar="LEASE",
            help="The worker's lease, see `dynamo-lite ps`; default: the cheapest one's.",
        ),
    ] = "",
    number: Annotated[
        int,
        typer.Option(
            "-n", "--number", min=1, max=1000, help="How many workers, one after another."
        ),
    ] = 1,
    dry_run: DryRun = False,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return when the order is given.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, help="Longest wait in seconds for each; the switch goes on."),
    ] = 900.0,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Turn workers of one role into workers of the other role, on the same devices.

    The worker drains as with `dynamo-lite drain`: it gets nothing new and finishes or hands over
    what it has (UNLISTED, DRAINING, MOVING, SAFE, GONE; FORCED: its grace-s was over before its
    work). Then a new process of the other role starts on its devices (STARTING, READY), which
    nothing else can take in between. It loads the model, so a switch takes as long as a start.
    Where both services are `switchable`, the process goes on with its engine instead (SWITCHING,
    READY at level 2), and a new one (level 1) is started only when that fails. One that fails to
    start (FAILED) is tried again, later each time; `dynamo-lite scale` with one worker less gives
    it up.

    Both services must belong to the supervisor (`dynamo-lite serve`) of --state-dir. One worker
    of FROM that can work has to stay, and the minimum and maximum of a running planner hold. The
    planner goes on from the new numbers; `dynamo-lite planner pause` keeps them. Ctrl-C only ends
    the waiting: what was ordered is carried out.

    Exit codes: 0: switched (or ordered, with --no-wait); 1: refused, given up, or the time was
    over; 2: bad input, and nothing was ordered; 3: switched, but FORCED.

    \b
    dynamo-lite switch VllmWorker PrefillWorker --dry-run
    dynamo-lite switch VllmWorker PrefillWorker
    dynamo-lite switch PrefillWorker VllmWorker 694d9a2f3c4e8a05
    dynamo-lite switch PrefillWorker VllmWorker -n 2
    """
    from dynamo_lite.cli.drain import parse_lease
    from dynamo_lite.cli.switch import Switcher

    if number > 1 and (lease or no_wait):
        raise ConfigError(["-n goes with neither LEASE nor --no-wait: switches follow each other"])
    wanted = parse_lease(lease) if lease else 0
    switcher = Switcher(state_dir, giver, taker, _say)

    async def work() -> None:
        for left in range(number, 0, -1):
            choice = await switcher.choose(left, wanted)
            _say(choice.table)
            _say(f"{giver} {choice.record.lease_id:x}: {choice.reason}")
            if dry_run:
                _say("dry run: nothing was ordered")
                return
            await switcher.switch(choice, wait_s=0.0 if no_wait else timeout)

    with interruptible("interrupted; the supervisor carries out what was ordered"):
        asyncio.run(work())
    if switcher.forced:
        raise typer.Exit(EXIT_CUT_OFF)


def _say(line: str) -> None:
    print(line, flush=True)

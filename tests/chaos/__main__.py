"""`scripts/chaos`: breaks a graph of real processes in every way, and counts.

Exit codes: 0 no request was lost, no answer wrong, and everything came back;
1 otherwise; 2 bad usage; 130 by a second Ctrl-C. The first one ends the run in
order, and the report covers what was done until then.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.arena import Say, children, left, open_arena
from tests.chaos.cancels import CANCELS
from tests.chaos.cluster import CONFIG
from tests.chaos.delays import PREFILL_KILLED
from tests.chaos.outages import OUTAGES
from tests.chaos.questions import questions, right_answers
from tests.chaos.report import Report
from tests.chaos.scenario import Scenario, play
from tests.chaos.storm import storm

#: In the order in which `--scenario all` plays them.
SCENARIOS = (PREFILL_KILLED, *OUTAGES, CANCELS)

#: Scenarios have one prefill worker: what happens to it happens to all.
_SCENARIO_OPTIONS = ("--PrefillWorker.ServiceArgs.workers=1",)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of mixed chaos (20)")
    parser.add_argument("--seed", type=int, help="of what is done and asked; default: a random one")
    parser.add_argument("--clients", type=int, default=8, help="that ask at the same time (8)")
    parser.add_argument("--scenario", action="append", help="a single failure instead; repeatable")
    parser.add_argument("--list", action="store_true", help="the scenarios")
    parser.add_argument("--directory", type=Path, help="keep state and logs there")
    args = parser.parse_args()
    known = [scenario.name for scenario in SCENARIOS]
    for name in args.scenario or ():
        if name not in (*known, "all"):
            parser.error(f"--scenario {name}: there are all, {', '.join(known)}")
    if args.minutes <= 0 or args.clients <= 0:
        parser.error("--minutes and --clients are more than 0")
    return args


async def _all_of(args: argparse.Namespace, directory: Path, say: Say) -> list[Report]:
    stop = asyncio.Event()
    _on_interrupt(stop, say)
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    had = children()
    reports: list[Report] = []
    known = await right_answers(directory, questions(), CONFIG, say)
    chosen = _chosen(args.scenario or [])
    try:
        async with open_arena(
            directory / "cluster", known, say, _SCENARIO_OPTIONS if chosen else ()
        ) as stage:
            if not chosen:
                reports.append(await storm(stage, args.minutes, seed, args.clients, stop))
            for scenario in chosen:
                if not stop.is_set():
                    say(f"scenario {scenario.name}: {scenario.what}")
                    reports.append(await play(stage, scenario, seed))
    except AssertionError as exc:
        reports = reports or [Report(what="start", seed=seed)]
        reports[-1].left.append(str(exc))
    if reports:
        reports[-1].left += await left(had)
    return reports


def _chosen(names: list[str]) -> list[Scenario]:
    return [s for s in SCENARIOS if s.name in names or "all" in names]


def _on_interrupt(stop: asyncio.Event, say: Say) -> None:
    def interrupted() -> None:
        if stop.is_set():
            os._exit(130)  # the kernel tells the children
        stop.set()
        say("stopping in order; once more forces")

    loop = asyncio.get_running_loop()
    for kind in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(kind, interrupted)


def main() -> int:
    args = _arguments()
    if args.list:
        for scenario in SCENARIOS:
            print(f"{scenario.name:<18}{scenario.what}")
        return 0
    began = time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"{minutes:02}:{seconds:02}  {line}", flush=True)

    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-lite-chaos-"))
        )
        reports = asyncio.run(_all_of(args, directory, say))
    for report in reports:
        print(f"\n{report.as_text()}")
    return 0 if reports and not any(report.failures for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())

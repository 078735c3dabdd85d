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
from tests.chaos.cluster import CONFIG
from tests.chaos.forward_storm import forward_storm, greedy_questions
from tests.chaos.questions import questions, right_answers
from tests.chaos.report import Report
from tests.chaos.storm import storm
from tests.vllm.graph import DISAGG


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of mixed chaos (20)")
    parser.add_argument("--seed", type=int, help="of what is done and asked; default: a random one")
    parser.add_argument("--clients", type=int, default=8, help="that ask at the same time (8)")
    parser.add_argument(
        "--forwarder", action="store_true", help="stock vLLM engines behind a Forwarder instead"
    )
    parser.add_argument("--directory", type=Path, help="keep state and logs there")
    args = parser.parse_args()
    if args.minutes <= 0 or args.clients <= 0:
        parser.error("--minutes and --clients are more than 0")
    return args


async def _play(args: argparse.Namespace, directory: Path, say: Say) -> Report:
    stop = asyncio.Event()
    _on_interrupt(stop, say)
    seed = random.randrange(1 << 31) if args.seed is None else args.seed
    had, report = children(), Report(what="start", seed=seed, of_a_graph=False)
    try:
        if args.forwarder:
            known = await right_answers(directory, greedy_questions(), DISAGG, say)
            report = await forward_storm(
                directory,
                known,
                minutes=args.minutes,
                seed=seed,
                clients=args.clients,
                say=say,
                stop=stop,
            )
        else:
            known = await right_answers(directory, questions(), CONFIG, say)
            async with open_arena(directory / "cluster", known, say) as stage:
                report = await storm(stage, args.minutes, seed, args.clients, stop)
    except AssertionError as exc:
        report.left.append(str(exc))
    report.left += await left(had)
    return report


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
    began = time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"{minutes:02}:{seconds:02}  {line}", flush=True)

    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-lite-chaos-"))
        )
        report = asyncio.run(_play(args, directory, say))
    print(f"\n{report.as_text()}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

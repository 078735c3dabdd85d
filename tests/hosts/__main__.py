"""Runs the scenarios on hosts that are network namespaces: scripts/hosts_check --help"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.hosts.load import told_questions
from tests.hosts.network import unavailable
from tests.hosts.rig import Rig, same_clocks
from tests.hosts.scenarios import SCENARIOS, play_all


async def run(wanted: list[str], directory: Path) -> int:
    """Returns how many scenarios failed."""
    async with Rig(directory) as rig:
        _say(f"the hosts are up; logs in {directory}")
        return await play_all(
            rig, {name: SCENARIOS[name] for name in wanted}, told_questions(), _say
        )


async def _until_told(running: Coroutine[Any, Any, int]) -> int:
    """SIGTERM ends it as Ctrl-C does: no process and no host is left."""
    task = asyncio.ensure_future(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/hosts_check",
        description="Breaks the network between hosts, which are network namespaces of this "
        "machine, while requests and jobs run: three NATS servers, three etcd members, two "
        "Frontends and two decode workers with engines that compute nothing. Needs root. Exit code "
        "0: every answer was right and the queue kept its jobs; 1: not; 2: it cannot run here.",
        epilog=f"Scenarios: {', '.join(SCENARIOS)}.",
    )
    parser.add_argument(
        "--scenario", action="append", metavar="NAME", help="one of those below; default: all"
    )
    parser.add_argument("--directory", type=Path, help="keeps logs and state here")
    options = parser.parse_args()
    if why := unavailable():
        print(f"error: {why}", file=sys.stderr)
        return 2
    wanted = options.scenario or list(SCENARIOS)
    if unknown := [name for name in wanted if name not in SCENARIOS]:
        parser.error(f"--scenario {unknown[0]}: unknown; known: {', '.join(SCENARIOS)}")
    if why := same_clocks():
        print(f"note: {why}; they are the same here", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hosts-") as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            failed = asyncio.run(_until_told(run(wanted, directory)))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

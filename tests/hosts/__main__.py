"""Runs the scenarios on hosts that are network namespaces: scripts/hosts_check --help"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tests.hosts import kv
from tests.hosts.kv_scenarios import SCENARIOS as KV_SCENARIOS
from tests.hosts.load import told_questions
from tests.hosts.network import unavailable
from tests.hosts.rig import NULL, VLLM, Rig, same_clocks
from tests.hosts.scenarios import SCENARIOS, play


async def run(wanted: list[str], directory: Path) -> int:
    """Returns how many scenarios failed."""
    failed = 0
    known = told_questions()
    async with Rig(directory, NULL) as rig:
        _say(f"the hosts are up; logs in {directory}")
        for name in wanted:
            began = time.monotonic()
            said: list[str] = []
            trouble = await play(rig, SCENARIOS[name], known, said.append)
            failed += bool(trouble)
            verdict = "; ".join(trouble or ["right", *said])
            _say(f"{name:36} {time.monotonic() - began:6.1f} s  {verdict}")
    return failed


async def run_engines(wanted: list[str], directory: Path) -> int:
    """As `run`, with real engines and the scenarios of `kv_scenarios.py`."""
    right = await kv.plain_answers(directory)
    async with Rig(directory, VLLM) as rig:
        _say(f"the hosts are up; logs in {directory}")
        scenarios = {name: KV_SCENARIOS[name] for name in wanted}
        return await kv.play_all(rig, right, scenarios, _say)


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
        "0: every answer was right and no job was lost; 1: not; 2: it cannot run here.",
        epilog=f"Scenarios: {', '.join(SCENARIOS)}. With --engines: {', '.join(KV_SCENARIOS)}.",
    )
    parser.add_argument(
        "--scenario", action="append", metavar="NAME", help="one of those below; default: all"
    )
    parser.add_argument(
        "--engines",
        action="store_true",
        help="instead: two Frontends, two decode and two prefill workers with vLLM and the tiny"
        " model on the CPU, KV over TCP between the hosts; answers are compared with"
        " those of one plain vLLM server; also: every block comes back. About 35 minutes; 8 GiB",
    )
    parser.add_argument("--directory", type=Path, help="keeps logs and state here")
    options = parser.parse_args()
    if why := unavailable():
        print(f"error: {why}", file=sys.stderr)
        return 2
    known = list(KV_SCENARIOS if options.engines else SCENARIOS)
    wanted = options.scenario or known
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--scenario {unknown[0]}: unknown; known: {', '.join(known)}")
    if why := same_clocks():
        print(f"note: {why}; they are the same here", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hosts-") as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        playing = run_engines(wanted, directory) if options.engines else run(wanted, directory)
        try:
            failed = asyncio.run(_until_told(playing))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

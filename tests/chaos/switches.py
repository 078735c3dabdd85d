"""`scripts/switches`: changes the roles of workers and removes workers, many times under load.

Real processes, servers, supervisor and Frontend; the engines compute nothing, so an answer that is
wrong by one token is seen at once. With --vllm they are vLLM's, of the tiny model, in workers that
keep their engine when they change their role; what is right is what the graph answered before.
Exit codes: 0 no request was lost, no answer wrong, and nothing has grown; 1 otherwise; 2 bad usage;
130 by Ctrl-C, after the report of what was done.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dynamo_lite.cli.drain import Watch, pick
from dynamo_lite.cli.listing import find_place
from dynamo_lite.cli.switch import Switcher
from dynamo_lite.protocol.planner import Add, Counts, Remove, SwitchState
from dynamo_lite.runtime.supervisor_client import SupervisorClient
from tests.chaos.client import Broken, Failed, Refused, ask
from tests.process.command import VLLM_PATIENCE_S, Serving, serving
from tests.process.switch_graph import told
from tests.vllm.asking import prompt_ids
from tests.vllm.graph import descendants_of

GRAPH = "tests.process.switch_graph:Served"
D, P = "VllmWorker", "PrefillWorker"
_TOKENS = 40
_WAIT_S = 300.0
#: A switch or a removal while nothing is measured: caches fill, libraries are loaded.
_WARM = 2
#: What may have been added to the resident memory, and to the open files, of one process.
_MOST_MIB, _MOST_FILES = {"supervisor": 8.0, "Frontend": 48.0}, 4
#: Of vLLM's engine and its component; a copy of its KV alone would be 128.
_MOST_WORKER_MIB = 48.0
#: Different prompts with --vllm: half of them are long enough for a prefill worker.
_PROMPTS = 24


@dataclass(frozen=True)
class Kind:
    """A graph, and what is asked of it."""

    graph: str
    options: tuple[str, ...]
    prompt: Callable[[int], list[int]]
    #: Tokens of the answer to a prompt; None: they are asked for before anything changes.
    answer: Callable[[list[int]], list[int]] | None


def _long_and_short(number: int) -> list[int]:
    which = number % _PROMPTS
    return prompt_ids(700 + 40 * which if which % 2 else 30 + which, seed=which)


NULL = Kind(
    GRAPH,
    (
        *("-f", "configs/agg.yaml", "--Frontend.port=0", "--Graph.devices=5"),
        *(f"--{name}.ServiceArgs.devices=1" for name in (D, P)),
        *(f"--{D}.ServiceArgs.workers=3", f"--{P}.ServiceArgs.workers=2"),
    ),
    lambda number: [number % 400 + 5, *range(5, 25)],
    lambda prompt: [told(prompt, position) for position in range(_TOKENS)],
)
VLLM = Kind(
    "graphs.disagg:Frontend",
    (
        *("-f", "configs/disagg.yaml", "--Frontend.port=0", f"--{D}.ServiceArgs.workers=2"),
        *(f"--{name}.switchable=true" for name in (D, P)),
    ),
    _long_and_short,
    None,
)


@dataclass
class Tally:
    """What has happened to the requests and to the processes."""

    requests: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    #: Seconds by kind of change.
    took: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    #: How the switches have ended, as the supervisor says.
    switches: list[SwitchState] = field(default_factory=list[SwitchState])
    forced: int = 0
    #: Why not all changes were made; empty if they were.
    ended_early: str = ""
    #: Process to (MiB, open files) after each change.
    sizes: dict[str, list[tuple[float, int]]] = field(
        default_factory=dict[str, list[tuple[float, int]]]
    )

    def note(self, kind: str, began: float) -> None:
        self.took.setdefault(kind, []).append(time.monotonic() - began)

    def measure(self, pids: dict[str, int]) -> None:
        for name, pid in pids.items():
            self.sizes.setdefault(name, []).append((_mib(pid), len(os.listdir(f"/proc/{pid}/fd"))))

    def growth(self) -> dict[str, tuple[float, float]]:
        """By process: MiB and open files that the last quarter of the changes has more than the
        first one, as medians."""
        found: dict[str, tuple[float, float]] = {}
        for name, sizes in self.sizes.items():
            part = max(len(sizes) // 4, 1)
            first, last = (
                [statistics.median(one) for one in zip(*some, strict=True)]
                for some in (sizes[:part], sizes[-part:])
            )
            found[name] = (last[0] - first[0], last[1] - first[1])
        return found

    def failures(self) -> list[str]:
        found = [f"{kind}: {n}" for kind, n in self.requests.items() if kind in ("lost", "wrong")]
        for name, (mib, files) in self.growth().items():
            if mib > _MOST_MIB.get(name, _MOST_WORKER_MIB) or files > _MOST_FILES:
                found.append(f"{name} has grown by {mib:.1f} MiB and {files:g} open files")
        return [*found, self.ended_early] if self.ended_early else found


class Storm:
    def __init__(self, graph: Serving, kind: Kind, port: int, clients: int, tally: Tally):
        self._graph, self._port, self._clients, self.tally = graph, port, clients, tally
        self._kind, self._right = kind, dict[tuple[int, ...], list[int]]()
        self._state_dir = graph.state_dir
        self._place = find_place(self._state_dir, None, None)
        run = graph.run_json()
        front = next(p for p in run["processes"] if p["service"] == "Frontend")
        self._pids = {"supervisor": run["pid"], "Frontend": front["pid"]}
        if kind.answer is None:
            workers = [p["pid"] for p in run["processes"] if p["service"] in (D, P)]
            for pid in [one for worker in workers for one in (worker, *descendants_of(worker))]:
                self._pids[f"worker process {pid}"] = pid
        self._numbers = itertools.count()

    async def run(self, switches: int, removals: int) -> None:
        """Both kinds in turn, under load."""
        stop = asyncio.Event()
        if self._kind.answer is None:
            for number in range(_PROMPTS):
                prompt = self._kind.prompt(number)
                self._right[tuple(prompt)] = (await ask(self._port, _body(prompt))).tokens[0]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._clients):
                tasks.create_task(self._ask_until(stop))
            try:
                directions = itertools.cycle([(D, P), (P, D)])
                for number in range(_WARM):
                    await self._switch(*next(directions))
                    if removals:
                        await self._replace(P if number % 2 else D)
                self.tally.took.clear()
                self.tally.switches.clear()
                plan = self._plan(switches, removals)
                for number, kind in enumerate(plan):
                    if kind == "switch":
                        await self._switch(*next(directions))
                    else:
                        await self._replace(P if number % 6 == 5 else D)
                    self.tally.measure(self._pids)
                    if number % 10 == 9:
                        _say(f"{number + 1} changes; requests {dict(self.tally.requests)}")
            finally:
                stop.set()

    @staticmethod
    def _plan(switches: int, removals: int) -> list[str]:
        """Both kinds, spread evenly."""
        moments = [((n + 0.5) / switches, "switch") for n in range(switches)]
        moments += [((n + 0.5) / removals, "removal") for n in range(removals)]
        return [kind for _, kind in sorted(moments)]

    async def _switch(self, giver: str, taker: str) -> None:
        began = time.monotonic()
        switcher = Switcher(self._state_dir, giver, taker, lambda _: None)
        await switcher.switch(await switcher.choose(1, 0), wait_s=_WAIT_S)
        self.tally.forced += switcher.forced
        self.tally.note(f"switch {giver} to {taker}", began)
        self.tally.switches.append((await self._supervisor(Counts())).switches[-1])

    async def _replace(self, component: str) -> None:
        """Removes the cheapest one, and adds one."""
        began = time.monotonic()
        choice = await pick(self._place, component, force=False)
        watch = Watch(self._place, choice.record, lambda _: None)
        lease_id = choice.record.lease_id
        await self._order(lambda v: Remove(component=component, lease_id=lease_id, version=v))
        await watch.until_gone(_WAIT_S)
        self.tally.forced += watch.forced
        self.tally.note(f"removal of {component}", began)
        # The supervisor knows of the end, and has the device, a moment later.
        await _until(self._settled)
        await self._order(lambda v: Add(component=component, version=v))
        await _until(self._settled)

    async def _settled(self) -> bool:
        counts = (await self._supervisor(Counts())).counts
        return not any(one.starting or one.draining for one in counts.values())

    async def _order(self, order: Callable[[int], Any]) -> None:
        await self._supervisor(order((await self._supervisor(Counts())).version + 1))

    async def _supervisor(self, request: Any) -> Any:
        async with SupervisorClient(self._state_dir, 20) as client:
            return await client.order(request)

    async def _ask_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = next(self._numbers)
            prompt = self._kind.prompt(number)
            try:
                answer = await ask(self._port, _body(prompt))
            except Refused as exc:
                self.tally.requests["refused"] += 1
                await asyncio.sleep(exc.retry_after_s)
                continue
            except (Broken, Failed, TimeoutError) as exc:
                self.tally.requests["lost"] += 1
                self.tally.problems.append(f"request {number}: {exc!r}")
                continue
            known = self._kind.answer
            wanted = self._right[tuple(prompt)] if known is None else known(prompt)
            right = answer.tokens == {0: wanted} and answer.finish == {0: "length"}
            self.tally.requests["right" if right else "wrong"] += 1
            if not right:
                self.tally.problems.append(f"request {number}: {answer}")


def _body(prompt: list[int]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not await condition():
            await asyncio.sleep(0.1)


def _mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1]) / 1024


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report(tally: Tally) -> str:
    lines = ["requests: " + ", ".join(f"{n} {kind}" for kind, n in tally.requests.items())]
    for kind, times in sorted(tally.took.items()):
        lines.append(
            f"{kind}: {len(times)}, seconds median {statistics.median(times):.1f},"
            f" most {max(times):.1f}"
        )
    lines += _phases(tally.switches)
    lines.append(f"workers whose grace ended before their work: {tally.forced}")
    for name, (mib, files) in tally.growth().items():
        at_end = tally.sizes[name][-1]
        lines.append(
            f"{name}: {at_end[0]:.0f} MiB and {at_end[1]} open files at the end;"
            f" {mib:+.1f} MiB and {files:+g} files from the first to the last quarter"
        )
    failures = tally.failures()
    return "\n".join([*lines, *tally.problems[:10], *(failures or ["no failure"])])


def _phases(switches: list[SwitchState]) -> list[str]:
    """A line for each level: how many, and how long each phase took."""
    lines: list[str] = []
    for level in sorted({one.level for one in switches}):
        those = [one for one in switches if one.level == level]
        phases = {
            "drain": [one.drain_s for one in those],
            "engine changed": [one.change_s for one in those],
            "until ready": [one.start_s - one.change_s for one in those],
        }
        times = ", ".join(
            f"{name} median {statistics.median(found):.2f} s, most {max(found):.2f} s"
            for name, found in phases.items()
        )
        lines.append(f"level {level}: {len(those)} switches: {times}")
    lines += [f"not kept: {one.not_kept}" for one in switches if one.not_kept]
    return lines


def _as_json(tally: Tally) -> dict[str, Any]:
    return {
        "requests": dict(tally.requests),
        "seconds": tally.took,
        "switches": [msgspec.to_builtins(one) for one in tally.switches],
        "forced": tally.forced,
        "sizes": tally.sizes,
        "failures": tally.failures(),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/switches", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--switches", type=int, default=20, help="decode to prefill and back (20)")
    parser.add_argument("--removals", type=int, default=20, help="each followed by a start (20)")
    parser.add_argument("--clients", type=int, default=6, help="that ask at the same time (6)")
    parser.add_argument("--vllm", action="store_true", help="vLLM's engines, which are kept")
    parser.add_argument("--json", type=Path, help="write the report there")
    parser.add_argument("--directory", type=Path, help="keep state and logs there")
    args = parser.parse_args()
    if args.switches < 0 or args.removals < 0 or args.switches + args.removals < 4:
        parser.error("at least 4 switches and removals together")
    if args.clients < 1:
        parser.error("--clients is 1 at least")
    return args


def main() -> int:
    args = _arguments()
    tally, interrupted = Tally(), False
    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-lite-switches-"))
        )
        kind = VLLM if args.vllm else NULL
        graph = stack.enter_context(serving(directory / "state", *kind.options, graph=kind.graph))
        url = graph.wait_line("ready http", VLLM_PATIENCE_S).split()[1]
        _say(f"{url} is ready")
        storm = Storm(graph, kind, urlsplit(url).port or 0, args.clients, tally)
        try:
            asyncio.run(storm.run(args.switches, args.removals))
        except KeyboardInterrupt:
            interrupted = True
        except ExceptionGroup as group:
            tally.ended_early = f"the run ended early: {group.exceptions[0]!r}"
    if tally.sizes:
        print(_report(tally))
    else:
        print("\n".join(["nothing was measured", *tally.problems, *tally.failures()]))
    if args.json:
        args.json.write_text(json.dumps(_as_json(tally), indent=2) + "\n")
    if interrupted:
        return 130
    return 1 if tally.failures() or not tally.sizes else 0


if __name__ == "__main__":
    sys.exit(main())

"""`scripts/planner_check`: kills the planner in each phase of a change, under load.

Real processes, and vLLM engines with the tiny model. One plain vLLM server says first what is
right. Then graphs.disagg_planner starts with one decode and one prefill worker. A step of load
makes the planner add one of each; after it the planner removes them again. Meanwhile the
planner that leads is killed (SIGKILL) once in each phase that its records in etcd show: a change
is ordered or asked for, a worker is added or removed, in each role, or nothing is under way.
With --null the engines compute nothing, so it is known what is right, and the prefill workers are
stand-ins.

It takes 6 to 8 minutes on two cores, 2 with --null, and fails when

  - an answer is not that of the plain server, or a request is lost;
  - a role has fewer ready workers than one, or more than two workers, at any time;
  - a role does not grow, or is not back at one worker in the end;
  - a process other than the planner is restarted, or killed because its drain takes too long;
  - a log has an error, or an engine still holds blocks or jobs at the end;
  - the planner was killed fewer than 4 times. A phase that was too short to be hit is reported,
    and is no failure.

Exit codes: 0 all is well; 1 otherwise, with a line for each violation; 2 bad usage; 130 by
Ctrl-C, which stops all processes; a second one kills them.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.runtime.etcd.store import EtcdStore
from tests.chaos.arena import Say
from tests.chaos.client import Answer
from tests.chaos.forward_storm import Known, greedy_questions, right_answers
from tests.chaos.load import Load
from tests.chaos.planner_sight import FEWEST, IDLE, MOST, PLANNER, ROLES, Plan, Sight, due
from tests.chaos.questions import Question
from tests.process.roles_graph import told
from tests.vllm.graph import NAMESPACE, Graph

#: One decode worker is enough for five requests.
_OPTIONS = (
    *(f"--Planner.{role}-max={MOST}" for role in ("prefill", "decode")),
    f"--Planner.budget-devices={2 * MOST}",
)
_CONCURRENCY = 8  # the least that is sure to need a second decode worker
#: Prompts that are longer are prefilled remotely: `max-local-prefill-length`.
_LONG_TOKENS = 512

_READY_S = 300.0
#: How much longer than asked for the load may last, until both roles have grown.
_GROWTH_S = 300.0
#: So long at least the load lasts after that.
_GROWN_S = 30.0
_BACK_S = 300.0
_SETTLED_S = 60.0
_LOOK_S = 0.2
#: The logs are read less often.
_LOOKS_PER_READING = 10
_NEWS_S = 15.0
_KILLED = re.compile(r"still there after|killing it")


@dataclass(frozen=True)
class Kind:
    """A graph and its options, with a planner that decides in seconds.

    plain: a plain vLLM server says what is right, and the graph's engines say what they hold.
    """

    graph: tuple[str, str]
    options: tuple[str, ...]
    plain: bool


VLLM = Kind(
    ("graphs.disagg_planner:Frontend", "configs/disagg_planner.yaml"),
    (
        *_OPTIONS,
        *("--Planner.tick-s=1", "--Planner.down-window-s=20", "--Planner.cooldown-s=5"),
        *("--Planner.start-s=10", "--Graph.lease-ttl-s=60", "--VllmWorker.max-num-seqs=6"),
    ),
    plain=True,
)
NULL = Kind(
    ("tests.chaos.planner_graph:Frontend", "configs/agg.yaml"),
    (
        *_OPTIONS,
        *("--Planner.tick-s=0.3", "--Planner.down-window-s=4", "--Planner.cooldown-s=1"),
        *("--Planner.start-s=2", "--Graph.lease-ttl-s=10"),
    ),
    plain=False,
)


class Check:
    """A graph with a planner under a step of load, and the kills of its planner."""

    def __init__(self, graph: Graph, kind: Kind, sight: Sight, say: Say):
        self._graph, self._kind, self._sight, self._say = graph, kind, sight, say
        self._plan = Plan(NAMESPACE)
        self._struck_pid = 0
        self._shown = ""

    async def run(self, known: Known, concurrency: int, seconds: float) -> None:
        """Raises TimeoutError when the graph is not back in time."""
        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(self._follow_plan(), name="plan"),
                tasks.create_task(self._look(), name="look"),
            ]
            await self._step(known, concurrency, seconds)
            self._say("the load has ended; the planner is to remove workers")
            await self._until(self._is_back, _BACK_S, "one worker of each role, nothing under way")
            for task in watches:
                task.cancel()
        if self._kind.plain:
            await self._graph.settled(timeout_s=_SETTLED_S)

    async def _step(self, known: Known, concurrency: int, seconds: float) -> None:
        began = time.monotonic()
        load = Load(
            urlsplit(self._graph.url).port or 0,
            *known,
            clients=concurrency,
            pause_s=0,
            cancels=0,
        )
        self._sight.tally = load.tally
        async with load:
            try:
                grown = "both roles have grown"
                await self._until(lambda: self._sight.grown, seconds + _GROWTH_S, grown)
                end = max(began + seconds, time.monotonic() + _GROWN_S)
                limit_s = seconds + 2 * _GROWN_S
                await self._until(lambda: time.monotonic() >= end, limit_s, "the load's end")
            except BaseException:
                await load.abandon()
                raise

    async def _until(self, reached: Callable[[], bool], timeout_s: float, what: str) -> None:
        told = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                while not reached():
                    await asyncio.sleep(_LOOK_S)
                    if time.monotonic() - told > _NEWS_S:
                        told = time.monotonic()
                        self._tell()
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}") from None

    def _is_back(self) -> bool:
        """The planner is back, too."""
        processes = self._graph.processes()
        counts = {
            role: [p.state for p in processes if p.service == role and p.state != "stopped"]
            for role in ROLES
        }
        leads = [p.pid for p in processes if p.service == PLANNER and p.state == "ready"]
        return (
            all(states == ["ready"] * FEWEST for states in counts.values())
            and not self._plan.phases
            and self._plan.leader_pid in leads
        )

    async def _follow_plan(self) -> None:
        prefix = names.planner_prefix(NAMESPACE)
        async with EtcdStore(self._graph.etcd_url) as store, store.watch(prefix) as events:
            async for event in events:
                self._plan.apply(event)
                self._strike()
                self._show()

    async def _look(self) -> None:
        for look in itertools.count():
            self._sight.see(self._graph.processes())
            if look % _LOOKS_PER_READING == 0:
                self._sight.note_errors(self._graph.errors())
            self._strike()
            self._show()
            await asyncio.sleep(_LOOK_S)

    def _strike(self) -> None:
        """Kills the planner that leads if this phase is due; each process once."""
        pid = self._plan.leader_pid
        phase = due(self._plan.phases, self._sight.kills, idle=self._sight.grown)
        if not phase or pid in (0, self._struck_pid):
            return
        if pid not in [p.pid for p in self._graph.processes(PLANNER) if p.state == "ready"]:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._struck_pid = pid
            self._sight.kills[phase] += 1
            self._say(f"killed the planner: {phase}")

    def _show(self) -> None:
        """Says how many workers there are and what is under way, when that has changed."""
        now = f"{self._workers()}; {', '.join(self._plan.phases) or IDLE}"
        if now != self._shown:
            self._shown = now
            self._say(now)

    def _workers(self) -> str:
        entries = [p for p in self._graph.processes() if p.service in ROLES]
        return ", ".join(f"{p.service}-{p.instance} {p.state}" for p in entries)

    def _tell(self) -> None:
        tally = self._sight.tally
        self._say(
            f"asked {tally.requests}, right {tally.right}, wrong {tally.wrong},"
            f" lost {tally.lost.total()}, refused {tally.refused.total()};"
            f" planner killed {self._sight.kills.total()} times"
        )


def _questions() -> list[Question]:
    """Two long prompts for each short one, so that prefill workers are needed."""
    asked = greedy_questions()
    long = [one for one in asked if one.prompt_tokens > _LONG_TOKENS]
    short = [one for one in asked if one.prompt_tokens <= _LONG_TOKENS]
    return long + short[: len(long) // 2]


async def _known(kind: Kind, directory: Path, say: Say) -> Known:
    if kind.plain:
        return await right_answers(directory, say, _questions(), kind.graph)
    asked = greedy_questions()
    return asked, {one.name: _told(one.body) for one in asked}


def _told(body: dict[str, Any]) -> Answer:
    """What the null engines answer to a request."""
    count = body["max_tokens"]
    tokens = [told(body["prompt"], position) for position in range(count)]
    return Answer(tokens={0: tokens}, finish={0: "length"}, usage=count)


@contextlib.asynccontextmanager
async def _running(directory: Path, kind: Kind, sight: Sight) -> AsyncIterator[Graph]:
    """A ready graph. What its end and its logs say goes into `sight`."""
    graph = Graph(directory, kind.graph, kind.options)
    # From this thread: the kernel's death signal comes with the end of a thread.
    graph.start()
    try:
        await asyncio.to_thread(graph.wait_until, graph.is_ready, _READY_S)
        yield graph
    finally:
        if code := await asyncio.to_thread(graph.end):
            sight.trouble.append(f"serve ended with {code}")
        said = graph.output.splitlines()
        sight.said = [line.strip() for line in said if _KILLED.search(line)]
        sight.note_errors(graph.errors())
        sight.note_errors(
            f"serve: {line}" for line in said if " ERROR " in line or "Traceback" in line
        )


async def _check(args: argparse.Namespace, directory: Path, sight: Sight, say: Say) -> None:
    """Failures go into `sight`."""
    kind = NULL if args.null else VLLM
    try:
        known = await _known(kind, directory, say)
        say("starting the graph")
        async with _running(directory / "graph", kind, sight) as graph:
            say(f"{graph.url} is ready; {args.concurrency} requests at a time")
            try:
                await Check(graph, kind, sight, say).run(known, args.concurrency, args.seconds)
            finally:
                say("stopping the graph")
    except* (AssertionError, DynamoLiteError, OSError, TimeoutError) as group:
        sight.trouble += [f"the run ended early: {exc}" for exc in _leaves(group)]


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        leaf
        for exc in group.exceptions
        for leaf in (_leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc])
    ]


async def _interruptible(args: argparse.Namespace, directory: Path, sight: Sight, say: Say) -> bool:
    """Returns whether it was interrupted."""
    check = asyncio.create_task(_check(args, directory, sight, say), name="check")
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            os._exit(130)  # the kernel tells the children
        interrupted = True
        say("stopping in order; once more forces")
        check.cancel()

    loop = asyncio.get_running_loop()
    for kind in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(kind, interrupt)
    await asyncio.wait([check])
    if not check.cancelled() and (exc := check.exception()):
        raise exc
    return interrupted


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/planner_check",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=150.0,
        help="of load (150); longer, by 6 minutes at most, if a role has not grown 30 s before",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=16,
        help=f"requests at a time (16); {_CONCURRENCY} at least, fewer need one decode worker only",
    )
    parser.add_argument("--null", action="store_true", help="engines that compute nothing")
    parser.add_argument(
        "--directory", type=Path, help="keep state and logs there, in new folders plain and graph"
    )
    args = parser.parse_args()
    if args.seconds <= 0:
        parser.error("--seconds is more than 0")
    if args.concurrency < _CONCURRENCY:
        parser.error(f"--concurrency is {_CONCURRENCY} at least")
    if args.directory and (args.directory / "graph").exists():
        parser.error(f"--directory {args.directory}: an earlier run is there; take another one")
    return args


def main() -> int:
    args = _arguments()
    sight, began = Sight(), time.monotonic()

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"{minutes:02}:{seconds:02}  {line}", file=sys.stderr, flush=True)

    with contextlib.ExitStack() as stack:
        directory = args.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-lite-planner-"))
        )
        interrupted = asyncio.run(_interruptible(args, directory, sight, say))
    print(sight.report())
    if interrupted:
        print("\n".join([*sight.trouble, "interrupted"]))
        return 130
    violations = sight.violations()
    print("\n".join(violations or ["no violation"]))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())

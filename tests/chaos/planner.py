"""`scripts/planner_check`: kills the planner in each phase of a change, under load.

Real processes, and vLLM engines with the tiny model. One plain vLLM server says first what is
right. Then graphs.disagg_planner starts with one decode and one prefill worker. A step of load
makes the planner add one of each; after it the planner removes them again. Meanwhile the
planner that leads is killed (SIGKILL) once in each phase that its record in etcd shows: a worker
starts or has just been removed, in each role, or nothing is under way.

It takes 6 to 8 minutes on two cores, and fails when

  - an answer is not that of the plain server, or a request is lost;
  - a role has fewer ready workers than one, or more than two workers, at any time;
  - a role does not grow, or is not back at one worker in the end;
  - a process other than the planner is restarted, or killed because its drain takes too long;
  - a log has an error, or an engine still holds blocks or jobs at the end;
  - the planner was killed fewer than 4 times. A phase that was too short to be hit is no failure.

Exit codes: 0 all is well; 1 otherwise, with a line for each violation.
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
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import decode_json
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.planner import LeaderRecord, WantedRecord
from dynamo_lite.runtime.etcd.store import EtcdStore
from tests.chaos.cluster import DECODE, PREFILL
from tests.chaos.forward_storm import greedy_questions
from tests.chaos.load import Load, Tally
from tests.chaos.questions import Known, Question, right_answers
from tests.vllm.graph import NAMESPACE, Graph

_PLANNER, _ROLES = "Planner", (DECODE, PREFILL)
#: Workers of each role.
_FEWEST, _MOST = 1, 2
#: While no change is under way.
_IDLE = "nothing under way"
_FEWEST_KILLS = 4

_GRAPH = ("graphs.disagg_planner:Frontend", "configs/disagg_planner.yaml")
#: The planner decides in seconds. One decode worker is enough for five requests.
_OPTIONS = (
    *(f"--Planner.{role}-max={_MOST}" for role in ("prefill", "decode")),
    *(f"--Planner.budget-devices={2 * _MOST}", "--VllmWorker.max-num-seqs=6"),
    *("--Planner.tick-s=1", "--Planner.down-window-s=20", "--Planner.cooldown-s=5"),
    *("--Planner.start-s=10", "--Graph.lease-ttl-s=60"),
)
_CONCURRENCY = 16
#: Prompts that are longer are prefilled remotely: `max-local-prefill-length`.
_LONG_TOKENS = 512

_READY_S = 300.0
#: Until both roles have grown, and how long the load lasts after that.
_GROWTH_S, _GROWN_S = 450.0, 60.0
_BACK_S = 300.0
_SETTLED_S = 60.0
_LOOK_S = 0.2
#: The logs are read less often.
_LOOKS_PER_READING = 10
_ERRORS_SHOWN = 10
_KILLED = re.compile(r"still there after|killing it")


@dataclass
class Check:
    """A graph with a planner under a step of load, and the kills of its planner.

    kills: by phase. fewest, most: ready workers by role. trouble: what went wrong.
    """

    graph: Graph
    known: Known
    kills: Counter[str] = field(default_factory=Counter[str])
    fewest: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_ROLES, _FEWEST))
    most: Counter[str] = field(default_factory=Counter[str])
    present: Counter[str] = field(default_factory=Counter[str])
    tally: Tally = field(default_factory=Tally)
    errors: dict[str, None] = field(default_factory=dict[str, None])
    _restarts: dict[str, int] = field(default_factory=dict[str, int])
    _restarted: Counter[str] = field(default_factory=Counter[str])
    _struck_pid: int = 0
    _leader_pid: int = 0
    _phases: list[str] = field(default_factory=list[str])

    async def run(self) -> None:
        """Raises TimeoutError when the graph is not back in time."""
        port = urlsplit(self.graph.url).port or 0
        load = Load(port, *self.known, clients=_CONCURRENCY, pause_s=0, cancels=0)
        self.tally = load.tally
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(self._look(), name="look")
            async with load:
                try:
                    await _until(lambda: self.grown, _GROWTH_S, "both roles have grown")
                    await asyncio.sleep(_GROWN_S)
                except BaseException:
                    await load.abandon()
                    raise
            _say("the load has ended; the planner is to remove workers")
            await _until(self._is_back, _BACK_S, "one worker of each role, nothing under way")
            looking.cancel()
        await self.graph.settled(timeout_s=_SETTLED_S)

    @property
    def grown(self) -> bool:
        """Whether each role has had more than its minimum."""
        return all(self.most[role] > _FEWEST for role in _ROLES)

    async def _look(self) -> None:
        shown = ""
        async with EtcdStore(self.graph.etcd_url) as store:
            for look in itertools.count():
                await self._read_plan(store)
                self._see()
                self._strike()
                if look % _LOOKS_PER_READING == 0:
                    self.note_errors(self.graph.errors())
                workers = [p for p in self.graph.processes() if p.service in _ROLES]
                now = ", ".join(f"{p.service}-{p.instance} {p.state}" for p in workers)
                now += f"; {', '.join(self._phases) or _IDLE}"
                if now != shown:
                    shown = now
                    _say(f"{now}; {self.tally.right} right answers")
                await asyncio.sleep(_LOOK_S)

    async def _read_plan(self, store: EtcdStore) -> None:
        """The leader, and the phases of the changes that are under way."""
        found = await store.get_prefix(names.planner_prefix(NAMESPACE))
        leader = found.get(names.planner_leader_key(NAMESPACE))
        lease = f"{decode_json(leader, LeaderRecord).lease_id:x}" if leader is not None else None
        pids = (p.pid for p in self.graph.processes() if p.lease == lease)
        self._leader_pid = next(pids, 0)
        wanted = found.get(names.planner_wanted_key(NAMESPACE))
        record = WantedRecord() if wanted is None else decode_json(wanted, WantedRecord)
        states = [(p.service, p.state) for p in self.graph.processes()]
        self._phases = [
            f"{component}: {'starts' if (component, 'starting') in states else 'drains'}"
            for component in sorted(record.roles)
            if {(component, "starting"), (component, "draining")}.intersection(states)
        ]

    def _see(self) -> None:
        processes = self.graph.processes()
        for role in _ROLES:
            states = [p.state for p in processes if p.service == role]
            ready = states.count("ready")
            there = sum(state not in ("stopped", "failed", "draining") for state in states)
            self.fewest[role] = min(self.fewest[role], ready)
            self.most[role] = max(self.most[role], ready)
            self.present[role] = max(self.present[role], there)
        for process in processes:
            name, restarts = f"{process.service}-{process.instance}", process.restarts
            before = self._restarts.get(name, 0)
            # A worker that gets the number of one that is gone begins again at 0.
            self._restarted[name] += restarts - before if restarts >= before else restarts
            self._restarts[name] = restarts
            if process.state == "failed":
                self.note_errors([f"{name}: could not be started"])

    def note_errors(self, lines: Iterable[str]) -> None:
        """The log of a worker is emptied when another gets its number."""
        self.errors |= dict.fromkeys(lines)

    def _strike(self) -> None:
        """Kills the planner that leads in a phase in which none was killed; each process once."""
        pid = self._leader_pid
        phases = self._phases or ([_IDLE] if self.grown else [])
        phase = next((one for one in phases if one not in self.kills), "")
        ready = [p.pid for p in self.graph.processes(_PLANNER) if p.state == "ready"]
        if phase and pid != self._struck_pid and pid in ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self._struck_pid = pid
                self.kills[phase] += 1
                _say(f"killed the planner: {phase}")

    def _is_back(self) -> bool:
        """The planner is back, too."""
        processes = [p for p in self.graph.processes() if p.state != "stopped"]
        counts = [[p.state for p in processes if p.service == role] for role in _ROLES]
        leads = [p.pid for p in processes if p.service == _PLANNER and p.state == "ready"]
        back = counts == [["ready"] * _FEWEST] * len(_ROLES)
        return back and not self._phases and self._leader_pid in leads

    def violations(self) -> list[str]:
        tally = self.tally
        found = [f"lost requests: {n}, {kind}" for kind, n in tally.lost.items()]
        if tally.wrong or tally.open or not tally.right:
            found.append(f"{tally.wrong} wrong, {tally.open} not ended, {tally.right} right")
        for role in _ROLES:
            if self.fewest[role] < _FEWEST or self.present[role] > _MOST or not self.grown:
                found.append(
                    f"{role}: {self.fewest[role]} to {self.most[role]} ready,"
                    f" {self.present[role]} at a time"
                )
        for name, restarts in self._restarted.items():
            killed = self.kills.total() if name.startswith(_PLANNER) else 0
            if restarts != killed:
                found.append(f"{name}: restarted {restarts} times, killed here {killed} times")
        if self.kills.total() < _FEWEST_KILLS:
            found.append(f"planner: killed {self.kills.total()} times, fewer than {_FEWEST_KILLS}")
        return [*found, *list(self.errors)[:_ERRORS_SHOWN], *tally.examples]


async def _until(reached: Callable[[], bool], timeout_s: float, what: str) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not reached():
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise TimeoutError(f"not within {timeout_s:g} s: {what}") from None


def _questions() -> list[Question]:
    """Two long prompts for each short one, so that prefill workers are needed."""
    asked = greedy_questions()
    long = [one for one in asked if one.prompt_tokens > _LONG_TOKENS]
    short = [one for one in asked if one.prompt_tokens <= _LONG_TOKENS]
    return long + short[: len(long) // 2]


async def _check(directory: Path) -> list[str]:
    """What was violated."""
    known = await right_answers(directory, _questions(), _GRAPH, _say)
    _say("starting the graph")
    graph = Graph(directory / "graph", _GRAPH, _OPTIONS)
    check, trouble = Check(graph, known), list[str]()
    # From this thread: the kernel's death signal comes with the end of a thread.
    graph.start()
    try:
        await asyncio.to_thread(graph.wait_until, graph.is_ready, _READY_S)
        await check.run()
    except* (AssertionError, DynamoLiteError, OSError, TimeoutError) as group:
        trouble += [f"the run ended early: {exc}" for exc in group.exceptions]
    finally:
        _say("stopping the graph")
        if code := await asyncio.to_thread(graph.end):
            trouble.append(f"serve ended with {code}")
    said = graph.output.splitlines()
    trouble += [f"the supervisor had to kill: {line}" for line in said if _KILLED.search(line)]
    check.note_errors(graph.errors())
    check.note_errors(line for line in said if " ERROR " in line or "Traceback" in line)
    for phase, kills in check.kills.items():
        _say(f"{kills:>4}  {phase}")
    return [*check.violations(), *trouble]


_BEGAN = time.monotonic()


def _say(line: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - _BEGAN), 60)
    print(f"{minutes:02}:{seconds:02}  {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/planner_check",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, help="keep state and logs there, a new folder")
    given = parser.parse_args().directory
    with tempfile.TemporaryDirectory(prefix="dynamo-lite-planner-") as temporary:
        violations = asyncio.run(_check(given or Path(temporary)))
    print("\n".join(violations or ["no violation"]))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())

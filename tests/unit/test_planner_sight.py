"""How the planner's process interprets its observations: loads, changes, workers that leave."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_lite.cli import drain
from dynamo_lite.cli.listing import Place
from dynamo_lite.planner.observation import Observation, Observed, decode_load
from dynamo_lite.planner.planner import Planner
from dynamo_lite.planner.policy.inputs import DecodeLoad, PrefillLoad, Role
from dynamo_lite.protocol.planner import RoleCounts, WantedRecord
from dynamo_lite.runtime.overview.metrics import Samples
from dynamo_lite.runtime.overview.model import Decisions, Latency, LiveProcess, Overview, Tokens
from dynamo_lite.runtime.overview.observer import Observer
from tests.builders import endpoint_record
from tests.contract.planning import D, FakeSupervisor, P
from tests.twins.servers import MemoryStore

SEEN = Overview(at=0.0, namespace="n", rate_s=1.0, latency_s=1.0, itl=Latency())


class Graph:
    """What an observation finds, `tick_s` after the last time: workers by their names, and what
    their metrics say. A worker without metrics did not respond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.tick_s = 100.0, 5.0
        self.workers: dict[str, LiveProcess] = {}
        self.metrics: dict[str, dict[str, float] | None] = {}
        self.seen = SEEN
        observer = Observer(MemoryStore(), "n", lambda what: None, lambda: 0.0, None)
        self.observation = Observation(observer, lambda: self.now)

        async def look(observer: Observer) -> Overview:
            observer.pages = {
                str(int(worker.lease, 16)): _page(self.metrics[name])
                for name, worker in self.workers.items()
            }
            return msgspec.structs.replace(self.seen, workers=tuple(self.workers.values()))

        monkeypatch.setattr(Observer, "look", look)

    def worker(self, name: str, component: str = D, **metrics: float) -> None:
        self.workers[name] = LiveProcess(
            component=component,
            instance=0,
            lease=f"{len(self.workers) + 10:x}",
            state="ready",
            running=2,
            waiting=3,
            kv_usage=0.5,
        )
        self.metrics[name] = metrics

    async def look(self) -> Observed:
        self.now += self.tick_s
        return await self.observation.look()


def _page(metrics: dict[str, float] | None) -> Samples | None:
    if metrics is None:
        return None
    return {(f"dynamo_lite_prefill_{name}", ()): value for name, value in metrics.items()}


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    return Graph(monkeypatch)


async def test_demand_is_the_growth_of_counters_over_fifteen_seconds(graph: Graph):
    graph.worker("a", asked_tokens_total=1e6, overflow_tokens_total=500, outstanding_tokens=30)
    graph.worker("b", asked_tokens_total=0, overflow_tokens_total=0, outstanding_tokens=12)
    first = (await graph.look()).prefill
    assert first.asked_per_s is first.refused_per_s is first.rate is None
    assert first.backlog == 42
    for tick in range(1, 5):
        for name in ("a", "b"):
            graph.metrics[name]["asked_tokens_total"] += 100 * tick  # type: ignore[index]
        graph.metrics["a"]["overflow_tokens_total"] += 30  # type: ignore[index]
        load = (await graph.look()).prefill
    # Of the last three ticks.
    assert load.asked_per_s == pytest.approx(2 * 900 / 15)
    assert load.refused_per_s == pytest.approx(90 / 15)


async def test_a_restart_and_a_worker_that_joins_are_no_demand(graph: Graph):
    graph.worker("a", asked_tokens_total=1e6, overflow_tokens_total=1e6)
    await graph.look()
    # The same process with new counters, a new one, and one that has left.
    graph.metrics["a"] = {"asked_tokens_total": 50.0, "overflow_tokens_total": 0.0}
    graph.worker("b", asked_tokens_total=7e5, overflow_tokens_total=7e5)
    load = (await graph.look()).prefill
    assert (load.asked_per_s, load.refused_per_s) == (10, 0)
    del graph.workers["a"]
    load = (await graph.look()).prefill
    assert (load.asked_per_s, load.refused_per_s) == (5, 0)


async def test_what_was_counted_while_a_worker_did_not_respond_is_no_demand(graph: Graph):
    graph.worker("a", asked_tokens_total=0.0, overflow_tokens_total=0.0)
    graph.worker("b", asked_tokens_total=0.0, overflow_tokens_total=0.0)
    await graph.look()
    graph.metrics |= {"a": {"asked_tokens_total": 100.0}, "b": None}
    part = (await graph.look()).prefill
    assert part.asked_per_s == 20 and part.refused_per_s is None
    graph.metrics["b"] = {"asked_tokens_total": 9e9}
    load = (await graph.look()).prefill
    assert (load.asked_per_s, load.refused_per_s) == (10, 0)
    graph.metrics |= {"a": None, "b": None}
    unknown = (await graph.look()).prefill
    assert unknown.asked_per_s is unknown.backlog is None
    graph.metrics |= {"a": {"asked_tokens_total": 300.0}, "b": {"asked_tokens_total": 9e9}}
    assert (await graph.look()).prefill.asked_per_s is None
    graph.metrics["a"] = {"asked_tokens_total": 400.0}
    assert (await graph.look()).prefill.asked_per_s == 20


async def test_the_rate_is_tokens_for_busy_seconds_of_the_last_minute(graph: Graph):
    graph.worker("a", asked_tokens_total=0.0)
    graph.worker("p", P, written_tokens_total=1e6, busy_seconds_total=10.0)
    graph.worker("q", P, written_tokens_total=0.0, busy_seconds_total=0.0)
    assert (await graph.look()).prefill.rate is None
    assert (await graph.look()).prefill.rate is None, "nothing was written"
    graph.metrics["p"] = {"written_tokens_total": 1e6 + 6000, "busy_seconds_total": 12.0}
    graph.metrics["q"] = {"written_tokens_total": 3000, "busy_seconds_total": 1.0}
    assert (await graph.look()).prefill.rate == 3000
    graph.metrics["p"] = {"written_tokens_total": 400, "busy_seconds_total": 1.0}  # restarted
    assert (await graph.look()).prefill.rate == pytest.approx(9400 / 4)
    graph.tick_s = 61.0
    assert (await graph.look()).prefill.rate is None


async def test_rates_are_of_what_got_blocks_and_unknown_at_the_first_look(graph: Graph):
    verdicts = [("remote", 2.0), ("local", 1.0), ("passed", 9.0)]
    graph.worker("a")
    graph.seen = msgspec.structs.replace(
        SEEN,
        decisions=[Decisions(verdict=v, reason="", per_s=n, total=9) for v, n in verdicts],
        tokens=Tokens(per_s=900.0, mean_s=0.02),
    )
    load = (await graph.look()).decode
    assert (load.admitted_per_s, load.tokens_per_s, load.token_s) == (3.0, 900.0, 0.02)
    graph.seen = msgspec.structs.replace(graph.seen, rate_s=0.0)
    load = (await graph.look()).decode
    assert load.admitted_per_s is load.tokens_per_s is None


def planner_of(serving: int = 0, *, owns: bool = False) -> Planner:
    """serving: decode workers. owns: they are not another supervisor's."""
    planner = Planner({}, FakeSupervisor())
    found: Any = planner
    found._records = SimpleNamespace(wanted=WantedRecord(), why_not="")
    found._connector = SimpleNamespace(owns=lambda worker: owns)
    found._observer = SimpleNamespace(
        members={i: endpoint_record(i, D) for i in range(1, serving + 1)}
    )
    return planner


def test_workers_of_another_supervisor_count():
    seen = planner_of(3)._seen(observed_of(3), {D: RoleCounts(ready=1)})
    assert (seen.roles[Role.DECODE].others, seen.roles[Role.DECODE].count) == (3, 4)


@pytest.mark.parametrize(("serving", "starting"), [(3, 0), (2, 1), (0, 3), (5, 0)])
def test_who_has_registered_is_no_start_whatever_kubernetes_says(serving: int, starting: int):
    """Without NATS none is ready, and starts that take too long are withdrawn."""
    planner = planner_of(serving, owns=True)
    seen = planner._seen(observed_of(serving, "unwell"), {D: RoleCounts(starting=3, ready=0)})
    counts = seen.roles[Role.DECODE].counts
    assert (counts.starting, counts.ready) == (starting, 3 - starting)


def observed_of(serving: int, state: str = "ready") -> Observed:
    """Decode workers only."""
    workers = [
        LiveProcess(component=D, instance=0, lease=f"{one:x}", state=state)
        for one in range(1, serving + 1)
    ]
    both = {Role.PREFILL: [], Role.DECODE: workers}
    return Observed(prefill=PrefillLoad(), decode=DecodeLoad(), workers=both)


async def test_what_is_safe_to_kill_stays_so_until_it_has_work_again(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 10.0
    facts: dict[str, Any] = {"in_flight": 0}
    asked_age_s: float | None = 0.0

    def writers(asked_at: float) -> Any:
        return {7: None if asked_age_s is None else (frozenset(), asked_at - asked_age_s)}

    async def look(_members: Any, _certificates: Any) -> Any:
        return SimpleNamespace(facts={7: facts}, writers=writers)

    async def lives(_worker: Any) -> bool:
        return True

    async def members(*_: Any) -> list[Any]:
        return []

    monkeypatch.setattr(drain, "look", look)
    monkeypatch.setattr(drain, "lives", lives)
    monkeypatch.setattr(drain, "members", members)
    monkeypatch.setattr(drain, "time", SimpleNamespace(monotonic=lambda: now))
    leaving = drain._Watch(MemoryStore(), Place(etcd_url="", namespace="n"), endpoint_record(7, D))
    assert await leaving.harm() == ""
    # It does not respond any more, and its ledger neither.
    facts["in_flight"], asked_age_s = None, None
    assert await leaving.harm() == ""
    facts["in_flight"], now, asked_age_s = 1, 20.0, 0.0
    assert await leaving.harm()
    # Its ledger was asked before it became idle again: that says nothing.
    facts["in_flight"], now, asked_age_s = 0, 30.0, 5.0
    assert await leaving.harm()
    now, asked_age_s = 40.0, 5.0
    assert await leaving.harm() == "" and not leaving.forced
    facts["cut_off"] = 2
    assert (await leaving.look())[0].startswith("FORCED") and leaving.forced


# Sums of what decode workers report, and nothing for what is not

REMOTE = 2


def report(**changes: int | None) -> LiveProcess:
    told = {"running": 10, "waiting": 4, "max_running": 32, **changes}
    return LiveProcess(component="", instance=0, lease="", state="ready", kv_usage=0.5, **told)


def test_all_workers_together():
    load = decode_load([report(), report()], REMOTE)
    assert (load.running, load.waiting) == (20, 8)
    assert load.kv_used == 1.0
    # Two of those that wait have their blocks; each of the others needs what a running one has.
    assert load.queued == 6
    assert load.kv_waiting == pytest.approx(6 * 0.05)
    assert load.max_running == 32


def test_a_silent_worker_leaves_the_sums_incomplete():
    load = decode_load([report(), report(running=None)], REMOTE)
    assert load.running == 10
    assert load.waiting is load.queued is load.kv_waiting is None
    assert decode_load([report(running=None)], REMOTE).running is None


def test_it_may_not_be_known_who_waits_for_memory():
    load = decode_load([report()], None)
    assert load.kv_waiting is load.queued is None
    assert load.waiting == 4
    idle = decode_load([report(waiting=0)], None)
    assert (idle.queued, idle.kv_waiting) == (0, 0)

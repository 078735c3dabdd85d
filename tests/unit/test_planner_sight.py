"""How the planner's process interprets its observations: loads, changes, workers that leave."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dynamo_lite.planner import departure
from dynamo_lite.planner.departure import Departure, worker_of
from dynamo_lite.planner.observation import Observation, Observed
from dynamo_lite.planner.policy.drain import Safe, Unsafe
from dynamo_lite.planner.policy.inputs import DecodeLoad, PrefillLoad, Role, RoleSeen
from dynamo_lite.planner.roles import LastChanges, roles_seen
from dynamo_lite.protocol.planner import LeavingWorker, RoleCounts, WantedRecord, WantedWorkers
from dynamo_lite.runtime.clock import Clock
from dynamo_lite.runtime.overview.metrics import Samples
from dynamo_lite.runtime.overview.model import Decisions, Latency, LiveProcess, Overview, Tokens
from dynamo_lite.runtime.overview.observer import Observer
from tests.contract.planning import D, P
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
        host: Any = SimpleNamespace(
            store=MemoryStore(),
            spec=SimpleNamespace(namespace="n"),
            certificates=None,
            drops=lambda what: None,
            clock=Clock(monotonic=lambda: self.now),
        )
        self.observation = Observation(host)

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
            kv_tokens=1000,
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


async def test_who_waits_for_a_remote_prefill_has_blocks(graph: Graph):
    graph.worker("a", outstanding_jobs=2.0, outstanding_tokens=400.0)
    known = (await graph.look()).decode
    assert known.kv_waiting == pytest.approx(0.25)
    graph.metrics["a"] = None
    unknown = (await graph.look()).decode
    assert unknown.kv_waiting is None
    assert unknown.waiting == 3, "as it says at /health"


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


async def test_engines_without_remote_prefills_tell_of_none(graph: Graph):
    graph.worker("a")
    seen = await graph.look()
    assert seen.decode.kv_waiting == pytest.approx(0.75)
    assert seen.prefill.asked_per_s is seen.prefill.backlog is None


def test_the_age_of_a_change_does_not_depend_on_the_clock_of_who_made_it():
    now = 100.0
    changes = LastChanges(lambda: now)
    assert changes.of(P, None) is None
    ahead = WantedWorkers(count=2, up=True, by="", reason="", at=9e9)
    changes.of(P, ahead)
    now = 130.0
    last = changes.of(P, ahead)
    assert last is not None and (last.up, last.age_s) == (True, 30.0)
    last = changes.of(P, WantedWorkers(count=1, up=False, by="", reason="", at=1.0))
    assert last is not None and (last.up, last.age_s) == (False, 0.0)


def look_at(counts: RoleCounts, serving: int = 0, leaving: int = 0, before: int = 0) -> RoleSeen:
    """Decode workers. serving: foreign ones. before: how many others there were."""
    workers = [
        LiveProcess(component=D, instance=0, lease=f"{one:x}", state="ready")
        for one in range(1, serving + 1)
    ]
    observed = Observed(
        prefill=PrefillLoad(),
        decode=DecodeLoad(),
        workers={Role.PREFILL: [], Role.DECODE: workers},
    )
    left = tuple(LeavingWorker(lease_id=i, host="", status_url="") for i in range(90, 90 + leaving))
    role = WantedWorkers(count=2, up=False, by="", reason="", leaving=left)
    record, foreign = WantedRecord(roles={D: role}), range(1, serving + 1)
    changes = LastChanges(lambda: 0.0)
    seen = roles_seen(observed, {D: counts}, record, foreign, changes, {Role.DECODE: before})
    return seen[Role.DECODE]


@pytest.mark.parametrize(
    ("starting", "ready", "left"), [(1, 2, (0, 2)), (0, 3, (0, 2)), (2, 1, (1, 1)), (0, 0, (0, 0))]
)
def test_a_pod_that_drains_is_no_start(starting: int, ready: int, left: tuple[int, int]):
    """Its readiness fails."""
    counts = look_at(RoleCounts(starting=starting, ready=ready), leaving=1).counts
    assert ((counts.starting, counts.ready), counts.draining) == (left, 1)


@pytest.mark.parametrize(
    ("starting", "serving", "before", "others"),
    [(0, 3, 0, 3), (2, 3, 3, 3), (2, 5, 3, 3), (2, 3, 0, 1), (2, 2, 3, 2), (0, 2, 3, 2)],
)
def test_own_starts_hide_no_worker_of_another_supervisor(
    starting: int, serving: int, before: int, others: int
):
    """One that starts may be a member before its supervisor knows its lease."""
    assert look_at(RoleCounts(starting=starting), serving, before=before).others == others


async def test_a_leaving_worker_that_gets_work_again_is_idle_only_after_that(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 10.0
    facts: dict[str, Any] = {"in_flight": 0}
    asked_age_s = 0.0

    def writers(asked_at: float) -> Any:
        return {7: (frozenset(), asked_at - asked_age_s)}

    async def look(_members: Any, _certificates: Any) -> Any:
        return SimpleNamespace(facts={7: facts}, writers=writers)

    async def listens(_worker: Any) -> bool:
        return True

    monkeypatch.setattr(departure, "look", look)
    monkeypatch.setattr(departure, "listens", listens)
    worker = LeavingWorker(lease_id=7, host="", status_url="")
    leaving = Departure(worker_of(D, worker, "n"), lambda: now)
    assert isinstance(await leaving.look([]), Safe)
    facts["in_flight"], now = 1, 20.0
    assert isinstance(await leaving.look([]), Unsafe)
    # Its ledger was asked before it became idle again: that says nothing.
    facts["in_flight"], now, asked_age_s = 0, 30.0, 5.0
    assert isinstance(await leaving.look([]), Unsafe)
    now, asked_age_s = 40.0, 5.0
    assert isinstance(await leaving.look([]), Safe)

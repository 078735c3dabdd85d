"""That `scripts/planner_check` would notice: what it makes of good and bad runs."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.planner import ChangePhase, LeaderRecord, OperationRecord
from dynamo_lite.runtime.sealed_records import RecordSeals
from dynamo_lite.runtime.store import Delete, Put, Snapshot
from dynamo_lite.serve.run_state import ProcessState
from tests.builders import graph_secret
from tests.chaos.load import Tally
from tests.chaos.planner_sight import IDLE, PHASES, Plan, Sight, due

D, P = "VllmWorker", "PrefillWorker"
ADD, REMOVE = f"add {D}: asked", f"remove {P}: asked"


def workers(decode: str, prefill: str, planner_restarts: int = 0) -> list[ProcessState]:
    """States by role, and a planner."""
    return [
        ProcessState(service="Planner", instance=0, state="ready", restarts=planner_restarts),
        *(
            ProcessState(service=role, instance=number, state=state)
            for role, states in ((D, decode), (P, prefill))
            for number, state in enumerate(states.split())
        ),
    ]


def good() -> Sight:
    sight = Sight(tally=Tally(requests=9, right=9), kills=Counter(dict.fromkeys(PHASES, 1)))
    for decode, prefill in (
        ("ready", "ready"),
        ("ready starting", "ready"),
        ("ready ready", "ready ready"),
        ("draining ready", "ready ready"),
        ("stopped ready", "stopped ready"),
    ):
        sight.see(workers(decode, prefill, sight.kills.total()))
    return sight


def test_a_good_run_has_no_violation():
    assert good().violations() == []
    assert good().missed() == []


def spoil_answer(sight: Sight) -> None:
    sight.tally.right, sight.tally.wrong = 8, 1


def lose_request(sight: Sight) -> None:
    sight.tally.right, sight.tally.lost = 8, Counter({"broken connection": 1})


def leave_request(sight: Sight) -> None:
    sight.tally.right = 8


def ask_nothing(sight: Sight) -> None:
    sight.tally = Tally()


def miss_role(sight: Sight) -> None:
    del sight.at_end[P]


def go_below(sight: Sight) -> None:
    sight.see(workers("draining stopped", "ready", 9))
    sight.see(workers("ready", "ready", 9))


def not_grow(sight: Sight) -> None:
    sight.most[P] = 1


def add_twice(sight: Sight) -> None:
    sight.see(workers("ready starting starting", "ready", 9))
    sight.see(workers("ready", "ready", 9))


def not_come_back(sight: Sight) -> None:
    sight.see(workers("ready ready", "ready", 9))


def crash_worker(sight: Sight) -> None:
    """Another worker gets its number later."""
    crashed = ProcessState(service=D, instance=1, state="ready", restarts=1)
    sight.see([*workers("ready", "ready", 9), crashed])
    sight.see(workers("ready ready", "ready", 9))
    sight.see(workers("ready stopped", "ready", 9))


def crash_planner(sight: Sight) -> None:
    sight.restarts["Planner-0"] += 1


def not_start(sight: Sight) -> None:
    """The next one with its number starts."""
    sight.see(workers("ready", "ready failed", 9))
    sight.see(workers("ready", "ready ready", 9))
    sight.see(workers("ready", "ready stopped", 9))


def kill_worker(sight: Sight) -> None:
    sight.said = ["VllmWorker-0  still there after 110 s: killed"]


def not_kill(sight: Sight) -> None:
    sight.kills, sight.restarts["Planner-0"] = Counter({ADD: 3}), 3


def log_error(sight: Sight) -> None:
    """Its log is emptied later."""
    sight.note_errors(["VllmWorker-1.log: 12:00:00 ERROR VllmWorker-1 x: y"])
    sight.note_errors(["VllmWorker-1.log: 12:00:00 ERROR VllmWorker-1 x: y"])
    sight.note_errors([])


def be_late(sight: Sight) -> None:
    sight.trouble = ["the run ended early: not within 300 s: both roles have grown"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_answer, "wrong answers: 1"),
        (lose_request, "lost requests: 1, broken connection"),
        (leave_request, "requests that have not ended: 1"),
        (ask_nothing, "no request has had its answer"),
        (miss_role, "PrefillWorker: no worker was seen"),
        (go_below, "VllmWorker: only 0 ready, the minimum is 1"),
        (not_grow, "PrefillWorker: did not grow, at most 1 ready"),
        (add_twice, "VllmWorker: 3 at a time, the maximum is 2"),
        (not_come_back, "VllmWorker: 2 ready at the end instead of 1"),
        (crash_worker, "VllmWorker-1: restarted 1 times, killed here 0 times"),
        (crash_planner, "Planner-0: restarted 10 times, killed here 9 times"),
        (not_start, "PrefillWorker-1: could not be started"),
        (kill_worker, "the supervisor had to kill: VllmWorker-0  still there after 110 s: killed"),
        (not_kill, "planner: killed 3 times, fewer than 4"),
        (log_error, "errors in the logs: 1"),
        (be_late, "the run ended early: not within 300 s: both roles have grown"),
    ],
)
def test_each_fault_is_a_violation(spoil: Callable[[Sight], None], said: str):
    sight = good()
    spoil(sight)
    assert [line for line in sight.violations() if not line.startswith("  ")] == [said]


def test_a_phase_that_was_not_hit_is_reported_and_no_violation():
    sight = good()
    sight.kills[ADD], sight.kills[REMOVE] = 0, 2
    assert sight.violations() == []
    assert sight.missed() == [ADD]
    assert f"{ADD}: not hit" in sight.report()


def test_each_phase_is_due_once_and_none_while_others_are_under_way():
    assert due([ADD, REMOVE], {}, idle=True) == ADD
    assert due([ADD, REMOVE], {ADD}, idle=True) == REMOVE
    assert due([ADD, REMOVE], {ADD, REMOVE}, idle=True) == ""
    assert due([], {ADD}, idle=True) == IDLE
    assert due([], {ADD}, idle=False) == due([], {IDLE}, idle=True) == ""


def test_leader_and_phases_are_those_of_the_records(tmp_path: Path):
    seals = RecordSeals(graph_secret(tmp_path / "secret", b"n" * 32))

    def operation(
        number: int, kind: Literal["add", "remove"], component: str, phase: ChangePhase
    ) -> tuple[str, bytes]:
        record = OperationRecord(
            id=number, kind=kind, component=component, phase=phase, count=1, before=1
        )
        key = names.planner_operation_key("ns", number)
        return key, seals.sealed(key, encode_json(record))

    plan = Plan("ns")
    assert (plan.leader_pid, plan.phases) == (0, [])
    leader = names.planner_leader_key("ns")
    plan.apply(Snapshot({leader: encode_json(LeaderRecord(lease_id=7, pid=41))}))
    plan.apply(Put(*operation(10, "remove", P, "ordered")))
    plan.apply(Put(*operation(9, "add", D, "ordered")))
    plan.apply(Put(*operation(9, "add", D, "asked")))
    plan.apply(Put(names.planner_target_key("ns"), b"{}"))
    assert plan.leader_pid == 41
    assert plan.phases == [ADD, f"remove {P}: ordered"]
    plan.apply(Delete(names.planner_operation_key("ns", 9)))
    plan.apply(Delete(leader))
    assert (plan.leader_pid, plan.phases) == (0, [f"remove {P}: ordered"])

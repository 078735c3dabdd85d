"""What a decode engine remembers of its decisions, and its answers about them."""

import time
from typing import Any, cast

import pytest

from dynamo_lite.cli import decision_view
from dynamo_lite.cli.decisions import PastDecision
from dynamo_lite.disagg.counters import Counters
from dynamo_lite.disagg.decode import decision_log
from dynamo_lite.disagg.decode.decision_log import DecisionLog
from dynamo_lite.disagg.decode.prefill_rate import PrefillRate
from dynamo_lite.disagg.decode.remote_prefill import Decided, RemotePrefill
from dynamo_lite.disagg.decode.remote_prefills import RemotePrefills
from dynamo_lite.policy.decision.cost import Rates
from dynamo_lite.policy.decision.disagg import DecisionReason, Local, Remote
from dynamo_lite.policy.decision.step_time import StepLoad, work_of
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import (
    Decision,
    Explain,
    Followed,
    QueueSeen,
    decode_explain,
    decode_explained,
)
from dynamo_lite.protocol.errors import ProtocolError
from dynamo_lite.protocol.live_options import VllmWorkerLiveOptions
from dynamo_lite.protocol.prefill import Granted
from tests.builders import ENGINE, ManualClock
from tests.unit.decode_engine import (
    LIMIT,
    QUEUE_SIZE,
    TIMEOUT_S,
    Decode,
    prompt,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def decode(clock: ManualClock):
    decode = Decode(clock)
    async with decode.queue:
        yield decode
        await decode.network()


def told(decode: Decode, **wanted: Any) -> list[Decision]:
    answer = decode_explained(decode.half.prefills.decisions.answer(encode(Explain(**wanted))))
    assert (answer.engine_id, answer.lease_id) == (ENGINE, 1)
    return answer.decisions


async def test_a_local_prompt_says_what_it_was_decided_from(decode: Decode, clock: ManualClock):
    decode.sees(jobs=2)
    clock.now += 0.5
    decode.admit(prompt("r1", 12), 8)
    clock.now += 3
    [said] = told(decode)
    assert (said.request_id, said.verdict, said.reason) == ("r1", "local", "cached")
    assert (said.prompt_tokens, said.cached_tokens, said.age_s) == (12, 8, 3)
    assert said.queue is not None
    assert (said.queue.jobs, said.queue.prefill_workers, said.queue.age_s) == (2, 1, 0.5)
    followed = said.thresholds
    assert (followed.version, followed.max_local_prefill_length) == (0, LIMIT)
    assert (followed.max_prefill_queue_size, followed.remote_prefill_timeout_s) == (
        QUEUE_SIZE,
        TIMEOUT_S,
    )
    assert said.asked is None and said.local_s is None and said.remote_s is None


async def test_a_verdict_without_blocks_is_no_decision(decode: Decode):
    decode.half.num_new_matched_tokens(prompt("r1", 10), 0)
    assert told(decode) == []


async def test_options_that_change_move_the_next_decisions(decode: Decode):
    decode.admit(prompt("r1", 10))
    decode.tune(VllmWorkerLiveOptions(max_local_prefill_length=20), 7)
    decode.admit(prompt("r2", 10))
    decode.tune(VllmWorkerLiveOptions(max_prefill_queue_size=0), 8)
    decode.admit(prompt("r3", 10))
    decode.tune(VllmWorkerLiveOptions(), 9)
    decode.admit(prompt("r4", 10))
    assert [(d.verdict, d.reason, d.thresholds.version) for d in told(decode)] == [
        ("remote", "long", 0),
        ("local", "short", 7),
        ("local", "queue_full", 8),
        ("remote", "long", 9),
    ]


async def test_a_changed_timeout_and_number_of_tries_hold_for_new_prompts(
    decode: Decode, clock: ManualClock
):
    decode.tune(VllmWorkerLiveOptions(remote_prefill_timeout_s=1.5), 1)
    decode.admit(prompt("r1", 10))
    job = await decode.job_of_step()
    assert job.deadline == clock.wall() + 1.5
    decode.tune(VllmWorkerLiveOptions(remote_prefill_timeout_s=60.0), 2)
    clock.now += 1.6
    assert decode.half.build_step().give_up == [(job.attempt, "r1")]


async def test_a_remote_prefill_is_told_with_its_stages(decode: Decode, clock: ManualClock):
    request = prompt("r1", 101)
    decode.admit(request)
    [attempt] = decode.half.build_step().expect
    [said] = told(decode, request_id="r1")
    assert said.asked is not None
    assert (said.asked.attempt, said.asked.outcome, said.asked.stages_s) == (attempt, "", {})
    clock.now += 0.25
    await decode.network()
    clock.now += 0.5
    assert await decode.claim(attempt) == Granted()
    clock.now += 2
    decode.output("r1")
    clock.now += 0.25
    decode.half.state_after_alloc(request, [], 0)
    [said] = told(decode)
    assert said.asked is not None and said.asked.outcome == "committed"
    assert said.asked.stages_s == {
        "decide": 0,
        "publish": 0.25,
        "pull": 0.5,
        "claim": 0,
        "fill": 2,
        "resume": 0.25,
    }
    decode.finish("r1")
    decode.admit(prompt("r2", 201))
    said = told(decode)[-1]
    assert said.remote_tokens_per_s == pytest.approx(101 / 2)
    assert said.remote_s == pytest.approx(1 + 201 / (101 / 2))
    assert said.local_s is None


async def test_one_that_came_to_nothing_is_told_as_far_as_it_came(
    decode: Decode, clock: ManualClock
):
    decode.admit(prompt("r1", 10))
    [attempt] = decode.half.build_step().expect
    clock.now += 1
    await decode.network()
    clock.now += 2
    await decode.claim(attempt)
    clock.now += TIMEOUT_S
    decode.half.build_step()
    [said] = told(decode)
    assert said.asked is not None and said.asked.outcome == "deadline"
    assert said.asked.stages_s == {
        "decide": 0,
        "publish": 1,
        "pull": 2,
        "claim": 0,
        "lost": TIMEOUT_S,
    }
    await decode.done(attempt, "abandoned")


async def test_what_a_writer_says_of_its_failure_is_told(decode: Decode):
    attempt = await decode.ask("r1", claimed=True)
    await decode.done(attempt, "failed", detail="write ended in state ERR" + 500 * "!")
    decode.half.build_step()
    [remote] = taken(decode)
    assert remote.decision.asked is not None
    assert remote.decision.asked.outcome == "writer_failed"
    assert remote.decision.asked.detail == "write ended in state ERR" + 476 * "!"
    assert "  its writer  write ended in state ERR!" in decision_view.as_text(remote)


async def test_what_is_computed_here_is_measured(decode: Decode, clock: ManualClock):
    decode.tune(VllmWorkerLiveOptions(max_local_prefill_length=1000), 1)
    decode.admit(prompt("r1", 100))
    for tokens in (60, 40):
        decode.half.build_step((), {"r1": tokens, "other": 5})
        clock.now += 1
    assert told(decode)[0].computed_s is None
    decode.half.build_step((), {"r1": 1})
    assert told(decode)[0].computed_s == 2
    decode.admit(prompt("r2", 50))
    said = told(decode)[1]
    assert (said.local_s, said.local_tokens_per_s, said.computed_s) == (1, 50, None)
    decode.half.build_step((), {"r2": 50})
    clock.now += 0.5
    decode.finish("r2")
    assert told(decode)[1].computed_s == 0.5
    decode.finish("r1")
    decode.assert_clean()


class Computing:
    """Prompts that are computed here, from time 0 on."""

    def __init__(self, overlapping_steps: int):
        log = DecisionLog(cast("Any", None), lambda: 0.0)
        self.prefills = RemotePrefills(Counters(), log, lambda: 0.0)
        self.rate = PrefillRate(self.prefills, overlapping_steps)

    def computes(self, request_id: str, tokens: int) -> RemotePrefill:
        request = prompt(request_id, tokens)
        prefill = self.prefills.proposed(request, HERE)
        assert self.prefills.allocated(request) is prefill
        return prefill

    def finish(self, prefill: RemotePrefill, now: float) -> None:
        self.prefills.finished(prefill.request_id)
        self.rate.finished(prefill, now)


HERE = Decided(Local(DecisionReason.SHORT), 0.0, 0, None, cast("Any", None), Rates())


def test_overlapping_steps_end_later():
    here = Computing(2)
    prefill = here.computes("r", 100)
    here.rate.step({"r": 100}, 0.0)
    here.rate.step({"r": 1}, 0.0)
    assert prefill.computed_s is None
    here.rate.step({"r": 1}, 4.0)
    assert prefill.computed_s == 4.0
    assert here.rate.rates == Rates(25.0)
    here.finish(prefill, 5.0)
    assert prefill.computed_s == 4.0 and not here.prefills


def test_short_and_aborted_prompts_measure_nothing():
    here = Computing(1)
    short, aborted = here.computes("short", 5), here.computes("aborted", 100)
    here.rate.step({"short": 5, "aborted": 50}, 0.0)
    here.rate.step({}, 1.0)
    assert (short.computed_s, aborted.computed_s) == (1.0, None)
    here.finish(short, 2.0)
    here.finish(aborted, 2.0)
    assert aborted.computed_s is None
    here.rate.add_remote(brought(5, 1.0, 1.0))
    assert here.rate.rates == Rates() and not here.prefills


def brought(tokens: int, fill_s: float, fixed_s: float) -> RemotePrefill:
    """A remote prefill that is over: its KV came, and its prompt was scheduled."""
    prefill = RemotePrefill("r", tokens, HERE, claimed_at=fixed_s)
    prefill.pulled_at = prefill.published_at = prefill.asked_at = fixed_s
    prefill.ended_at = prefill.received_at = prefill.scheduled_at = fixed_s + fill_s
    return prefill


def test_rates_follow_what_changes():
    pace = PrefillRate(Computing(1).prefills, 1)
    for seconds in (1.0,) * 50 + (4.0,) * 50:
        pace.add_remote(brought(100, seconds, 0.5))
    assert pace.rates.remote_tokens_per_s == pytest.approx(25, rel=0.05)
    assert pace.rates.remote_fixed_s == pytest.approx(0.5)


async def test_the_oldest_are_forgotten(
    decode: Decode, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
):
    for number in range(10):
        decode.admit(prompt(f"r{number}", 2))
        decode.finish(f"r{number}")
        clock.now += 10
    assert [d.request_id for d in told(decode, last=2)] == ["r8", "r9"]
    assert [d.request_id for d in told(decode, within_s=25)] == ["r8", "r9"]
    assert told(decode, last=0) == []
    monkeypatch.setattr(decision_log, "LONGEST_S", 35.0)
    assert [d.request_id for d in told(decode)] == ["r7", "r8", "r9"]
    decode.admit(prompt("last", 2))
    assert len(decode.half.prefills.decisions) == 4


async def test_no_more_than_so_many_are_kept(decode: Decode):
    for number in range(decision_log.MOST + 10):
        decode.admit(prompt(f"r{number}", 2))
        decode.finish(f"r{number}")
    all_of_them = told(decode)
    assert len(all_of_them) == decision_log.MOST
    assert all_of_them[0].request_id == "r10"


async def test_a_clients_id_finds_siblings_and_moved_ones(decode: Decode):
    names = ["0_cmpl-a-0-0a1b2c3d#1", "1_cmpl-a-0-0a1b2c3d~2#2", "cmpl-a-1-0a1b2c3d#3"]
    for name in (*names, "cmpl-ab-0-0a1b2c3d#4"):
        decode.admit(prompt(name, 2))
    assert [d.request_id for d in told(decode, request_id="cmpl-a")] == names
    assert told(decode, request_id="cmpl-x") == []


def test_a_question_that_is_none_is_refused():
    for payload in (b"", b"\xff", b"\x81\xa4last\xff", b"\x81\xabrequest_id\x01"):
        with pytest.raises(ProtocolError):
            decode_explain(payload)


def taken(decode: Decode) -> list[PastDecision]:
    return [PastDecision(time.time() - d.age_s, 1, d) for d in told(decode)]


async def test_decisions_are_readable(decode: Decode, clock: ManualClock):
    decode.admit(prompt("r1", 10))
    decode.admit(prompt("r2", 3))
    remote, local = taken(decode)
    text = decision_view.as_text(remote)
    assert "remote, long:" in text and "10 tokens: 0 cached here, 10 to compute" in text
    assert "under way" in text and "1 prefill worker;" in text
    assert "unknown" in decision_view.as_text(local)
    lines = decision_view.as_table([remote, local]).splitlines()
    assert "remote/long" in lines[1] and "local/short" in lines[2]
    told_json = decision_view.as_json([remote])[0]
    assert told_json["worker"] == "1" and told_json["asked"]["outcome"] == ""


async def test_a_dry_run_takes_past_decisions_with_new_values(decode: Decode, clock: ManualClock):
    for number, tokens in enumerate((3, 10, 20)):
        clock.now += 0.1
        decode.admit(prompt(f"r{number}", tokens))
    assert decision_view.dry_run(taken(decode), {"max-local-prefill-length": 15}) == [
        "1 of 3 verdicts would have changed:",
        "       1  local/short",
        "       1  remote/long -> local/short",
        "       1  remote/long",
    ]
    assert decision_view.dry_run(taken(decode), {"max-prefill-queue-size": 1})[0] == (
        "1 of 3 verdicts would have changed:"
    )
    assert decision_view.dry_run([], {"max-local-prefill-length": 1}) == [
        "0 of 0 verdicts would have changed:"
    ]
    [line] = decision_view.dry_run(taken(decode), {"max-remote-prefills": 1})
    assert "cannot be computed" in line
    for attempt in decode.half.build_step().expect:
        await decode.network()
        clock.now += 1
        await decode.claim(attempt)
    decode.output("r1", "r2")
    [line] = decision_view.dry_run(taken(decode), {"remote-prefill-timeout-s": 1.5})
    assert line == "2 of 2 remote prefills that ended took longer than 1.5 s"


def test_a_verdict_by_tokens_or_time_is_shown_and_judged_again():
    queue = QueueSeen(jobs=1, prefill_workers=1, age_s=0.1, tokens=900, wait_s=1.5, takes_s=2.0)
    limits = Followed(
        version=1,
        max_local_prefill_length=10,
        max_prefill_queue_size=8,
        queue_view_max_age_s=3.0,
        remote_prefill_timeout_s=1.8,
        max_prefill_queue_tokens=1000,
    )
    late = Decision(
        request_id="r1",
        age_s=1.0,
        prompt_tokens=100,
        cached_tokens=0,
        verdict="local",
        reason="too_late",
        queue=queue,
        thresholds=limits,
    )
    shown = decision_view.as_text(PastDecision(0.0, 1, late))
    assert "1 job with 900 tokens to compute, a wait of about 1.50 s; 1 prefill worker" in shown
    assert "with 8 jobs or 1000 tokens or more in the queue" in shown
    assert decision_view.verdict_with(late, {}) == Local(DecisionReason.TOO_LATE)
    longer = {"remote-prefill-timeout-s": 2.1}
    assert decision_view.verdict_with(late, longer) == Remote(DecisionReason.LONG)
    fewer = {"max-prefill-queue-tokens": 900, "remote-prefill-timeout-s": 2.1}
    assert decision_view.verdict_with(late, fewer) == Local(DecisionReason.QUEUE_TOKENS)
    assert decision_view.dry_run([PastDecision(0.0, 1, late)], {"remote-prefill-timeout-s": 2.1})[
        0
    ] == ("1 of 1 verdicts would have changed:")


# Learned costs


def steps(decode: Decode, clock: ManualClock, count: int) -> None:
    """The engine is busy with a stream, and computes a prompt in every other step: 10 ms and
    0.1 ms for each of its tokens."""
    for number in range(count):
        tokens = 20 + number % 50 if number % 2 else 0
        load = StepLoad(tokens, tokens * tokens / 2, 1, 100)
        decode.half.build_step((), {"stream": 1, f"other{number}": tokens}, load)
        clock.now += 0.01 + 1e-4 * tokens


async def taught(decode: Decode, clock: ManualClock) -> None:
    """Both sides are measured: a remote prefill takes two seconds."""
    for number in range(40):
        name = f"remote{number}"
        request = prompt(name, 30)
        decode.sees()
        decode.admit(request)
        [attempt] = decode.half.build_step().expect
        await decode.network()
        assert await decode.claim(attempt) == Granted()
        clock.now += 2
        decode.output(name)
        decode.half.state_after_alloc(request, [], 0)
        decode.finish(name)
        await decode.network()
    steps(decode, clock, 200)
    decode.sees()


async def test_the_engine_learns_the_times_of_its_steps(decode: Decode, clock: ManualClock):
    steps(decode, clock, 100)
    times = decode.half._measured.costs.policy.costs.steps
    assert times.prefills == pytest.approx(50, rel=0.1)
    assert times.work_s(work_of(1000, 0)) == pytest.approx(0.1, rel=0.1)
    assert times.decode_s(StepLoad(0, 0.0, 1, 100)) == pytest.approx(0.01, rel=0.1)
    assert decode.counted("pausing_tokens") > 0
    paused_s = decode.counted("pause") / decode.counted("pausing_tokens")
    assert paused_s == pytest.approx(1e-4, rel=0.2)
    # After a break the time since the last step is not a step's.
    clock.now += 1000
    decode.half.build_step((), {"new": 5}, StepLoad(5, 12.5, 0, 0))
    assert times.decode_s(StepLoad(0, 0.0, 1, 100)) == pytest.approx(0.01, rel=0.1)


async def test_in_the_shadow_the_thresholds_decide_and_the_costs_are_told(
    decode: Decode, clock: ManualClock
):
    await taught(decode, clock)
    decode.admit(prompt("r1", 30))
    [said] = told(decode, request_id="r1")
    assert (said.verdict, said.reason) == ("remote", "long")
    assert said.costs is not None
    assert (said.costs.thresholds, said.costs.says) == ("remote", "local")
    assert said.costs.remote_s == pytest.approx(2, rel=0.1)
    assert said.costs.local_s == pytest.approx(0.013, rel=0.1)
    assert said.costs.cost_s is None
    assert decode.counted("opinion/remote/local") == 1
    text = decision_view.as_text(PastDecision(1.0, 1, said))
    assert "cost here" in text and "by costs local, by thresholds remote" in text
    await decode.network()


async def test_realised_costs_and_regret_are_told(decode: Decode, clock: ManualClock):
    await taught(decode, clock)
    request = prompt("r1", 30)
    decode.admit(request)
    [attempt] = decode.half.build_step().expect
    await decode.network()
    assert await decode.claim(attempt) == Granted()
    clock.now += 4
    decode.output("r1")
    decode.half.state_after_alloc(request, [], 0)
    [said] = told(decode, request_id="r1")
    assert said.costs is not None and said.costs.cost_s is not None
    assert said.costs.cost_s == pytest.approx(4, rel=0.1)
    here_s = said.costs.local_s + said.costs.pause_s + said.costs.behind_s
    assert said.costs.regret_s == pytest.approx(said.costs.cost_s - here_s)
    assert decode.counted("prefill_regret/remote") == said.costs.regret_s
    assert "a regret of" in decision_view.as_text(PastDecision(1.0, 1, said))
    decode.finish("r1")


async def test_the_costs_decide_where_they_are_told_to(decode: Decode, clock: ManualClock):
    await taught(decode, clock)
    decode.tune(VllmWorkerLiveOptions(prefill_policy="cost"), 1)
    assert decode.admit(prompt("cheap", 30)) == 0
    decode.tune(VllmWorkerLiveOptions(prefill_policy="thresholds"), 2)
    assert decode.admit(prompt("long", 30)) > 0
    decode.tune(VllmWorkerLiveOptions(prefill_policy="cost"), 3)
    decode.sees(prefill_workers=0)
    decode.writers.members = ()
    assert decode.admit(prompt("nobody", 30)) == 0
    cheap, long, nobody = told(decode)[-3:]
    assert (cheap.verdict, cheap.reason) == ("local", "cheaper")
    assert (long.verdict, long.reason, long.costs) == ("remote", "long", None)
    assert (nobody.verdict, nobody.reason) == ("local", "no_prefill_worker")
    # Its pauses and its time are its realised cost.
    at = clock.now
    load = StepLoad(30, 450.0, 1, 100)
    decode.half.build_step((), {"stream": 1, "cheap": 30}, load)
    clock.now += 0.02
    decode.half.build_step((), {"stream": 1, "cheap": 1}, StepLoad(0, 0.0, 2, 130))
    [cheap] = told(decode, request_id="cheap")
    assert cheap.costs is not None
    assert cheap.costs.cost_s == pytest.approx(clock.now - at + 0.01, rel=0.1)
    await decode.network()


async def test_prompts_that_are_computed_here_make_the_next_one_dearer(
    decode: Decode, clock: ManualClock
):
    await taught(decode, clock)
    decode.tune(VllmWorkerLiveOptions(prefill_policy="cost"), 1)
    for number in range(30):
        assert decode.admit(prompt(f"cheap{number}", 30)) == 0
    assert decode.admit(prompt("last", 30)) == 0
    [last] = told(decode, request_id="last")
    assert last.costs is not None and (behind_s := last.costs.behind_s) > 0
    assert "for prompts behind it" in decision_view.as_text(PastDecision(1.0, 1, last))
    at = clock.now
    decode.half.build_step((), {"stream": 1, "last": 30}, StepLoad(30, 450.0, 1, 100))
    clock.now += 0.01
    decode.half.build_step((), {"stream": 1, "last": 1}, StepLoad(0, 0.0, 2, 130))
    [last] = told(decode, request_id="last")
    assert last.costs is not None and last.costs.cost_s is not None
    pause_s = decode.half.prefills.by_request["last"].pause_s
    assert last.costs.cost_s == pytest.approx(clock.now - at + pause_s + behind_s, rel=1e-9)
    await decode.network()


async def test_a_prompt_whose_remote_prefill_failed_counts_as_computed_here(
    decode: Decode, clock: ManualClock
):
    await taught(decode, clock)
    before = decode.half._measured.costs.policy.costs._local_rate.per_s(clock.now)
    decode.admit(prompt("r1", 30))
    [attempt] = decode.half.build_step().expect
    await decode.network()
    assert await decode.claim(attempt) == Granted()
    decode.output(failed=["r1"])
    assert decode.half._measured.costs.policy.costs._local_rate.per_s(clock.now) > before


async def test_before_anything_is_learned_the_thresholds_decide(decode: Decode):
    decode.tune(VllmWorkerLiveOptions(prefill_policy="cost"), 1)
    decode.admit(prompt("short", LIMIT))
    decode.admit(prompt("long", LIMIT + 10))
    short, long = told(decode)
    assert (short.reason, long.reason) == ("short", "long")
    assert decode.counted("opinion/remote/few_local") == 1
    await decode.network()

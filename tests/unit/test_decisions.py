"""What a decode engine remembers of its decisions, and its answers about them."""

import time
from typing import Any

import msgspec
import pytest
import yaml

from dynamo_lite.cli.explain import DECODE, Taken, as_table
from dynamo_lite.disagg.decision.rule import DecisionReason
from dynamo_lite.disagg.decode import decision_log
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import (
    Decision,
    Explain,
    QueueSeen,
    decode_explained,
)
from dynamo_lite.protocol.options import DecisionThresholds
from tests.builders import ENGINE, ManualClock
from tests.unit.decode_engine import HELD, LIMIT, QUEUE_SIZE, TIMEOUT_S, Decode, prompt


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
    assert followed.max_local_prefill_length == LIMIT
    assert (followed.max_prefill_queue_size, followed.remote_prefill_timeout_s) == (
        QUEUE_SIZE,
        TIMEOUT_S,
    )
    assert said.asked is None
    assert (said.time_left_s, said.transferable, said.leaving) == (TIMEOUT_S, True, False)


async def test_a_verdict_without_blocks_is_no_decision(decode: Decode):
    decode.half.num_new_matched_tokens(prompt("r1", 10), 0)
    assert told(decode) == []


async def test_a_changed_timeout_and_number_of_tries_hold_for_new_prompts(
    decode: Decode, clock: ManualClock
):
    decode.tune(remote_prefill_timeout_s=1.5)
    decode.admit(prompt("r1", 10))
    job = await decode.job_of_step()
    assert job.deadline == clock.wall() + 1.5
    decode.tune(remote_prefill_timeout_s=60.0)
    decode.pass_s(1.6)
    assert decode.half.build_step().give_up == [(job.attempt, "r1")]


async def test_a_remote_prefill_is_shown_with_its_stages(decode: Decode, clock: ManualClock):
    request = prompt("r1", 101)
    decode.admit(request)
    [attempt] = decode.half.build_step().expect
    [said] = told(decode, request_id="r1")
    assert said.asked is not None
    assert (said.asked.attempt, said.asked.outcome, said.asked.stages_s) == (attempt, "", {})
    clock.now += 0.25
    await decode.network()
    clock.now += 0.5
    assert await decode.claim(attempt) == HELD
    decode.half.build_step()
    clock.now += 2
    decode.output("r1")
    clock.now += 0.25
    decode.half.state_after_alloc(request, [], 0)
    [said] = told(decode)
    assert said.asked is not None and said.asked.outcome == "committed"
    assert said.asked.stages_s == {
        "decide": 0,
        "queue": 0.75,
        "fill": 2,
        "resume": 0.25,
    }
    decode.finish("r1")


async def test_one_that_came_to_nothing_is_shown_as_far_as_it_came(
    decode: Decode, clock: ManualClock
):
    decode.admit(prompt("r1", 10))
    [attempt] = decode.half.build_step().expect
    clock.now += 1
    await decode.network()
    clock.now += 2
    for _ in range(int(TIMEOUT_S) - 3):
        assert await decode.claim(attempt) == HELD
        decode.pass_s(1)
    decode.half.build_step()
    [said] = told(decode)
    assert said.asked is not None and said.asked.outcome == "deadline"
    assert said.asked.stages_s == {"decide": 0, "queue": 3, "lost": TIMEOUT_S - 3}
    await decode.done(attempt, "abandoned")


async def test_what_a_writer_says_of_its_failure_is_shown(decode: Decode):
    attempt = await decode.ask("r1", claimed=True)
    await decode.done(attempt, "failed", detail="write ended in state ERR" + 500 * "!")
    decode.half.build_step()
    [remote] = taken(decode)
    decision = remote.decision
    assert isinstance(decision, Decision)
    assert decision.asked is not None
    assert decision.asked.outcome == "writer_failed"
    assert decision.asked.detail == "write ended in state ERR" + 476 * "!"
    assert "detail: write ended in state ERR!" in remote.as_text()


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


async def test_no_more_than_the_limit_are_kept(decode: Decode):
    for number in range(decision_log.MOST + 10):
        decode.admit(prompt(f"r{number}", 2))
        decode.finish(f"r{number}")
    all_of_them = told(decode)
    assert len(all_of_them) == decision_log.MOST
    assert all_of_them[0].request_id == "r10"


def taken(decode: Decode) -> list[Taken]:
    return [Taken(DECODE, time.time() - d.age_s, 1, d) for d in told(decode)]


async def test_decisions_are_readable(decode: Decode, clock: ManualClock):
    decode.admit(prompt("r1", 10))
    decode.admit(prompt("r2", 3))
    remote, local = taken(decode)
    assert "  verdict: remote\n  reason: long\n" in remote.as_text()
    lines = as_table(DECODE, [remote, local]).splitlines()
    assert lines[1].split()[-3:] == ["remote", "long", "-"], "it is under way"
    assert lines[2].split()[-3:] == ["local", "short", "-"]
    told_json = remote.as_json()
    assert told_json["worker"] == "1" and told_json["asked"]["outcome"] == ""


LIMITS = DecisionThresholds(
    max_local_prefill_length=10,
    max_prefill_queue_size=8,
    queue_view_max_age_s=3.0,
    remote_prefill_timeout_s=1.8,
    max_prefill_queue_tokens=1000,
)


def one(reason: DecisionReason, **more: Any) -> Decision:
    defaults: dict[str, Any] = {
        "request_id": "r1",
        "age_s": 1.0,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "verdict": "local",
        "queue": QueueSeen(jobs=1, prefill_workers=1, age_s=0.1, tokens=900),
        "time_left_s": 1.25,
        "thresholds": LIMITS,
    }
    return Decision(reason=reason.value, **{**defaults, **more})


def test_all_that_is_known_is_shown():
    head, _, fields = Taken(DECODE, 0.0, 1, one(DecisionReason.TOO_LATE)).as_text().partition("\n")
    assert head.startswith("r1  ") and head.endswith("  worker 1")
    assert yaml.safe_load(fields) == {
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "offloaded_tokens": 0,
        "queue": {
            "jobs": 1,
            "prefill_workers": 1,
            "age_s": 0.1,
            "tokens": 900,
            "prefill_workers_alive": 0,
        },
        "time_left_s": 1.25,
        "transferable": True,
        "leaving": False,
        "prefix_awaited": False,
        "verdict": "local",
        "reason": "too_late",
        "thresholds": msgspec.to_builtins(LIMITS),
    }


def test_a_queue_that_was_not_read_is_no_empty_one():
    unread = Taken(DECODE, 0.0, 1, one(DecisionReason.QUEUE_UNKNOWN, queue=None))
    assert "queue:" not in unread.as_text() and unread.cells()[4] == "-"

"""What a decode engine remembers of its decisions, and its answers about them."""

import time
from typing import Any

import pytest

from dynamo_lite.cli.explain import DECODE, Taken, as_table
from dynamo_lite.disagg.decode import decision_log
from dynamo_lite.disagg.decode.decision_log import explained
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import (
    Decision,
    Explain,
    decode_explained,
)
from tests.builders import ENGINE, ManualClock
from tests.unit.decode_engine import HELD, LIMIT, QUEUE_SIZE, TIMEOUT_S, Decode, prompt


def told(decode: Decode, **wanted: Any) -> list[Decision]:
    decisions, now = decode.half.prefills.decisions, decode.clock.now
    payload = encode(Explain(**wanted))
    answer = decode_explained(explained(decode.net._config, decisions, payload, now))
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

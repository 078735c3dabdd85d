"""The decision by learned costs: what it may decide, when it may not, and how it tries out."""

import random
from dataclasses import replace
from typing import Any

import pytest

from dynamo_lite.policy.decision.cost_policy import CostPolicy, Opinion, regret_s
from dynamo_lite.policy.decision.disagg import DecisionReason, Local, QueueView, Remote, decide
from dynamo_lite.policy.decision.exploration import SHARE, Exploration, coin
from dynamo_lite.policy.decision.prefill_costs import Costs, EngineState
from dynamo_lite.policy.decision.step_time import PromptWork, StepLoad, work_of
from dynamo_lite.protocol.options import CostPolicyOptions, DecisionThresholds

LIMITS = DecisionThresholds()
OPTIONS = CostPolicyOptions(prefill_policy="cost")
NOW = 100.0
FREE = QueueView(0, 2, NOW, wait_s=0.0, takes_s=0.1)
BUSY = replace(
    FREE, jobs=12, tokens=60_000, earlier_tokens=60_000, wait_s=3.0, takes_s=3.1, asked_tokens=0
)


def engine(streams: int = 50, usage: float = 0.5) -> EngineState:
    return EngineState(
        StepLoad(0, 0.0, streams, streams * 1000), PromptWork(), 8192, 500_000, usage
    )


def taught(at: float = NOW, remote: int = 60, noise: float = 0.02) -> CostPolicy:
    """A step of 10 ms, 20 us a prompt token; remote prefills of 50 ms and 25 us a token."""
    policy, rng = CostPolicy(), random.Random(0)
    for number in range(300):
        streams, tokens = rng.randrange(1, 80), rng.randrange(100, 8000)
        work = work_of(tokens, rng.randrange(4000)) if number % 3 == 0 else work_of(0, 0)
        load = StepLoad(work.tokens, work.attention, streams, streams * rng.randrange(500, 2000))
        took_s = 0.01 + 2e-5 * work.tokens + 1e-10 * work.attention + 1e-5 * streams
        policy.costs.steps.add(load, took_s * rng.lognormvariate(0, noise), at)
    for _ in range(remote):
        tokens = rng.randrange(100, 8000)
        claimed = rng.randrange(8000)
        queue = replace(FREE, claimed_tokens=claimed)
        costs = policy.costs.of(tokens, 0, engine(), queue, at)
        took_s = 0.05 + 2.5e-5 * tokens + 1e-6 * claimed
        policy.costs.add_remote(costs, tokens, took_s * rng.lognormvariate(0, noise), at)
    return policy


def opinion(policy: CostPolicy, tokens: int, queue: QueueView | None = FREE, **more: Any):
    given = {"here": engine(), "now": NOW, "time_left_s": 30.0} | more
    here, now, left_s = given["here"], given["now"], given["time_left_s"]
    return policy.opinion(tokens, 0, here, queue, LIMITS, now, left_s)


@pytest.mark.parametrize(
    ("tokens", "queue", "left_s", "why"),
    [
        (4000, None, 30.0, "queue_unknown"),
        (4000, replace(FREE, read_at=NOW - 10), 30.0, "queue_unknown"),
        (4000, replace(FREE, prefill_workers=0), 30.0, "no_prefill_worker"),
        (4000, BUSY, 2.0, "too_late"),
        (4000, FREE, 0.0, "too_late"),
        (1, FREE, 30.0, "short"),
    ],
)
def test_what_must_be_local_is_local_whatever_it_costs(
    tokens: int, queue: QueueView | None, left_s: float, why: str
):
    policy = taught()
    said = opinion(policy, tokens, queue, time_left_s=left_s)
    assert (said.side, said.why, said.costs) == ("local", why, None)
    usual = decide(
        prompt_tokens=tokens,
        cached_tokens=0,
        queue=queue,
        thresholds=LIMITS,
        now=NOW,
        time_left_s=left_s,
    )
    verdict, propensity = policy.choose(usual, said, "r", engine(), OPTIONS, NOW)
    assert isinstance(verdict, Local) and verdict == usual and propensity == 1.0


def test_the_side_that_costs_less_is_taken():
    policy = taught()
    long, short = opinion(policy, 6000), opinion(policy, 20, here=engine(1))
    assert (long.side, short.side) == ("remote", "local")
    assert long.costs is not None
    assert long.costs.local_s == pytest.approx(0.01 + 6000 * 2e-5 + 0.0018, rel=0.1)
    assert long.costs.pause_s == pytest.approx(50 * 6000 * 2e-5, rel=0.1)
    assert long.costs.remote_s == pytest.approx(0.05 + 6000 * 2.5e-5 + 0.0105, rel=0.1)
    assert policy.choose(Local(DecisionReason.QUEUE_FULL), long, "r", engine(), OPTIONS, NOW) == (
        Remote(DecisionReason.CHEAPER),
        1.0,
    )
    assert policy.choose(Remote(DecisionReason.LONG), short, "r", engine(), OPTIONS, NOW) == (
        Local(DecisionReason.CHEAPER),
        1.0,
    )


def test_a_queue_makes_a_long_prompt_local_and_says_why():
    policy = taught()
    said = opinion(policy, 1000, BUSY, here=engine(5))
    verdict, _ = policy.choose(Remote(DecisionReason.LONG), said, "r", engine(5), OPTIONS, NOW)
    assert verdict == Local(DecisionReason.CROWDED)


def test_more_streams_and_more_jobs_cost_more():
    policy = taught()
    few, many = opinion(policy, 4000, here=engine(2)), opinion(policy, 4000, here=engine(90))
    queued, full = opinion(policy, 4000, BUSY), opinion(policy, 4000, here=engine(usage=0.95))
    for said in (few, many, queued, full):
        assert said.costs is not None
    assert few.costs.pause_s < many.costs.pause_s  # pyright: ignore[reportOptionalMemberAccess]
    # 60,000 tokens before it, of two workers that need 0.1 s for 4,000.
    assert queued.costs.wait_s == pytest.approx(0.75)  # pyright: ignore[reportOptionalMemberAccess]
    assert many.costs.wait_s == 0  # pyright: ignore[reportOptionalMemberAccess]
    assert full.costs.memory_s > 0 == many.costs.memory_s  # pyright: ignore[reportOptionalMemberAccess]


def test_prompts_that_arrive_here_make_a_long_one_remote():
    policy = taught()
    alone = opinion(policy, 6000, here=engine(0))
    assert alone.side == "local" and alone.costs is not None and alone.costs.behind_s == 0
    for number in range(1200):
        policy.costs.computes_here(NOW - 60 + number / 20)
    beside = opinion(policy, 6000, here=engine(0))
    assert beside.side == "remote" and beside.costs is not None
    # 20 a second, who wait for its whole work, or if they come during it for half of it.
    work_s = 6000 * 2e-5 + 0.0018
    assert beside.costs.local_s == pytest.approx(0.01 + work_s, rel=0.1)
    assert beside.costs.behind_s == pytest.approx(20 * (0.01 + work_s / 2) * work_s, rel=0.1)
    # It rests on the same coefficients of a step as the rest of this side.
    of_remote = policy.costs.remote.variance(beside.costs.remote_row)
    assert beside.costs.band_s**2 - of_remote > 9 * (alone.costs.band_s**2 - of_remote) > 0
    minute_later = opinion(
        policy, 6000, replace(FREE, read_at=NOW + 60), here=engine(0), now=NOW + 60
    )
    assert minute_later.costs is not None
    assert minute_later.costs.behind_s < beside.costs.behind_s / 100


@pytest.mark.parametrize(
    ("policy", "now", "why"),
    [
        (CostPolicy(), NOW, "few_local"),
        (taught(remote=10), NOW, "few_remote"),
        (taught(), NOW + 61, "old_remote"),
    ],
)
def test_without_good_predictions_the_thresholds_decide(policy: CostPolicy, now: float, why: str):
    for tokens in (20, 400, 600, 8000):
        for queue in (replace(FREE, read_at=now), replace(BUSY, read_at=now)):
            said = opinion(policy, tokens, queue, now=now)
            assert (said.side, said.why) == (None, why)
            usual = decide(
                prompt_tokens=tokens, cached_tokens=0, queue=queue, thresholds=LIMITS, now=now
            )
            chosen = policy.choose(usual, said, "r", engine(), OPTIONS, now)
            assert chosen == (usual, 1.0)


def test_wrong_predictions_are_noticed():
    policy = taught()
    costs = opinion(policy, 4000).costs
    assert costs is not None
    for _ in range(40):
        policy.costs.add_local(costs, 3 * costs.local_s)
    assert opinion(policy, 4000).why == "wrong_local"


CLOSE = Costs(
    local_s=0.1,
    pause_s=0.0,
    behind_s=0.0,
    remote_s=0.1,
    queue_s=0.0,
    memory_s=0.0,
    wait_s=0.0,
    band_s=0.05,
    remote_row=(1.0, 0.0, 0.0, 0.0),
)


def trials(policy: CostPolicy, count: int, now: float, step_s: float = 0.0) -> list[str]:
    """Names of those that were tried the other way."""
    tried: list[str] = []
    said = Opinion(None, "close", CLOSE)
    for number in range(count):
        name = f"r{number}"
        usual = Remote(DecisionReason.LONG)
        verdict, propensity = policy.choose(usual, said, name, engine(1), OPTIONS, now)
        if verdict.reason is DecisionReason.EXPLORED:
            assert isinstance(verdict, Local) and propensity == SHARE
            policy.exploration.take(now)
            tried.append(name)
        else:
            assert verdict == usual and propensity in (1.0, 1.0 - SHARE)
        now += step_s
    return tried


def test_trials_are_few_and_the_same_request_is_tried_again():
    slow = trials(taught(), 2000, NOW, step_s=2.0)
    assert len(slow) == pytest.approx(2000 * SHARE, rel=0.4)
    assert slow == [name for name in (f"r{n}" for n in range(2000)) if coin(name) < SHARE]
    assert len(trials(taught(), 2000, NOW)) == 1  # one at once
    assert len(trials(taught(), 2000, NOW, step_s=0.01)) <= 21  # one a second


@pytest.mark.parametrize(
    ("costs", "options", "here"),
    [
        (CLOSE._replace(remote_s=0.2), OPTIONS, engine(1)),  # clearly dearer
        (CLOSE, replace(OPTIONS, ttft_target_s=0.15), engine(1)),
        (CLOSE, replace(OPTIONS, itl_target_s=0.01), engine(1)),
    ],
)
def test_nothing_is_tried_that_could_hurt(
    costs: Costs, options: CostPolicyOptions, here: EngineState
):
    policy, usual = taught(), Remote(DecisionReason.LONG)
    for number in range(500):
        said = Opinion(None, "close", costs)
        assert policy.choose(usual, said, f"r{number}", here, options, NOW) == (usual, 1.0)


def test_a_bucket_holds_one_trial():
    bucket = Exploration()
    assert bucket.propensity(1000.0) == SHARE
    bucket.take(1000.0)
    assert bucket.propensity(1000.9) == 0.0
    assert bucket.propensity(1001.0) == SHARE


def test_regret_is_what_the_other_side_would_have_saved():
    costs = CLOSE._replace(pause_s=0.3, behind_s=0.2)
    assert regret_s(costs, "local", 0.7) == pytest.approx(0.6)
    assert regret_s(costs, "remote", 0.7) == pytest.approx(0.1)
    assert regret_s(costs, "remote", 0.2) == 0.0

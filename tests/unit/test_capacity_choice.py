"""The decision by learned costs in the simulated graph, and its regret."""

import math

import pytest

from dynamo_lite.capacity.compare import Setting, run_variant, variant
from dynamo_lite.capacity.options import Counts, GraphOptions
from dynamo_lite.capacity.regret import Play, waiting_s
from dynamo_lite.capacity.report import summary
from dynamo_lite.capacity.request import Request
from dynamo_lite.capacity.timing import read_timing
from dynamo_lite.capacity.traces import Shape, generate
from dynamo_lite.protocol.errors import ConfigError

TIMING = read_timing("gpu_like")
OPTIONS = GraphOptions()


def load(kind: str, rate: float, seconds: float, prompt: int = 2000) -> list[Request]:
    shape = Shape(
        kind=kind,
        duration_s=seconds,
        rate=rate,
        peak=3 * rate,
        prompt_tokens=prompt,
        output_tokens=100,
        sigma=1.0,
    )
    return generate(shape, block_tokens=512, seed=3).requests


def play(requests: list[Request], counts: Counts = Counts(1, 2)) -> Play:  # noqa: B008
    return Play(requests=requests, timing=TIMING, options=OPTIONS, counts=counts)


def test_the_waiting_of_one_request_is_its_first_token():
    alone = play([Request(0.0, 400, 50)], Counts(0, 1))
    result = alone.run("thresholds")
    first_s = result.records.ttft_s[0] - TIMING.frontend_s
    assert waiting_s(result, TIMING) == pytest.approx(first_s)


def test_a_long_prompt_makes_a_stream_wait():
    stream, long = Request(0.0, 400, 200), Request(1.0, 6000, 1)
    alone = waiting_s(play([stream], Counts(0, 1)).run("thresholds"), TIMING)
    both = waiting_s(play([stream, long], Counts(0, 1)).run("thresholds"), TIMING)
    step = TIMING.step
    work_s = step.token_s * 6000 + step.attention_s * 6000 * 3000
    # Its own first token: the step that runs, and the one that computes it. And the pause.
    assert both - alone > 2 * work_s
    assert both - alone < 2 * work_s + 3 * step.one(streams=1, kv=600)


def test_in_the_shadow_nothing_changes():
    made = play(load("burst", 6, 20))
    plain, shadow = made.run("thresholds"), made.run("shadow")
    assert list(plain.records.total_s) == list(shadow.records.total_s)
    opinions = shadow.graph.tally.choices.opinions
    assert opinions.total() == len(made.requests) and not plain.graph.tally.choices.opinions
    assert summary(shadow, OPTIONS.slo)["prefill_opinions"]


def test_the_costs_decide_once_they_are_known():
    made = play(load("burst", 6, 60))
    tally = made.run("cost").graph.tally
    assert any(word.startswith("few_") for _, word in tally.choices.opinions)
    assert tally.decisions["remote", "cheaper"] and tally.decisions["local", "crowded"]
    assert 0 <= tally.choices.regret_s < tally.choices.cost_s
    # The same seed gives the same run.
    again = made.run("cost").graph.tally
    assert (again.decisions, again.choices.cost_s) == (tally.decisions, tally.choices.cost_s)


def test_many_short_prompts_wait_less_by_costs():
    requests = load("constant", 30, 60, prompt=300)
    made = play(requests)
    plain, cost = (waiting_s(made.run(policy), TIMING) for policy in ("thresholds", "cost"))
    assert cost < plain


def test_what_was_decided_can_be_forced():
    made = play(load("burst", 6, 20))
    result = made.run("cost")
    taken = result.graph.tally.choices.taken
    assert len(taken) > 100 and set(taken.values()) == {"local", "remote"}
    again = made.run("thresholds", taken)
    assert list(again.records.total_s) == list(result.records.total_s)


def test_a_reversed_decision_costs_what_the_others_wait_longer():
    """A long prompt beside forty streams belongs elsewhere, and reversing that costs them."""
    streams = [Request(i / 100, 300, 400) for i in range(40)]
    made = play([*streams, Request(1.0, 8000, 10)], Counts(1, 1))
    taken = dict(made.run("thresholds").graph.tally.choices.taken)
    assert taken["40"] == "remote"
    regret = made.regret("thresholds", samples=len(taken))
    assert regret.reversed == len(taken) == 41
    assert regret.regret_s >= max(regret.gain_s, 0.0) and math.isfinite(regret.share)
    forced = waiting_s(made.run("thresholds", {**taken, "40": "local"}), TIMING)
    assert forced > 2 * waiting_s(made.run("thresholds", taken), TIMING)


def test_the_policy_is_a_variant_of_a_comparison():
    setting = Setting(
        requests=load("constant", 5, 10),
        timing=TIMING,
        options=OPTIONS,
        counts=Counts(1, 2),
        most_workers=6,
        start_s=1.0,
    )
    result = run_variant(variant("prefill-policy=shadow", setting), setting)
    assert result.name == "prefill-policy=shadow" and result.graph.tally.choices.opinions
    by_default = run_variant(variant("static:1P2D", setting), setting)
    assert not by_default.graph.tally.choices.opinions
    with pytest.raises(ConfigError, match="prefill-policy=cost"):
        variant("prefill-policy=best", setting)

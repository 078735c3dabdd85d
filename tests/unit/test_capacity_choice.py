"""The decision by learned costs in the simulated graph, and its regret."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.regret import by_groups
from dynamo_lite.capacity.compare import Setting, run_variant, variant
from dynamo_lite.capacity.group_regret import Group, GroupGains, group_gains
from dynamo_lite.capacity.options import GraphModelOptions, WorkerCounts
from dynamo_lite.capacity.regret import Play, waiting_s
from dynamo_lite.capacity.report import summary
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.run import Result
from dynamo_lite.capacity.timing import read_timing
from dynamo_lite.capacity.traces import Shape, generate
from dynamo_lite.policy.decision.cost_policy import Side
from dynamo_lite.policy.decision.prefill_costs import PrefillCosts
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.options import PrefillPolicy

TIMING = read_timing("gpu_like")
OPTIONS = GraphModelOptions()


def load(kind: str, rate: float, seconds: float, prompt: int = 2000) -> list[TraceRequest]:
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


def play(requests: list[TraceRequest], counts: WorkerCounts = WorkerCounts(1, 2)) -> Play:  # noqa: B008
    return Play(requests=requests, timing=TIMING, options=OPTIONS, counts=counts)


def test_the_waiting_of_one_request_is_its_first_token():
    alone = play([TraceRequest(0.0, 400, 50)], WorkerCounts(0, 1))
    result = alone.run("thresholds")
    first_s = result.records.ttft_s[0] - TIMING.frontend_s
    assert waiting_s(result, TIMING) == pytest.approx(first_s)


def test_a_long_prompt_makes_a_stream_wait():
    stream, long = TraceRequest(0.0, 400, 200), TraceRequest(1.0, 6000, 1)
    alone = waiting_s(play([stream], WorkerCounts(0, 1)).run("thresholds"), TIMING)
    both = waiting_s(play([stream, long], WorkerCounts(0, 1)).run("thresholds"), TIMING)
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


def test_the_simulated_engines_count_the_prompts_that_they_compute(
    monkeypatch: pytest.MonkeyPatch,
):
    made = play(load("burst", 6, 60))
    counted = made.run("cost").graph.tally.choices.cost_s
    monkeypatch.setattr(PrefillCosts, "computes_here", lambda *_: None)
    assert made.run("cost").graph.tally.choices.cost_s != counted


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
    streams = [TraceRequest(i / 100, 300, 400) for i in range(40)]
    made = play([*streams, TraceRequest(1.0, 8000, 10)], WorkerCounts(1, 1))
    taken = dict(made.run("thresholds").graph.tally.choices.taken)
    assert taken["40"] == "remote"
    regret = made.regret("thresholds", samples=len(taken))
    assert regret.reversed == len(taken) == 41
    assert regret.regret_s >= max(regret.gain_s, 0.0) and math.isfinite(regret.share)
    forced = waiting_s(made.run("thresholds", {**taken, "40": "local"}), TIMING)
    assert forced > 2 * waiting_s(made.run("thresholds", taken), TIMING)


def test_every_decision_of_a_group_is_reversed_once():
    made = play(load("burst", 6, 20))
    result, reversals = made.run("cost"), list[set[str]]()
    taken = result.graph.tally.choices.taken

    class Repeated(Play):
        """Plays nothing again. Remembers which decisions would have been reversed."""

        def run(self, policy: PrefillPolicy, forced: Mapping[str, Side] | None = None) -> Result:
            if forced is not None:
                reversals.append({name for name in taken if forced[name] != taken[name]})
            return result

    again = Repeated(
        requests=made.requests, timing=TIMING, options=made.options, counts=made.counts
    )
    found = group_gains(again, "cost", parts=3)
    assert sum(one.decisions for one in found) == len(taken)
    assert len({one.group for one in found}) == len(found) > 2
    large = [one for one in found if one.decisions >= 3]
    assert all(one.gains_s == ((0.0,) * 3 if one in large else ()) for one in found)
    assert len(reversals) == 3 * len(large)
    for number, one in enumerate(large):
        parts = reversals[3 * number : 3 * number + 3]
        assert sum(map(len, parts)) == len(set.union(*parts)) == one.decisions
        for name in set.union(*parts):
            assert taken[name] == one.group.side
            assert made.requests[int(name)].prompt_tokens <= one.group.tokens


def test_a_group_on_the_wrong_side_has_a_regret():
    """Long prompts beside forty streams belong elsewhere, but the thresholds keep them here."""
    streams = [TraceRequest(i / 100, 300, 600) for i in range(40)]
    long = [TraceRequest(1.0 + i, 8000, 10) for i in range(4)]
    here = replace(OPTIONS, thresholds=replace(OPTIONS.thresholds, max_local_prefill_length=10**6))
    made = replace(play([*streams, *long], WorkerCounts(1, 1)), options=here)
    (found,) = [one for one in group_gains(made, "thresholds", parts=2) if one.group.tokens > 512]
    assert found.group == Group("local", 8192, False) and found.decisions == 4
    assert min(found.gains_s) > 0


def test_the_regret_of_groups_leaves_out_gains_below_zero():
    wrong, right = Group("local", 512, False), Group("remote", 512, True)
    found = [
        GroupGains(wrong, 10, (0.1, 0.3)),
        GroupGains(right, 100, (-0.5, -0.5)),
        GroupGains(replace(right, crowded=False), 1, ()),
    ]
    regret = by_groups(found, cost_s=100.0)
    assert regret["share"] == pytest.approx(10 * 0.2 / 100)
    # Student's t of one degree of freedom, and a standard error of 0.1 s, for ten decisions.
    assert regret["high"] == pytest.approx(10 * (0.2 + 12.706 * 0.1) / 100)
    assert regret["low"] == pytest.approx(0.0)
    assert regret["unknown"] == 1 and len(regret["groups"]) == 2


def test_the_policy_is_a_variant_of_a_comparison():
    setting = Setting(
        requests=load("constant", 5, 10),
        timing=TIMING,
        options=OPTIONS,
        counts=WorkerCounts(1, 2),
        most_workers=6,
        start_s=1.0,
    )
    result = run_variant(variant("prefill-policy=shadow", setting), setting)
    assert result.name == "prefill-policy=shadow" and result.graph.tally.choices.opinions
    by_default = run_variant(variant("static:1P2D", setting), setting)
    assert not by_default.graph.tally.choices.opinions
    with pytest.raises(ConfigError, match="prefill-policy=cost"):
        variant("prefill-policy=best", setting)

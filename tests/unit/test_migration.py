"""How a request may migrate, depending on its sampling."""

import pytest

from dynamo_lite.request_plane.migration import Continue, Replay, SamplingFacts, Stay, plan


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (SamplingFacts(greedy=True), Continue),
        (SamplingFacts(greedy=True, seeded=True), Continue),
        (SamplingFacts(greedy=True, history_dependent=True), Replay),
        (SamplingFacts(greedy=True, grammar=True), Replay),
        (SamplingFacts(seeded=True), Replay),
        (SamplingFacts(seeded=True, history_dependent=True, grammar=True), Replay),
        (SamplingFacts(), Continue),
        (SamplingFacts(history_dependent=True), Continue),
        (SamplingFacts(grammar=True), Stay),
        (SamplingFacts(grammar=True, history_dependent=True), Stay),
        (SamplingFacts(causal=False, greedy=True), Replay),
        (SamplingFacts(causal=False, seeded=True), Replay),
        (SamplingFacts(causal=False), Stay),
    ],
)
def test_the_plan_and_its_reason(facts: SamplingFacts, kind: type):
    made = plan(facts)
    assert isinstance(made, kind)
    assert made.reason

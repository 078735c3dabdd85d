import random
from collections import Counter

import pytest

from dynamo_lite.policy.routing.pickers import Random, RoundRobin
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from tests.builders import endpoint_record

REQUEST = GenerateRequest(
    request_id="r", client_id="", prompt_token_ids=[1], sampling=b"", arrival_time=1.0
)


def picks(picker, members, count):
    return [picker.pick(members, REQUEST).member.lease_id for _ in range(count)]


def test_round_robin_takes_each_member_in_turn():
    assert picks(RoundRobin(), [endpoint_record(3), endpoint_record(1), endpoint_record(2)], 7) == [
        1,
        2,
        3,
        1,
        2,
        3,
        1,
    ]


def test_round_robin_neither_skips_nor_repeats_when_members_change():
    picker = RoundRobin()
    assert picks(picker, [endpoint_record(1), endpoint_record(2), endpoint_record(3)], 2) == [1, 2]
    assert picks(picker, [endpoint_record(2), endpoint_record(3), endpoint_record(4)], 3) == [
        3,
        4,
        2,
    ]
    assert picks(picker, [endpoint_record(3)], 2) == [3, 3]


def test_random_is_reproducible_and_reaches_everybody():
    members = [endpoint_record(1), endpoint_record(2), endpoint_record(3)]
    first = picks(Random(random.Random(7).randrange), members, 300)
    assert first == picks(Random(random.Random(7).randrange), members, 300)
    assert min(Counter(first).values()) > 60


@pytest.mark.parametrize("seed", range(10))
def test_members_that_are_left_out_change_nothing_for_the_others(seed: int):
    """As if they were no members; also where the same tuple comes again, out of order."""
    rng = random.Random(seed)
    pairs = [
        (RoundRobin(), RoundRobin()),
        (Random(random.Random(seed).randrange), Random(random.Random(seed).randrange)),
    ]
    members = tuple(endpoint_record(i) for i in rng.sample(range(20), 6))
    for _ in range(60):
        if rng.random() < 0.1:
            members = tuple(endpoint_record(i) for i in rng.sample(range(20), 6))
        without = {m.lease_id for m in rng.sample(members, rng.randrange(6))}
        rest = [m for m in members if m.lease_id not in without]
        for picker, other in pairs:
            assert picker.pick(members, REQUEST, without).member == other.pick(rest, REQUEST).member
    for picker, _ in pairs:
        with pytest.raises(NoWorkers):
            picker.pick(members, REQUEST, {m.lease_id for m in members})


@pytest.mark.parametrize("picker", [RoundRobin(), Random(random.Random(0).randrange)])
def test_every_choice_has_a_reason_and_nobody_is_an_error(picker):
    assert "2" in picker.pick([endpoint_record(1), endpoint_record(2)], REQUEST).reason
    with pytest.raises(NoWorkers):
        picker.pick([], REQUEST)

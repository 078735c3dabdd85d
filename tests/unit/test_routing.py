import random
from collections import Counter

import pytest

from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.routing.pickers import Random, RoundRobin
from tests.builders import endpoint_record, generate_request

REQUEST = generate_request()


def picks(picker, members, count):
    return [picker.pick(members, REQUEST).member.lease_id for _ in range(count)]


def members(*lease_ids):
    return [endpoint_record(lease_id) for lease_id in lease_ids]


def test_round_robin_takes_each_member_in_turn_and_neither_skips_nor_repeats_when_they_change():
    picker = RoundRobin()
    assert picks(picker, members(3, 1, 2), 7) == [1, 2, 3, 1, 2, 3, 1]
    assert picks(picker, members(1, 2, 3), 1) == [2]
    assert picks(picker, members(2, 3, 4), 3) == [3, 4, 2]
    assert picks(picker, members(3), 2) == [3, 3]


def test_random_is_reproducible_and_reaches_everybody():
    first, again = (picks(Random(random.Random(7).randrange), members(1, 2, 3), 300) for _ in "ab")
    assert first == again
    assert min(Counter(first).values()) > 60


@pytest.mark.parametrize("seed", range(10))
def test_members_that_are_left_out_change_nothing_for_the_others(seed: int):
    """As if they were no members."""
    rng = random.Random(seed)
    pairs = [
        (RoundRobin(), RoundRobin()),
        (Random(random.Random(seed).randrange), Random(random.Random(seed).randrange)),
    ]
    known = tuple(members(*rng.sample(range(20), 6)))
    for _ in range(60):
        if rng.random() < 0.1:
            known = tuple(members(*rng.sample(range(20), 6)))
        without = {m.lease_id for m in rng.sample(known, rng.randrange(6))}
        rest = [m for m in known if m.lease_id not in without]
        for picker, other in pairs:
            assert picker.pick(known, REQUEST, without).member == other.pick(rest, REQUEST).member
    for picker, _ in pairs:
        assert "6" in picker.pick(known, REQUEST).reason
        for nobody in ((known, {m.lease_id for m in known}), ([], set())):
            with pytest.raises(NoWorkers):
                picker.pick(nobody[0], REQUEST, nobody[1])

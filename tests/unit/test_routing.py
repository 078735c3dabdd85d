import random
from collections import Counter

import pytest

from dynamo_lite.policy.routing import Random, RoundRobin
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport

REQUEST = GenerateRequest(
    request_id="r", client_id="", prompt_token_ids=[1], sampling=b"", arrival_time=1.0
)


def member(lease_id: int) -> EndpointRecord:
    return EndpointRecord(
        component="VllmWorker",
        endpoint="generate",
        namespace="t",
        lease_id=lease_id,
        transport=EndpointTransport(nats_tcp=f"s{lease_id}"),
    )


def picks(picker, members, count):
    return [picker.pick(members, REQUEST).member.lease_id for _ in range(count)]


def test_round_robin_takes_each_member_in_turn():
    assert picks(RoundRobin(), [member(3), member(1), member(2)], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_round_robin_neither_skips_nor_repeats_when_members_change():
    picker = RoundRobin()
    assert picks(picker, [member(1), member(2), member(3)], 2) == [1, 2]
    assert picks(picker, [member(2), member(3), member(4)], 3) == [3, 4, 2]
    assert picks(picker, [member(3)], 2) == [3, 3]


def test_random_is_reproducible_and_reaches_everybody():
    members = [member(1), member(2), member(3)]
    first = picks(Random(random.Random(7).randrange), members, 300)
    assert first == picks(Random(random.Random(7).randrange), members, 300)
    assert min(Counter(first).values()) > 60


@pytest.mark.parametrize("picker", [RoundRobin(), Random(random.Random(0).randrange)])
def test_every_choice_has_a_reason_and_nobody_is_an_error(picker):
    assert "2" in picker.pick([member(1), member(2)], REQUEST).reason
    with pytest.raises(NoWorkers):
        picker.pick([], REQUEST)

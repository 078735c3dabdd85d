"""Which engines a Forwarder knows, and what it learns of them."""

from typing import Any

import pytest

from dynamo_lite.forward.choosing import EngineChooser, EngineView
from dynamo_lite.forward.discovery import Joined, sort_out
from dynamo_lite.forward.engines import KnownEngine
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.forward.protocols.base import LegOrder
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.protocol.records import EndpointRecord, StockEngine
from tests.builders import endpoint_record


def test_engines_are_discovered_where_none_is_listed_or_where_that_is_said():
    one = (EngineOptions(url="http://a:1", role="decode"),)
    prefill = (EngineOptions(url="http://a:1", role="prefill"),)
    assert ForwarderConfig().discovers
    assert not ForwarderConfig(engines=one).discovers
    assert ForwarderConfig(engines=prefill, discover=True).discovers
    with pytest.raises(ValueError, match="no engines; list some"):
        ForwarderConfig(discover=False)
    with pytest.raises(ValueError, match="both listed"):
        ForwarderConfig(engines=one, discover=True, protocol="neuron-static")


def test_the_last_port_there_is():
    at = EngineOptions(url="http://a:45535", role="decode")
    assert at.transfer_address("kvt-batch") == ("a", 65535)
    own = EngineOptions(url="http://a:50000", role="decode", transfer_port=7)
    assert own.transfer_address("kvt-batch") == ("a", 7)


def test_an_identity_that_comes_back_is_another_rank_s():
    one = KnownEngine(0, EngineOptions(url="http://a:1", role="prefill"), PROTOCOLS["nixl-push"])
    first, second = {"remote_engine_id": "a"}, {"remote_engine_id": "b"}
    for identity in (first, None, first, second, second):
        one.learned(identity)
        assert (one.varies, one.peer.identity) == (False, identity)
    one.learned(first)
    assert one.varies and one.peer.identity is None
    assert one.protocol.order_for(one.peer) is LegOrder.SERIAL
    one.forget()
    one.learned(first)
    assert not one.varies and one.peer.identity == first


def record(number: int, **engine: Any) -> EndpointRecord:
    given = {"url": f"http://10.0.0.{number}:80", "role": "decode", "protocol": "nixl"} | engine
    joined = StockEngine(**given)
    return endpoint_record(
        number, "DecodeEngine", "http", started_at=float(number), model="m", engine=joined
    )


def test_joined_engines_are_sorted_out():
    usable, unused = sort_out(
        [
            endpoint_record(9),
            record(3),
            record(2, url="http://10.0.0.3:80"),
            record(4, url="http://10.0.0.9:80"),
            record(5, protocol="sglang"),
            record(6, role="encode"),
            record(7, url="http://[::1"),
        ],
        ["10.0.0.9:80"],
        ForwarderConfig(),
    )
    options = EngineOptions(url="http://10.0.0.3:80", role="decode")
    # The one that was there first.
    assert usable == {"10.0.0.3:80": Joined(options, "m", "2")}
    assert {key: why.reason for key, why in unused.items()} == {
        ("10.0.0.3:80", "3"): "twice",
        ("10.0.0.9:80", "4"): "twice",
        ("http://10.0.0.5:80", "5"): "protocol",
        ("http://10.0.0.6:80", "6"): "role",
        ("http://[::1", "7"): "address",
    }
    high = [record(1, url="http://a:50000", protocol="kvt-batch")]
    _, unused = sort_out(high, [], ForwarderConfig(protocol="kvt-batch"))
    assert "at port 70000" in next(iter(unused.values())).trouble


def test_turns_of_engines_that_left_are_forgotten():
    options = ForwarderConfig().routing
    chooser = EngineChooser("round-robin", options, below=lambda n: 0)
    views = [EngineView(engine=number) for number in (0, 1)]
    taken = [chooser.choose(views) for _ in range(3)]
    assert [one.view.engine for one in taken] == [0, 1, 0]
    chooser.forget(0)
    again = chooser.choose(views)
    assert again.view.engine == 0

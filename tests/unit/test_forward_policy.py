"""Which engines take the legs of a request, and what is read of engines."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from dynamo_lite.forward import bodies, headers
from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.choosing import (
    BLOCK_BYTES,
    EngineChooser,
    EngineView,
    SentPrompts,
    Strategy,
    no_prefill_reason,
    text_chain,
)
from dynamo_lite.forward.engines import KnownEngine, KnownEngines, StockEngineLoad, parse_load
from dynamo_lite.forward.events import EventCutter
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.forward.placing import CannotServe, Placer, Tried
from dynamo_lite.forward.protocols import mooncake
from dynamo_lite.forward.protocols.base import COMPLETIONS, PrefillAnswer
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.rewriting import Changes, cached_by_prefill
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.protocol.options import KvRoutingOptions


def chooser(strategy: Strategy, *drawn: int) -> EngineChooser:
    left = list(drawn)
    return EngineChooser(strategy, KvRoutingOptions(), below=lambda n: left.pop(0))


def chosen(one: EngineChooser, views: Sequence[EngineView], times: int = 1) -> list[int]:
    return [one.choose(views).view.engine for _ in range(times)]


def views(
    *loads: int, matched: Sequence[int] = (), usage: Sequence[float] = ()
) -> list[EngineView]:
    return [
        EngineView(
            engine=number,
            load=load,
            matched=matched[number] if matched else 0,
            kv_usage=usage[number] if usage else 0.0,
        )
        for number, load in enumerate(loads)
    ]


def test_turns_are_fair_while_engines_come_and_go():
    one = chooser("round-robin")
    three = views(0, 0, 0)
    assert chosen(one, three, 4) == [0, 1, 2, 0]
    assert chosen(one, three[1:], 2) == [1, 2]
    assert chosen(one, three, 3) == [0, 1, 2]


def test_only_one():
    assert chooser("random").choose(views(9)).reason == "only"


def test_random_takes_each():
    assert chosen(chooser("random", 0, 1, 2), views(0, 0, 0), 3) == [0, 1, 2]


def test_least_load_takes_turns_among_equals_and_ignores_prefixes():
    one = chooser("least-load")
    assert chosen(one, views(5, 3, 3, matched=(99, 0, 0)), 3) == [1, 2, 1]


def test_a_prefix_is_worth_more_than_load_up_to_a_point():
    one = chooser("prefix")
    first = one.choose(views(50, 0, matched=(90, 0)))
    assert (first.view.engine, first.reason) == (0, "prefix")
    second = one.choose(views(500, 0, matched=(90, 0)))
    assert (second.view.engine, second.reason) == (1, "balance")


def test_a_full_engine_gets_nothing_while_another_has_room():
    one = chooser("least-load")
    assert chosen(one, views(0, 9, usage=(0.99, 0.1)), 2) == [1, 1]
    assert chosen(one, views(0, 9, usage=(0.99, 0.99))) == [0]


def test_engines_hold_the_prompts_that_they_were_sent():
    sent = SentPrompts()
    prompt = bytes(range(256)) * 4
    sent.sent(1, text_chain(prompt))
    longer = text_chain(prompt + b"x" * 300)
    assert sent.matched(longer) == {1: len(prompt) // 4}
    assert sent.matched(text_chain(b"y" + prompt)) == {}
    assert text_chain(b"x" * (BLOCK_BYTES - 1)) == []
    sent.forget(1)
    assert sent.matched(longer) == {}


@pytest.mark.parametrize(
    ("limit", "prompt", "cached", "engines", "reason"),
    [
        (0, 1, 0, 1, ""),
        (0, 1, 1, 1, ""),
        (0, 9, 0, 0, "no_prefill_worker"),
        (100, 100, 0, 1, "short"),
        (100, 101, 0, 1, ""),
        (100, 500, 450, 1, "cached"),
        (100, 500, 450, 0, "no_prefill_worker"),
    ],
)
def test_the_decider(limit: int, prompt: int, cached: int, engines: int, reason: str):
    found = no_prefill_reason(
        prompt_tokens=prompt,
        cached_tokens=cached,
        prefill_engines=engines,
        max_local_prefill_length=limit,
    )
    assert found == reason


def test_load_is_read_of_vllm_and_sglang():
    vllm = (
        "# HELP vllm:num_requests_running Number\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 9.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.5\n'
    )
    assert parse_load(vllm) == StockEngineLoad(6, 0.5, waiting=2)
    assert parse_load("sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\n") == StockEngineLoad(
        3, 0.0, 1
    )
    assert parse_load("process_cpu_seconds_total 1\nvllm:num_requests_running x\n") is None


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e400", "-1"])
def test_numbers_that_are_no_load_are_skipped(value: str):
    page = f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n"
    assert parse_load(page) is None
    assert parse_load(f"{page}vllm:num_requests_waiting 2\n") == StockEngineLoad(2, 0.0, waiting=2)


def engine(role: Any = "decode", protocol: str = "nixl", **fields: Any) -> KnownEngine:
    options = EngineOptions(url="http://10.0.0.1:8000", role=role, **fields)
    return KnownEngine(0, options, PROTOCOLS[protocol])


def placer(config: ForwarderConfig) -> tuple[Placer, KnownEngines]:
    """With healthy engines."""
    protocol = PROTOCOLS[config.protocol]
    engines = KnownEngines(config.engines, protocol)
    for one in engines.all:
        one.passed()
    return Placer(engines, protocol, config, SentPrompts()), engines


def request(**fields: Any) -> ClientRequest:
    return bodies.read(COMPLETIONS, msgspec.json.encode({"prompt": "p", **fields}))


def configured(*roles: Any, **options: Any) -> ForwarderConfig:
    engines = (EngineOptions(url=f"http://e:{n + 1}", role=role) for n, role in enumerate(roles))
    return ForwarderConfig(engines=tuple(engines), **options)


@pytest.mark.parametrize("when", ["batch", "staged"])
def test_an_engine_with_both_roles_takes_one_leg_of_a_request(when: Any):
    one, _ = placer(configured("prefill-decode", "prefill-decode", choose_decode=when))
    for _ in range(4):
        tried = Tried()
        placed = one.place(request(), tried)
        assert placed.prefill is not None and not placed.alone
        decode = placed.decode or one.place_decode(placed, tried)
        assert placed.prefill is not decode
    alone = one.place(request(n=2), Tried())
    assert (alone.prefill, alone.alone) == (None, "n")


def test_a_lone_engine_with_both_roles_does_everything():
    one, _ = placer(configured("prefill-decode"))
    placed = one.place(request(), Tried())
    assert placed.prefill is None and placed.decode is not None
    assert placed.alone == "no_prefill_worker"


def test_staged_choice_is_not_for_protocols_that_name_the_decode_engine_first():
    for name, staged in (("nixl", True), ("moriio-read", False), ("mooncake", False)):
        one, engines = placer(
            configured("prefill", "decode", protocol=name, choose_decode="staged")
        )
        engines[0].engine_ids = {0: "e"}
        placed = one.place(request(), Tried())
        assert placed.prefill is engines[0] and (placed.decode is None) is staged


def test_only_an_engine_with_both_roles_answers_alone_for_sglang():
    one, engines = placer(configured("prefill", "decode", "prefill-decode", protocol="sglang"))
    for _ in range(3):
        assert one.place(request(echo=True), Tried()).decode is engines[2]
    # Without a prefill engine that is left, too.
    assert one.place(request(), Tried(prefill={0, 2})).decode is engines[2]
    engines[2].failed("gone", at_once=True)
    with pytest.raises(NoWorkers):
        one.place(request(echo=True), Tried())
    only_pair, _ = placer(configured("prefill", "decode", protocol="sglang"))
    with pytest.raises(CannotServe, match="echo"):
        only_pair.place(request(echo=True), Tried())


def test_other_requests_are_those_beyond_ours():
    one = engine()
    with one.leg(10), one.leg(5) as second:
        one.reported(StockEngineLoad(5, 0.5))
        assert (one.other_requests, one.waiting_tokens) == (3, 15)
        second()
        assert one.waiting_tokens == 10
    assert (one.legs, one.waiting_tokens) == (0, 0)


def test_an_engine_needs_two_failures_or_one_refusal_to_be_unhealthy():
    one = engine()
    assert not one.usable and one.passed() and one.usable
    assert not one.failed("late") and one.usable
    assert not one.passed()
    assert not one.failed("late") and one.failed("late") and not one.usable
    assert one.passed() and one.failed("refused", at_once=True)


def test_where_a_handover_listens():
    assert engine(protocol="mooncake").transfer_address == ("10.0.0.1", 8998)
    assert engine(protocol="kvt-batch").transfer_address == ("10.0.0.1", 28000)
    own = engine(protocol="mooncake", transfer_host="10.1.0.1", transfer_port=7)
    assert own.transfer_address == ("10.1.0.1", 7)


def test_a_handover_listens_where_an_engine_can_connect_to():
    for good in ("10.1.0.1", "fe80::1", "decode-0.decode.prod.svc.cluster.local", "node_7", "h."):
        assert engine(transfer_host=good).transfer_address[0] == good
    for bad in ("", "0.0.0.0", "::", "*", "[::1]", "10.0.0.1:6301", "10.0.0.300", "tcp://h", "a b"):
        with pytest.raises(ValueError, match="transfer-host is"):
            engine(transfer_host=bad)


def test_engine_ids_of_mooncake():
    page = b'{"0": {"engine_id": "a", "worker_addr": {}}, "1": {"engine_id": "b"}}'
    assert mooncake.engine_ids(page) == {0: "a", 1: "b"}
    for bad in (b"", b"[]", b'{"x": {"engine_id": "a"}}', b'{"0": {}}'):
        with pytest.raises(ValueError):
            mooncake.engine_ids(bad)


def answer(**fields: Any) -> PrefillAnswer:
    return msgspec.json.decode(msgspec.json.encode(fields), type=PrefillAnswer)


def test_cached_tokens_are_corrected_only_where_the_engine_does_not():
    usage = {"prompt_tokens_details": {"cached_tokens": 3}}
    assert cached_by_prefill(answer(usage=usage), {}) == 3
    assert cached_by_prefill(answer(usage={"input_tokens_details": {"cached_tokens": 0}}), {}) == 0
    told = {"remote_prefill_cached_tokens": 2}
    of_prefill = answer(usage=usage, kv_transfer_params=told)
    for params in (told, of_prefill.kv_transfer_params):
        assert cached_by_prefill(of_prefill, {"kv_transfer_params": params}) is None
    # The decode leg has params of its own.
    assert cached_by_prefill(of_prefill, {"kv_transfer_params": {"do_remote_prefill": True}}) == 2
    odd = answer(usage=usage, kv_transfer_params={"remote_prefill_cached_tokens": None})
    assert cached_by_prefill(odd, {}) == 3
    for silent in ({}, {"usage": None}, {"usage": {"prompt_tokens_details": None}}):
        assert cached_by_prefill(answer(**silent), {}) is None


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_cut_wherever_they_arrive(line_end: bytes):
    end = line_end * 2
    event = b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": 50}}}' + end
    fixed = b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":3}}}' + end
    other = b'data: {"choices": []}' + end
    whole = other + event + other
    for size in range(1, len(whole)):
        cutter, changes, shown = EventCutter(), Changes(cached_tokens=3), b""
        for start in range(0, len(whole), size):
            if events := cutter.feed(whole[start : start + size]):
                shown += changes.events(events)
        assert shown + cutter.flush() == other + fixed + other


def test_headers_of_one_hop_and_hosts_do_not_pass():
    given: CIMultiDict[str] = CIMultiDict(
        [
            ("Host", "a"),
            ("Connection", "close, X-Mine"),
            ("X-Mine", "1"),
            ("Keep-Alive", "x"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Length", "1"),
            ("X-Prefiller-Host-Port", "10.0.0.9:1"),
            ("X-Data-Parallel-Host-Port", "10.0.0.9:1"),
            ("X-Data-Parallel-Rank", "1"),
            ("Authorization", "Bearer x"),
            ("X-Custom", "a"),
            ("X-Custom", "b"),
        ]
    )
    passed = headers.to_engine(CIMultiDictProxy(given))
    assert list(passed.items()) == [
        ("Authorization", "Bearer x"),
        ("X-Custom", "a"),
        ("X-Custom", "b"),
    ]
    leg = headers.for_leg(passed, {"x-request-id": "1", "authorization": "ours"})
    assert leg["X-Request-Id"] == "1" and leg.getall("authorization") == ["ours"]


@pytest.mark.parametrize(
    ("engines", "protocol", "problem"),
    [
        ([("http://a:1", "prefill")], "nixl", "no engine decodes"),
        ([("http://a:1", "decode"), ("http://a:1", "prefill")], "nixl", "named twice"),
        ([("http://a:1", "decode")], "neuron-static", "one prefill and one decode"),
        ([("ftp://a:1", "decode")], "nixl", "expected http://HOST:PORT"),
        ([("http://a", "decode")], "nixl", "expected http://HOST:PORT"),
        ([("http://u:p@a:1", "decode")], "nixl", "expected http://HOST:PORT"),
        ([("http://a:1/v1", "decode")], "nixl", "expected http://HOST:PORT"),
        ([("http://a:99999", "decode")], "nixl", "expected http://HOST:PORT"),
        ([("http://a:45536", "decode")], "kvt-batch", "at port 65536 .*give transfer-port"),
        ([("http://a:50000", "decode")], "kvt-staged", "at port 70000"),
        ([], "neuron-static", "use neuron-dynamic"),
    ],
)
def test_bad_engines_are_refused(engines: list[tuple[str, Any]], protocol: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        ForwarderConfig(
            protocol=protocol,
            engines=tuple(EngineOptions(url=url, role=role) for url, role in engines),
        )

"""Which engines there are, what is read of them, and which take the legs of a request."""

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import structs
from multidict import CIMultiDict, CIMultiDictProxy

from dynamo_lite.forward import bodies, headers, health
from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.engines import KnownEngine, parse_load
from dynamo_lite.forward.failures import LegFailed
from dynamo_lite.forward.forwarder import sort_out
from dynamo_lite.forward.health import KnownEngines
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.forward.placing import EnginePlacement, NoEngine, Placer, Tried
from dynamo_lite.forward.prompts import BLOCK_BYTES, text_chain
from dynamo_lite.forward.protocols import mooncake
from dynamo_lite.forward.protocols.base import COMPLETIONS
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.protocol.kv import Load
from dynamo_lite.protocol.records import EndpointRecord, StockEngine
from tests.builders import endpoint_record


def placer(*roles: Any, **options: Any) -> tuple[Placer, KnownEngines]:
    """With healthy engines."""
    listed = (EngineOptions(url=f"http://e:{n + 1}", role=role) for n, role in enumerate(roles))
    config = ForwarderConfig(engines=tuple(listed), **options)
    protocol = PROTOCOLS[config.protocol]
    unasked: Any = None
    engines = KnownEngines(config.engines, protocol, unasked, 1.0, by_load=True)
    for one in engines.all:
        one.passed()
    return Placer(engines, config), engines


def request(**fields: Any) -> ClientRequest:
    return bodies.read(COMPLETIONS, msgspec.json.encode({"prompt": "p", **fields}))


def ended(one: Placer, placed: EnginePlacement, *, computed: bool = True) -> EnginePlacement:
    """An attempt has ended."""
    for leg in ("prefill", "decode"):
        if computed:
            one.computed(placed, leg)
        one.released(placed, leg)
    return placed


def place(one: Placer, tried: Tried | None = None, **fields: Any) -> EnginePlacement:
    """Of an attempt that ends at once, without an answer."""
    return ended(one, one.place(request(**fields), tried or Tried()), computed=False)


def chosen(one: Placer, times: int = 1) -> list[int]:
    """The decode engines of requests of equal prompts."""
    return [place(one).decode.number for _ in range(times)]


async def test_turns_are_fair_while_engines_come_and_go():
    one, engines = placer("decode", "decode", "decode")
    first, _, last = engines.all
    assert chosen(one, 4) == [0, 1, 2, 0]
    first.failed("gone", at_once=True)
    assert chosen(one, 2) == [1, 2]
    first.passed()
    assert chosen(one, 3) == [0, 1, 2]
    engines.remove(last)
    engines.add(last.options).passed()
    assert chosen(one, 2) == [3, 0]


async def test_each_leg_has_turns_of_its_own_among_engines_of_both_roles():
    one, _ = placer(*["prefill-decode"] * 3)
    placed = [place(one) for _ in range(12)]
    assert {each.decode.number for each in placed} == {0, 1, 2}
    assert {each.prefill.number for each in placed if each.prefill} == {0, 1, 2}


async def test_the_model_of_engines_that_are_gone_for_long_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
):
    _, engines = placer("decode", "decode")
    first, second = engines.all
    models: dict[KnownEngine, str] = {first: "old", second: "old"}

    async def check(_: Any, engine: KnownEngine) -> None:
        if engine not in models:
            raise LegFailed(engine, "check", "refused", "down")
        engine.heard_at = asyncio.get_running_loop().time()
        engine.models = (models[engine],)

    async def checked() -> None:
        for engine in engines.all:
            await engines.check(engine)

    monkeypatch.setattr(health, "check", check)
    await checked()
    models.clear()
    await checked()
    models[first] = "new"
    await checked()
    assert "it serves new and not old" in first.trouble
    second.heard_at -= 61.0
    await checked()
    assert first.usable
    models[second] = "old"
    await checked()
    assert first.usable and "it serves old and not new" in second.trouble


def test_load_and_prefixes():
    one, _ = placer("decode")
    [choice] = place(one).choices
    assert (choice.reason, choice.of) == ("only", 1)
    one, engines = placer("decode", "decode", "decode", "prefill", "prefill")
    prompt = "x" * 512
    sent = ended(one, one.place(request(prompt=prompt), Tried()))
    assert sent.prefill is not None
    # Equally loaded ones take turns, where prefixes do not count.
    engines.reported(sent.decode, Load(1))
    others = [place(one, prompt=prompt).decode.number for _ in range(3)]
    assert sent.decode.number not in others and len(set(others)) == 2
    # A prefix is worth more than load, up to a point.
    for requests, reason in ((7, "prefix"), (9, "balance")):
        engines.reported(sent.prefill, Load(requests))
        placed = place(one, prompt=prompt)
        assert (placed.prefill is sent.prefill) == (reason == "prefix")
        assert placed.choices[0].reason == reason


def test_a_full_engine_gets_nothing_while_another_has_room():
    one, engines = placer("decode", "decode")
    full, busy = engines.all
    engines.reported(full, Load(kv_usage=0.99))
    engines.reported(busy, Load(9))
    assert chosen(one, 2) == [1, 1]
    engines.reported(busy, Load(9, kv_usage=0.99))
    assert chosen(one) == [0]


async def test_engines_hold_the_prompts_that_they_were_sent():
    one, engines = placer("decode", "decode")

    def held(prompt: str) -> list[int]:
        """Of each engine, in blocks."""
        found = engines.prompts.match(text_chain(request(prompt=prompt).prompt))
        return [found.get(engine.number, 0) for engine in engines.all]

    prompt = "".join(map(chr, range(35, 90))) * 20
    full = (1 + len(prompt)) // BLOCK_BYTES
    begun = one.place(request(prompt=prompt), Tried())
    assert begun.decode is engines.all[0] and held(prompt) == [full, 0]
    ended(one, begun, computed=False)
    assert held(prompt) == [0, 0]
    engine = ended(one, one.place(request(prompt=prompt), Tried())).decode
    assert engine is engines.all[1]
    assert held(prompt + "x" * 300) == [0, full]
    assert held("y" + prompt) == [0, 0]
    assert text_chain(b"x" * (BLOCK_BYTES - 1)) == []
    engines.failed(engine, LegFailed(engine, "decode", "refused", ""))
    engine.passed()
    assert held(prompt) == [0, 0]
    placed = one.place(request(prompt=prompt), Tried())
    assert len(engines.prompts) == full
    engines.remove(placed.decode)
    ended(one, placed)  # a leg that was open then has ended
    assert len(engines.prompts) == 0


@pytest.mark.parametrize(
    ("limit", "tokens", "alone"), [(100, 100, "short"), (100, 101, ""), (0, 1, "")]
)
def test_which_prompts_get_a_prefill_leg(limit: int, tokens: int, alone: str):
    one, _ = placer("prefill", "decode", max_local_prefill_length=limit)
    asked = request(prompt="x" * (4 * tokens - 2))  # in quotes
    assert one.place(asked, Tried()).alone == alone


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
    assert parse_load(vllm) == Load(4, 2, 0.5)
    sglang = "sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\n"
    assert parse_load(sglang) == Load(2, 1)
    assert parse_load("process_cpu_seconds_total 1\nvllm:num_requests_running x\n") is None
    for value in ("NaN", "+Inf", "-Inf", "1e400", "-1"):
        page = f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n"
        assert parse_load(page) is None
        waiting = f"{page}vllm:num_requests_waiting 2\n"
        assert parse_load(waiting) == Load(0, 2)


def engine(role: Any = "decode", protocol: str = "nixl", **fields: Any) -> KnownEngine:
    options = EngineOptions(**{"url": "http://10.0.0.1:8000", "role": role, **fields})
    return KnownEngine(0, options, PROTOCOLS[protocol])


def test_an_engine_with_both_roles_takes_one_leg_of_a_request():
    one, _ = placer("prefill-decode", "prefill-decode", protocol="kvt-staged")
    for _ in range(4):
        tried = Tried()
        placed = one.place(request(), tried)
        assert placed.prefill is not None and not placed.alone
        assert placed.prefill is not placed.decode
        one.place_decode(placed, tried)
        assert placed.decode is not placed.prefill
        assert [choice.leg for choice in placed.choices] == ["prefill", "decode"]
    alone = one.place(request(n=2), Tried())
    assert (alone.prefill, alone.alone) == (None, "n")
    one, _ = placer("prefill-decode")  # a lone one does everything
    placed = one.place(request(), Tried())
    assert placed.prefill is None and placed.decode is not None
    assert placed.alone == "no_prefill_worker"


def test_only_an_engine_with_both_roles_answers_alone_for_sglang():
    one, engines = placer("prefill", "decode", "prefill-decode", protocol="sglang")
    for _ in range(3):
        assert one.place(request(echo=True), Tried()).decode is engines.all[2]
    # Without a prefill engine that is left, too.
    assert one.place(request(), Tried(prefill={0, 2})).decode is engines.all[2]
    engines.all[2].failed("gone", at_once=True)
    with pytest.raises(NoEngine):
        one.place(request(echo=True), Tried())
    only_pair, _ = placer("prefill", "decode", protocol="sglang")
    with pytest.raises(NoEngine, match="echo"):
        only_pair.place(request(echo=True), Tried())


def test_a_leg_is_load_until_it_has_ended():
    one, engines = placer("prefill", "decode")
    loads = engines.loads
    placed = one.place(request(prompt="x" * 398), Tried())
    assert [loads.of(number) for number in (0, 1)] == [132, 32]
    engines.reported(engines.all[0], Load(3, 2))  # four of others
    assert loads.of(0) == 132 + 4 * 32
    one.computed(placed, "prefill")
    assert loads.of(0) == 5 * 32
    ended(one, placed)
    assert not loads.requests and loads.of(0) == 4 * 32


def test_an_engine_needs_two_failures_or_one_refusal_to_be_unhealthy():
    one = engine()
    assert not one.usable and one.passed() and one.usable
    assert not one.failed("late") and one.usable
    assert not one.passed()
    assert not one.failed("late") and one.failed("late") and not one.usable
    assert one.passed() and one.failed("refused", at_once=True)


def test_another_identity_of_an_engine_that_has_not_ended_is_another_rank_s():
    one = engine("prefill", "nixl-push")
    first, second = {"remote_engine_id": "a"}, {"remote_engine_id": "b"}
    for identity in (first, None, first):
        one.learned(identity)
        assert (one.varies, one.peer.identity) == (False, identity)
    one.learned(second)
    assert one.varies and one.peer.identity is None
    assert one.protocol.order_for(one.peer) == "serial"
    one.passed()
    one.failed("gone", at_once=True)
    one.learned(first)
    assert not one.varies and one.peer.identity == first


def listens(**fields: Any) -> tuple[str, int]:
    peer = engine(**fields).peer
    return peer.host, peer.port


def test_where_a_handover_listens():
    assert listens(protocol="mooncake") == ("10.0.0.1", 8998)
    for port, kvt in ((8000, 28000), (45535, 65535)):
        assert listens(protocol="kvt-batch", url=f"http://10.0.0.1:{port}") == ("10.0.0.1", kvt)
    own = {"url": "http://a:50000", "transfer_host": "b", "transfer_port": 7}
    assert listens(protocol="kvt-batch", **own) == ("b", 7)
    for good in ("10.1.0.1", "fe80::1", "decode-0.decode.prod.svc.cluster.local", "node_7", "h."):
        assert listens(transfer_host=good)[0] == good
    for bad in ("", "0.0.0.0", "::", "*", "[::1]", "tcp://h", "a b"):
        with pytest.raises(ValueError, match="transfer-host is"):
            engine(transfer_host=bad)


def test_engine_ids_of_mooncake():
    page = b'{"0": {"engine_id": "a", "worker_addr": {}}, "1": {"engine_id": "b"}}'
    assert mooncake.engine_ids(page) == {0: "a", 1: "b"}
    for bad in (b"", b"[]", b'{"x": {"engine_id": "a"}}', b'{"0": {}}'):
        with pytest.raises(ValueError):
            mooncake.engine_ids(bad)


def test_headers_of_one_hop_and_hosts_do_not_pass():
    passing = [("Authorization", "Bearer x"), ("X-Custom", "a"), ("X-Custom", "b")]
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
            ("Accept-Encoding", "gzip"),
            *passing,
        ]
    )
    passed = headers.to_engine(CIMultiDictProxy(given))
    assert list(passed.items()) == passing


@pytest.mark.parametrize(
    ("engines", "options", "problem"),
    [
        ([], {"discover": False}, "no engines; list some"),
        ([("http://a:1", "prefill")], {}, "no engine decodes"),
        ([("http://a:1", "decode"), ("http://a:1", "prefill")], {}, "named twice"),
        ([("http://a:1", "decode")], {"protocol": "neuron-static"}, "one prefill and one decode"),
        (
            [("http://a:1", "prefill"), ("http://b:1", "decode")],
            {"protocol": "neuron-static", "discover": True},
            "both listed",
        ),
        ([("ftp://a:1", "decode")], {}, "expected http://HOST:PORT"),
        ([("http://a", "decode")], {}, "expected http://HOST:PORT"),
        ([("http://u:p@a:1", "decode")], {}, "expected http://HOST:PORT"),
        ([("http://a:1/v1", "decode")], {}, "expected http://HOST:PORT"),
        ([("http://a:99999", "decode")], {}, "expected http://HOST:PORT"),
        (
            [("http://a:45536", "decode")],
            {"protocol": "kvt-batch"},
            "at port 65536 .*give transfer-port",
        ),
        ([], {"protocol": "neuron-static"}, "use neuron-dynamic"),
    ],
)
def test_bad_engines_are_refused(
    engines: list[tuple[str, Any]], options: dict[str, Any], problem: str
):
    with pytest.raises(ValueError, match=problem):
        listed = tuple(EngineOptions(url=url, role=role) for url, role in engines)
        ForwarderConfig(engines=listed, **options)


def test_engines_are_discovered_where_none_is_listed_or_where_that_is_said():
    one = (EngineOptions(url="http://a:1", role="decode"),)
    prefill = (EngineOptions(url="http://a:1", role="prefill"),)
    assert ForwarderConfig().discovers
    assert not ForwarderConfig(engines=one).discovers
    assert ForwarderConfig(engines=prefill, discover=True).discovers


def record(number: int, **engine: Any) -> EndpointRecord:
    given = {"url": f"http://10.0.0.{number}:80", "role": "decode", "protocol": "nixl"} | engine
    joined = StockEngine(**given)
    return endpoint_record(
        number, "DecodeEngine", "http", started_at=float(number), model="m", engine=joined
    )


def test_joined_engines_are_sorted_out():
    records = [
        endpoint_record(9),
        record(3),
        record(2, url="http://10.0.0.3:80"),
        record(4, url="http://10.0.0.9:80"),
        record(5, protocol="sglang"),
        record(6, role="encode"),
        record(7, url="http://[::1"),
        structs.replace(record(8), component="Frontend"),
    ]
    usable, unused = sort_out(records, ["10.0.0.9:80"], ForwarderConfig())
    options = EngineOptions(url="http://10.0.0.3:80", role="decode")
    # The one that was there first.
    assert usable == {"10.0.0.3:80": (options, records[2])}
    told = {
        "3": "http://10.0.0.3:80 (decode): it is already known by lease 2",
        "4": "http://10.0.0.9:80 (decode): it is already known in this Forwarder's configuration",
        "5": "http://10.0.0.5:80 (decode): it speaks sglang, and this Forwarder nixl",
        "6": "http://10.0.0.6:80 (encode): Invalid enum value 'encode'",
        "7": "http://[::1 (decode): expected http://HOST:PORT",
        "8": "http://10.0.0.8:80 (decode): a Frontend may not register it",
    }
    assert unused.keys() == told.keys()
    assert all(unused[lease].startswith(why) for lease, why in told.items())
    high = [record(1, url="http://a:50000", protocol="kvt-batch")]
    _, unused = sort_out(high, [], ForwarderConfig(protocol="kvt-batch"))
    assert "at port 70000" in unused["1"]

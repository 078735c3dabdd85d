"""Live options by their keys; what a decode engine makes of them."""

import asyncio
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
from msgspec import UNSET, UnsetType
from prometheus_client import CollectorRegistry

from dynamo_lite.cli import live_options, live_options_view
from dynamo_lite.disagg.decode.live_thresholds import LiveThresholds
from dynamo_lite.disagg.engine_config import DecodeEngineConfig
from dynamo_lite.policy.routing.admission import Limits
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.live_options import (
    FrontendLiveOptions,
    LiveOptionsRecord,
    RouterLiveOptions,
    VllmWorkerLiveOptions,
    decode_live_options,
    encode_live_options,
)
from dynamo_lite.protocol.options import DisaggOptions
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.services.config import FrontendConfig, KvRouterOptions, VllmWorkerConfig
from dynamo_lite.services.live_options import ComponentOptions, limits
from dynamo_lite.simulation.servers.memory import MemoryStore

WORKER = "VllmWorker"


@pytest.mark.parametrize(
    ("configs", "live"),
    [
        ([VllmWorkerConfig], VllmWorkerLiveOptions),
        ([FrontendConfig, KvRouterOptions], FrontendLiveOptions),
        ([KvRouterOptions], RouterLiveOptions),
    ],
)
def test_live_options_have_the_ranges_of_the_file(configs: list[type], live: type):
    file: dict[str, Any] = {}
    for config in configs:
        file |= get_type_hints(config, include_extras=True)
    for name, hint in get_type_hints(live, include_extras=True).items():
        mine = {kind for kind in get_args(hint) if kind is not UnsetType}
        theirs = {kind for kind in get_args(file[name]) if kind is type(None)}
        plain = {file[name]} if not theirs else set(get_args(file[name]))
        assert mine == plain, name


@pytest.mark.parametrize(
    ("words", "edits"),
    [
        (["VllmWorker.max-local-prefill-length=256"], {"max-local-prefill-length": 256}),
        (["VllmWorker.max-local-prefill-length", "0"], {"max-local-prefill-length": 0}),
        (["VllmWorker.remote-prefill-timeout-s=5"], {"remote-prefill-timeout-s": 5.0}),
        (["VllmWorker.single-flight-min-length=null"], {"single-flight-min-length": None}),
        (
            ["VllmWorker.max-remote-prefills=1", "VllmWorker.max-queued-tokens=10"],
            {"max-remote-prefills": 1, "max-queued-tokens": 10},
        ),
    ],
)
def test_edits(words: list[str], edits: dict[str, Any]):
    assert live_options.parse_edits(words) == {WORKER: edits}


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        (
            "VllmWorker.max-local-prefill-length=-1",
            "a whole number ≥ 0 and ≤ 1,000,000,000, got -1",
        ),
        ("VllmWorker.max-local-prefill-length=1.5", "got 1.5"),
        ("VllmWorker.max-local-prefill-length='5'", "got '5'"),
        ("VllmWorker.max-local-prefill-length=true", "got True"),
        ("VllmWorker.max-local-prefill-length=", "got None"),
        ("VllmWorker.max-local-prefill-length=10000000001", "got 10000000001"),
        ("VllmWorker.max-remote-prefills=0", "a whole number > 0"),
        ("VllmWorker.remote-prefill-timeout-s=0", "a number > 0"),
        ("VllmWorker.steal-back=1", "expected true or false, got 1"),
        ("VllmWorker.remote-prefill-timeout-s=.inf", "got inf"),
        ("VllmWorker.remote-prefill-timeout-s=.nan", "got nan"),
        ("VllmWorker.single-flight-min-length=x", "or null, got 'x'"),
        (
            "VllmWorker.max-local-prefil-length=1",
            "did you mean VllmWorker.max-local-prefill-length",
        ),
        ("VllmWorker.queue=1", "unknown key"),
        ("Router.kv-router.kv-weight=-1", "a number ≥ 0 and ≤ 1,000,000, got -1"),
        ("Frontend.kv-router.max-kv-usage=1.5", "a number > 0 and ≤ 1, got 1.5"),
        ("Router.kv-router.temperature=.nan", "got nan"),
        ("Router.kv-weight=1", "did you mean Router.kv-router.kv-weight"),
        ("Router.kv-router.max-index-blocks=1", "unknown key"),
        ("Frontend.port=1", "unknown key"),
        ("max-local-prefill-length=1", "unknown key"),
        ("VllmWorker.max-local-prefill-length=[1", "not valid YAML"),
        ("VllmWorker.max-local-prefill-length", "expected KEY=VALUE"),
    ],
)
def test_bad_edits_come_with_what_is_accepted(word: str, complaint: str):
    with pytest.raises(ConfigError) as caught:
        live_options.parse_edits([word])
    assert complaint in caught.value.mistakes[0]


def test_every_mistake_is_named():
    with pytest.raises(ConfigError) as caught:
        live_options.parse_edits(["a=1", "VllmWorker.max-remote-prefills=0", "b"])
    assert len(caught.value.mistakes) == 3


def test_a_component_stands_for_all_of_its_keys():
    assert live_options.parse_unsets(["VllmWorker"]) == {
        WORKER: dict.fromkeys(live_options.options_of(WORKER), UNSET)
    }
    with pytest.raises(ConfigError):
        live_options.parse_unsets(["PrefillWorker"])


def test_a_record_is_this_json_and_comes_back():
    values = VllmWorkerLiveOptions(max_local_prefill_length=256, single_flight_min_length=None)
    record = LiveOptionsRecord(values=values, version=3, by="me@here", at=1.5)
    data = encode_live_options(record)
    assert data == (
        b'{"values":{"max-local-prefill-length":256,"single-flight-min-length":null},'
        b'"version":3,"by":"me@here","at":1.5}'
    )
    assert decode_live_options(data, VllmWorkerLiveOptions) == record


def role(**fields: Any) -> DecodeEngineConfig:
    return DecodeEngineConfig(
        options=DisaggOptions(max_local_prefill_length=50, **fields),
        prefill_component="PrefillWorker",
        queue=QueueConfig(),
    )


def test_an_engine_takes_what_was_set_and_its_link_for_the_rest():
    live = LiveThresholds(role(), block_size=16)
    assert live.now.single_flight.min_shared_tokens == 48
    before = live.now
    live.change(VllmWorkerLiveOptions(max_local_prefill_length=20, queue_view_max_age_s=1.0), 4)
    assert before.version == 0 and live.now.version == 4
    assert live.now.options.max_local_prefill_length == 20
    assert live.now.options.max_prefill_queue_size == 8
    assert live.now.options.queue_view_max_age_s == 1.0
    assert live.now.single_flight.min_shared_tokens == 16
    options = live.now.options
    assert (options.remote_prefill_timeout_s, options.max_remote_prefills) == (30.0, 2)
    live.change(VllmWorkerLiveOptions(), 5)
    assert live.now.options == before.options


def test_null_is_a_value_of_its_own():
    live = LiveThresholds(role(single_flight_min_length=5), block_size=16)
    assert live.now.single_flight.min_shared_tokens == 5
    live.change(VllmWorkerLiveOptions(single_flight_min_length=None), 1)
    assert live.now.single_flight.min_shared_tokens == 48
    live.change(VllmWorkerLiveOptions(single_flight_min_length=0), 2)
    assert live.now.single_flight.min_shared_tokens == 0


def worker(version: int | None, engine: int | None = None, refused: str = "") -> dict[str, Any]:
    file = {option: 512 for option in live_options.options_of(WORKER)}
    said = {"version": version, "engine_version": engine, "file": file, "refused": refused}
    return {"lease": "a", "pid": 1, **(said if version is not None else {"version": None})}


def test_who_follows_is_shown_and_who_does_not():
    record = LiveOptionsRecord(
        values=VllmWorkerLiveOptions(max_local_prefill_length=7), version=2, by="me@here", at=0.0
    )
    workers = [worker(2, 2), worker(2), worker(2, 1), worker(1, 1, "bad"), worker(None)]
    shown = live_options_view.as_text(WORKER, record, workers)
    lines = shown.splitlines()
    [line] = [line for line in lines if "max-local-prefill-length" in line]
    assert line.split()[1:3] == ["7", "512"]
    assert "version 2 by me@here" in shown and "followed by 2 of 5" in shown
    assert [line.split(": ", 1)[1] for line in lines[-3:]] == [
        "version 2, its engine 1",
        "version 1; refuses the record in etcd: bad",
        "does not answer",
    ]
    one = live_options_view.as_text(WORKER, None, [], "max-remote-prefills").splitlines()
    assert one[1].split()[1:3] == ["-", "?"] and "version 0" in one[-1]
    told = live_options_view.as_json(WORKER, record, workers)
    assert told["values"] == {"max-local-prefill-length": 7}
    assert [w["follows"] for w in told["processes"]] == [True, True, False, False, False]


def test_a_change_is_one_line_for_each_value():
    old = LiveOptionsRecord(values=VllmWorkerLiveOptions(max_local_prefill_length=7), version=1)
    new = LiveOptionsRecord(
        values=VllmWorkerLiveOptions(single_flight_min_length=None), version=2, by="me@here"
    )
    assert live_options_view.change_lines(live_options.RecordChange(WORKER, old, new)) == [
        "VllmWorker.max-local-prefill-length: 7 -> (file)  (version 2 by me@here)",
        "VllmWorker.single-flight-min-length: (file) -> null  (version 2 by me@here)",
    ]
    [line] = live_options_view.change_lines(live_options.RecordChange(WORKER, new, new))
    assert "no value differs" in line
    lines = live_options_view.change_lines(live_options.RecordChange(WORKER, old, None))
    assert lines == ["VllmWorker.max-local-prefill-length: 7 -> (file)  (record removed)"]


async def test_a_component_applies_its_limits_and_says_what_holds():
    store, registry, applied = MemoryStore(), CollectorRegistry(), list[Limits]()
    drops: list[str] = []
    host: Any = SimpleNamespace(
        store=store,
        registry=registry,
        drops=drops.append,
        secret=None,
        spec=SimpleNamespace(namespace="t", component="Frontend"),
    )
    config = FrontendConfig(max_queued_tokens=7, kv_router=KvRouterOptions(kv_weight=3.0))
    options = ComponentOptions(
        host, config, FrontendLiveOptions(), lambda values: applied.append(limits(config, values))
    )
    async with options.following, asyncio.timeout(5):
        assert options.facts() == {
            "version": 0,
            "newest": 0,
            "engine_version": None,
            "file": {
                "kv-router.kv-weight": 3.0,
                "kv-router.load-weight": 1.0,
                "kv-router.request-load-tokens": 32,
                "kv-router.temperature": 0.0,
                "kv-router.max-kv-usage": 0.95,
                "max-in-flight-requests": 2048,
                "max-queued-tokens": 7,
            },
            "refused": "",
        }
        await live_options.write(store, "t", "Frontend", {"max-in-flight-requests": 3})
        while not applied:
            await asyncio.sleep(0)
        assert applied == [Limits(in_flight=3, prompt_tokens=7)]
        assert registry.get_sample_value("dynamo_lite_options_version") == 1
        await store.put(names.live_options_key("t", "Frontend"), b"{}")
        while not drops:
            await asyncio.sleep(0)
        assert options.facts()["version"] == 1 and "missing" in options.facts()["refused"]
        await live_options.write(
            store, "t", "Frontend", live_options.parse_unsets(["Frontend"])["Frontend"]
        )
        while len(applied) < 2:
            await asyncio.sleep(0)
    assert applied[1] == Limits(in_flight=2048, prompt_tokens=7)


def test_a_router_weighs_by_what_was_set_and_its_file_for_the_rest():
    file = KvRouterOptions(kv_weight=3.0, max_kv_usage=0.5)
    assert RouterLiveOptions().applied_to(file).kv_weight == 3.0
    values = decode_live_options(
        b'{"values":{"kv-router.kv-weight":0.5,"kv-router.temperature":2},"version":1}',
        RouterLiveOptions,
    ).values
    made = values.applied_to(file)
    assert (made.kv_weight, made.temperature, made.max_kv_usage) == (0.5, 2.0, 0.5)
    assert (made.load_weight, made.request_load_tokens) == (1.0, 32)

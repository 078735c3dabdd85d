"""Live options by their keys; what a component and a decode engine make of them."""

from typing import Any, get_type_hints

import pytest
from msgspec import UNSET

from dynamo_lite.cli import live_options
from dynamo_lite.cli.listing import Place
from dynamo_lite.planner import drains
from dynamo_lite.planner.config import PlannerConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_json
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.live_options import (
    LIVE_OPTIONS,
)
from dynamo_lite.serve.services.config import FrontendConfig, RouterConfig, VllmWorkerConfig
from tests.builders import endpoint_record
from tests.twins.servers import MemoryStore

WORKER = "VllmWorker"


@pytest.mark.parametrize(
    ("component", "config"),
    [
        (WORKER, VllmWorkerConfig),
        ("Frontend", FrontendConfig),
        ("Router", RouterConfig),
        ("Planner", PlannerConfig),
    ],
)
def test_live_options_have_the_ranges_of_the_file(component: str, config: type):
    file = get_type_hints(config, include_extras=True)
    for key, kind in LIVE_OPTIONS[component].items():
        section, _, option = key.replace("-", "_").rpartition(".")
        stands_in = get_type_hints(file[section], include_extras=True) if section else file
        assert kind == stands_in[option], key


@pytest.mark.parametrize(
    ("words", "edits"),
    [
        (["VllmWorker.max-local-prefill-length=256"], {"max-local-prefill-length": 256}),
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
        ("VllmWorker.max-local-prefill-length=-1", "Expected `int` >= 0; got -1"),
        ("VllmWorker.max-local-prefill-length=1.5", "got 1.5"),
        ("VllmWorker.max-local-prefill-length='5'", "got '5'"),
        ("VllmWorker.max-local-prefill-length=10000000001", "got 10000000001"),
        ("VllmWorker.max-remote-prefills=0", "Expected `int` >= 1; got 0"),
        ("VllmWorker.max-queue-wait-s=0", "Expected `float` > 0.0; got 0"),
        ("VllmWorker.remote-prefill-timeout-s=.inf", "got inf"),
        ("VllmWorker.remote-prefill-timeout-s=.nan", "got nan"),
        ("VllmWorker.single-flight-min-length=x", "Expected `int | null`, got `str`; got 'x'"),
        (
            "VllmWorker.max-local-prefil-length=1",
            "did you mean VllmWorker.max-local-prefill-length",
        ),
        ("Router.kv-router.kv-weight=-1", "Expected `float` >= 0.0; got -1"),
        ("Planner.decode-up-share=1.5", "Expected `float` <= 1.0; got 1.5"),
        ("Router.kv-weight=1", "did you mean Router.kv-router.kv-weight"),
        ("Frontend.port=1", "no live option"),
        ("max-local-prefill-length=1", "no live option"),
        ("VllmWorker.max-local-prefill-length=[1", "not valid YAML"),
        ("VllmWorker.max-local-prefill-length", "expected KEY=VALUE"),
    ],
)
def test_bad_edits_come_with_what_is_accepted(word: str, complaint: str):
    with pytest.raises(ConfigError) as caught:
        live_options.parse_edits([word])
    assert complaint in caught.value.mistakes[0]


def test_a_component_stands_for_all_of_its_keys():
    assert live_options.parse_unsets(["VllmWorker"]) == {
        WORKER: dict.fromkeys(LIVE_OPTIONS[WORKER], UNSET)
    }
    with pytest.raises(ConfigError):
        live_options.parse_unsets(["PrefillWorker"])


async def test_what_is_set_is_shown_beside_the_files_of_the_processes(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of components that run, and what is set for another one."""
    store = MemoryStore()
    reports: dict[str, Any] = {
        "a": {"options": {"file": dict.fromkeys(LIVE_OPTIONS[WORKER], 512)}},
        "b": {"options": {"file": dict.fromkeys(LIVE_OPTIONS[WORKER], 600)}},
        "silent": {},
    }

    async def fetch_health(url: str, certificates: Any) -> dict[str, Any]:
        return reports[url]

    monkeypatch.setattr(drains, "fetch_health", fetch_health)
    place, limit = Place(etcd_url="", namespace="t"), f"{WORKER}.max-queue-wait-s"

    async def rows(only: str = "") -> list[Any]:
        return await live_options.rows(store, place, only)

    await live_options.write(store, "t", WORKER, {"max-local-prefill-length": 7})
    [alone] = await rows()
    assert alone == {"key": f"{WORKER}.max-local-prefill-length", "set": 7, "file": []}
    for number, url in enumerate(("silent", "a", "b"), 1):
        member = endpoint_record(number, status_url=url)
        key = names.endpoint_key("t", WORKER, "generate", number)
        await store.put(key, encode_json(member))
        if url == "silent":
            assert await rows(limit) == [{"key": limit, "file": []}]
    first, second, *others = await rows()
    assert first == alone | {"file": [512, 600]}
    assert second == {"key": f"{WORKER}.max-prefill-queue-size", "file": [512, 600]}
    assert len(others) == len(LIVE_OPTIONS[WORKER]) - 2
    assert await rows(limit) == [{"key": limit, "file": [512, 600]}]
    assert await rows("Frontend.max-queued-tokens") == [
        {"key": "Frontend.max-queued-tokens", "file": []}
    ]

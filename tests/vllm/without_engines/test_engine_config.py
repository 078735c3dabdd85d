"""vLLM's configuration of an engine, as its component makes it."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.engine.engine_config import vllm_config
from dynamo_lite.vllm.engine.multi_connector import MultiConnector
from tests.builders import DECODE_ROLE, PREFILL_ROLE, engine_config

LINK = engine_config(PREFILL_ROLE)


def made(model: Path, link: EngineConfig | None, *flags: str, kv_events: bool = False) -> Any:
    flags = (f"--model={model}", "--kv-cache-memory-bytes=1048576", *flags)
    return vllm_config(list(flags), link, model / "link.json", kv_events=kv_events)


def test_defaults_are_those_of_vllm_s_server(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a GPU they differ by what the engine is for."""
    tokens = {UsageContext.LLM_CLASS: 16384, UsageContext.OPENAI_API_SERVER: 8192}
    seqs = {UsageContext.LLM_CLASS: 512, UsageContext.OPENAI_API_SERVER: 1024}
    monkeypatch.setattr(AsyncEngineArgs, "get_batch_defaults", lambda *_: (tokens, seqs))
    scheduler = made(model, None).scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (8192, 1024)
    scheduler = made(model, None, "--max-num-seqs=500").scheduler_config
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (8192, 500)


def test_an_engine_with_a_link_gets_the_connector(model: Path):
    transfer = made(model, LINK).kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("DynamoLiteConnector", "kv_both")
    assert made(model, None).kv_transfer_config is None


@pytest.mark.parametrize(
    ("flag", "published"),
    [
        ("--enable-prefix-caching", True),
        ("--no-enable-prefix-caching", False),
        ("--data-parallel-size=2", False),
    ],
)
def test_the_events_of_one_prefix_cache_are_published(model: Path, flag: str, published: bool):
    config = made(model, None, flag, kv_events=True)
    assert (config.kv_events_config is not None) is published


def test_offloading_is_beside_the_connector(model: Path):
    transfer = made(model, LINK, "--kv-offloading-size=1").kv_transfer_config
    ours, other = transfer.kv_connector_extra_config["connectors"]
    assert KVConnectorFactory.get_connector_class(transfer) is MultiConnector
    assert (transfer.kv_role, transfer.kv_load_failure_policy) == ("kv_both", "recompute")
    assert ours["kv_connector"] == "DynamoLiteConnector"
    assert other["kv_connector"] == "OffloadingConnector"
    assert other["kv_connector_extra_config"] == {"cpu_bytes_to_use": 1 << 30}


def test_a_connector_of_the_user_is_beside_ours(model: Path):
    given = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "engine_id": "x"}
    config = made(model, LINK, f"--kv-transfer-config={json.dumps(given)}")
    transfer = config.kv_transfer_config
    _, other = transfer.kv_connector_extra_config["connectors"]
    assert "engine_id" not in other and transfer.engine_id == LINK.engine_id
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is False
    alone = made(model, None, f"--kv-transfer-config={json.dumps(given)}")
    assert alone.kv_transfer_config.kv_connector == "SimpleCPUOffloadConnector"


@pytest.mark.parametrize(
    ("link", "overlapping", "name"),
    [
        (engine_config(DECODE_ROLE), False, "arrivals.ArrivalScheduler"),
        (engine_config(DECODE_ROLE), True, "arrivals.AsyncArrivalScheduler"),
        (LINK, False, "short_first.ShortFirst"),
        (LINK, True, "short_first.AsyncShortFirst"),
        (None, False, None),
    ],
)
def test_an_engine_with_a_link_gets_a_scheduler_unless_it_has_one(
    model: Path, monkeypatch: pytest.MonkeyPatch, link: Any, overlapping: bool, name: str | None
):
    create = AsyncEngineArgs.create_engine_config

    def overlap(args: AsyncEngineArgs, context: UsageContext) -> Any:
        config = create(args, context)
        config.scheduler_config.async_scheduling = overlapping
        return config

    monkeypatch.setattr(AsyncEngineArgs, "create_engine_config", overlap)
    expected = None if name is None else f"dynamo_lite.vllm.engine.{name}"
    assert made(model, link).scheduler_config.scheduler_cls == expected
    own = made(model, link, "--scheduler-cls=mine.Own").scheduler_config.scheduler_cls
    assert own == "mine.Own"


@pytest.mark.parametrize(
    ("name", "role", "flags", "says"),
    [
        ("OffloadingConnector", "kv_producer", (), "with kv_role: kv_producer does not go"),
        ("OffloadingConnector", "kv_both", ("--kv-offloading-size=1",), "set one of them"),
        ("MultiConnector", "kv_both", (), "must be one of OffloadingConnector, "),
        ("", "", ("--kv-offloading-size=1", "--kv-offloading-backend=lmcache"), "lmcache does not"),
    ],
)
def test_connectors_that_do_not_go_beside_ours_are_refused(
    model: Path, name: str, role: str, flags: tuple[str, ...], says: str
):
    given = json.dumps({"kv_connector": name, "kv_role": role})
    with pytest.raises(StartupError, match=says):
        made(model, LINK, *([f"--kv-transfer-config={given}"] if name else []), *flags)


def test_vllm_keeps_its_kv_groups_beside_the_connector(model: Path):
    assert made(model, LINK).scheduler_config.disable_hybrid_kv_cache_manager is False


def test_offloading_is_vllm_s_business_without_remote_prefill(model: Path):
    transfer = made(model, None, "--kv-offloading-size=1").kv_transfer_config
    assert transfer.kv_connector == "OffloadingConnector"

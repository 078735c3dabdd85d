"""vLLM's configuration of an engine, as its component makes it."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.protocol.errors import StartupError
from dynamo_lite.vllm.engine.engine_config import vllm_config
from tests.builders import PREFILL_ROLE, engine_config

LINK = engine_config(PREFILL_ROLE)


def made(model: Path, link: EngineConfig | None, *flags: str) -> Any:
    flags = (f"--model={model}", "--kv-cache-memory-bytes=1048576", *flags)
    return vllm_config(list(flags), link, model / "link.json")


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


def test_what_displaces_the_connector_is_refused_before_vllm_stumbles_over_it(model: Path):
    with pytest.raises(StartupError, match="does not go with remote prefill"):
        made(model, LINK, "--kv-offloading-size=1")


def test_vllm_keeps_its_kv_groups_beside_the_connector(model: Path):
    assert made(model, LINK).scheduler_config.disable_hybrid_kv_cache_manager is False


def test_offloading_is_vllm_s_business_without_remote_prefill(model: Path):
    transfer = made(model, None, "--kv-offloading-size=1").kv_transfer_config
    assert transfer.kv_connector == "OffloadingConnector"

"""What the shell decides by itself."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool

from dynamo_lite.disagg.messages import WorkerReport
from dynamo_lite.vllm.engine import kv_memory
from dynamo_lite.vllm.engine.connector import DynamoLiteConnector, _is_transferable
from dynamo_lite.vllm.engine.connector_types import ReportMetadata
from dynamo_lite.vllm.engine.free_blocks import FreeRuns

PLAIN = {
    "skip_reading_prefix_cache": False,
    "mm_features": [],
    "prompt_embeds": None,
}


@pytest.mark.parametrize(
    "field",
    [
        {},
        {"skip_reading_prefix_cache": True},
        {"mm_features": ["image"]},
        {"prompt_embeds": "embeds"},
    ],
)
def test_a_prompt_that_tokens_determine_can_be_prefilled_anywhere(field):
    assert _is_transferable(SimpleNamespace(**{**PLAIN, **field})) is (not field)


def test_the_engines_pool_hands_out_runs():
    """vLLM's own queue would hand out what was freed in any order."""
    connector = DynamoLiteConnector.__new__(DynamoLiteConnector)
    connector._role = KVConnectorRole.WORKER
    pool = BlockPool(8, True, 16)
    connector.bind_kv_cache_manager(cast("Any", SimpleNamespace(block_pool=pool)))
    assert type(pool.free_block_queue) is FreeRuns


def test_vllm_zeroes_no_block_that_a_writer_fills():
    connector = DynamoLiteConnector.__new__(DynamoLiteConnector)
    groups = SimpleNamespace(transfer_group_ids=(0,), prefix_cacheable_group_ids=())
    connector._kv_cache_config = cast("Any", groups)
    assert connector.get_loaded_kv_cache_group_ids(cast("Any", None)) == (0,)


def test_the_ranks_failures_are_joined():
    both = ReportMetadata(WorkerReport({"a": "x"})).aggregate(
        ReportMetadata(WorkerReport({"b": "y"}))
    )
    assert both.report.failures == {"a": "x", "b": "y"}


@pytest.mark.parametrize(
    ("cuda", "mla", "block_size", "wish"),
    [
        (False, False, 32, "LBHNC"),
        (True, False, 64, "BLHNC"),
        # vLLM must be able to split these for FlashInfer.
        (True, False, 128, "LBHNC"),
        (True, False, 48, "LBHNC"),
        (True, True, 64, None),
    ],
)
def test_the_layout_that_transfers_like_best(monkeypatch, cuda, mla, block_size, wish):
    monkeypatch.setattr(kv_memory, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla),
        cache_config=SimpleNamespace(block_size=block_size),
    )
    assert DynamoLiteConnector.get_required_kvcache_layout(cast("Any", config)) == wish

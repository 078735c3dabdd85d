"""Another KV connector of vLLM beside ours: one that offloads KV, or a store of it.

The other one is asked first, once at each look at a prompt, and what it has counts as cached in the
decision. A prompt loads from one of both, and waits for that. Both save.
"""

from typing import cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from dynamo_lite.vllm.engine.connector import DynamoLiteConnector

_OURS, _OTHER = 0, 1


class MultiConnector(multi_connector.MultiConnector):
    """It has the name of vLLM's, by which vLLM knows that the children's abilities count."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        self._ours = cast("DynamoLiteConnector", self._connectors[_OURS])
        self._other = self._connectors[_OTHER]

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Ours is a preference, the other one's a need."""
        preferred, needed = (
            child.get_required_kvcache_layout(config)
            for child, config in cls._get_connector_classes_and_configs(vllm_config)
        )
        return needed or preferred

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Ours. Nothing reads the other one's; it keeps them until they are taken."""
        self._other.get_kv_connector_stats()
        return self._ours.get_kv_connector_stats()

    def leader_of(self, request_id: str) -> str | None:
        return self._ours.leader_of(request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        offloaded, waits = self._other.get_num_new_matched_tokens(request, num_computed_tokens)
        if offloaded is None:
            return None, False
        # A load in the step itself would end without a word, and perhaps beside a write.
        if not waits or not self._ours.may_load_beside(request):
            offloaded = 0
        tokens, ours_waits = self._ours.matched_beside(request, num_computed_tokens, offloaded)
        self._requests_to_connector.pop(request.request_id, None)
        if tokens is None:
            return None, False
        if tokens:
            self._requests_to_connector[request.request_id] = _OURS
            return tokens, ours_waits
        if offloaded:
            self._requests_to_connector[request.request_id] = _OTHER
        return offloaded, offloaded > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        ours = self._requests_to_connector.get(request.request_id) != _OTHER
        if num_external_tokens and ours and isinstance(self._other, OffloadingConnector):
            # vLLM's offloading saves blocks also after their request has freed them, and ends that
            # before others get them. It does not see blocks that are allocated for another
            # connector.
            self._other.scheduler._current_batch_allocated_block_ids.update(
                # The cached ones are not written.
                block.block_id
                for group in blocks.blocks
                for block in group
                if block.block_hash is None and not block.is_null
            )

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> multi_connector.MultiKVConnectorMetadata:
        other = self._other.build_connector_meta(scheduler_output)
        # Ends in the step, before its prefix reads, but perhaps after a prefill worker's write.
        in_use = isinstance(other, OffloadingConnectorMetadata) and bool(other.jobs_to_flush)
        ours = self._ours.step_beside(scheduler_output, in_use=in_use)
        saves, self._extra_async_saves = self._extra_async_saves, {}
        return multi_connector.MultiKVConnectorMetadata(
            metadata=(ours, other), extra_async_saves=saves or None
        )

"""The out-of-tree KV connector that stock vLLM loads.

vLLM makes one in the scheduler's process and one in every worker process. The connector
opens the half for its process (decode or prefill, scheduler or rank; `opened_scheduler.py`
and `opened_rank.py` open them) and forwards vLLM's hooks to it.
"""

import atexit
import gc
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from dynamo_lite.disagg.decode.rank import DecodeRank
from dynamo_lite.disagg.decode.scheduler import DecodeScheduler
from dynamo_lite.disagg.engine_api import BlockTables
from dynamo_lite.disagg.engine_config import ENGINE_CONFIG_FILE, read_engine_config
from dynamo_lite.disagg.messages import DecodeStep, PrefillStep, RankResults
from dynamo_lite.disagg.prefill.rank import PrefillRank
from dynamo_lite.disagg.prefill.scheduler import PrefillScheduler
from dynamo_lite.runtime.process.death_signal import die_with_parent
from dynamo_lite.runtime.process.logs import hold_lease
from dynamo_lite.vllm.engine.arrivals import wait_for_arrival, waits_in_steps
from dynamo_lite.vllm.engine.connector_types import ConnectorStats, ReportMetadata, StepMetadata
from dynamo_lite.vllm.engine.free_blocks import hand_out_runs
from dynamo_lite.vllm.engine.kv_groups import groups_with_a_state, with_states
from dynamo_lite.vllm.engine.kv_memory import preferred_layout
from dynamo_lite.vllm.engine.opened_rank import OpenedRank, open_rank
from dynamo_lite.vllm.engine.opened_scheduler import engine_metadata, open_scheduler
from dynamo_lite.vllm.engine.steps import filling_blocks, step_ended
from dynamo_lite.vllm.engine.supported import check_kv, refusal_recorded

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_BRIDGE_START_S = 15.0


class DynamoLiteConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        # An engine process must not outlive the component that runs it.
        die_with_parent(signal.SIGKILL)
        # At exit Python's final garbage collection of vLLM and torch would take seconds.
        atexit.register(gc.freeze)
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._engine_config_file = Path(extra[ENGINE_CONFIG_FILE])
        with refusal_recorded(self._engine_config_file):
            # vLLM has added the number of a data-parallel rank to the id.
            self._engine_config = msgspec.structs.replace(
                read_engine_config(extra[ENGINE_CONFIG_FILE]),
                engine_id=vllm_config.kv_transfer_config.engine_id,
            )
            hold_lease(self._engine_config.lease_id)
            check_kv(kv_cache_config, vllm_config)
        #: Whether steps that compute nothing wait for KV.
        self._waits = waits_in_steps(vllm_config)
        self._block_size = vllm_config.cache_config.block_size
        #: The scheduler half; one of the next two is the same object. None in a worker process, and
        #: before vLLM's blocks are there.
        self._scheduler: DecodeScheduler | PrefillScheduler | None = None
        self._decode: DecodeScheduler | None = None
        self._prefill: PrefillScheduler | None = None
        self._manager: KVCacheManager | None = None
        self._state_groups: Sequence[int] = ()
        #: The worker half; None before the KV caches are there.
        self._opened: OpenedRank | None = None
        self._rank: DecodeRank | PrefillRank | None = None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """vLLM 0.33 asks. Sleep maps the memory again that NIXL has registered."""
        return False

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._opened = open_rank(
            self._engine_config,
            self._engine_config_file,
            kv_caches,
            self._vllm_config,
            self._kv_cache_config,
        )
        self._rank = self._opened.rank

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._opened is None else self._opened.handshake

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads start with the step's writes, in `wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end before a request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """All layers are written after the step."""

    def wait_for_save(self) -> None:
        if isinstance(self._rank, PrefillRank):
            step = self._step()
            assert isinstance(step, PrefillStep)
            self._rank.step(step, step_ended(on_gpu=self._rank.on_gpu))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        step = kv_connector_metadata.step
        if isinstance(self._rank, PrefillRank) and isinstance(step, PrefillStep):
            self._rank.drain_preempted(step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if isinstance(self._rank, DecodeRank):
            step = self._step()
            assert isinstance(step, DecodeStep)
            self._rank.step(step)
            if step.wait:
                wait_for_arrival(self._rank)
        results = RankResults() if self._rank is None else self._rank.results()
        return KVConnectorTransferResults(
            finished_sending=results.sent,
            finished_recving=results.received | results.lost,
            failed_recving=results.lost,
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = None if self._rank is None else self._rank.report()
        return None if report is None else ReportMetadata(report)

    def _step(self) -> DecodeStep | PrefillStep:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.step

    # Scheduler half

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All ranks are up: makes the engine's metadata, and connects to the servers."""
        assert self._scheduler is not None
        self._scheduler.metadata = engine_metadata(
            self._engine_config,
            self._block_size,
            self._kv_cache_config,
            [shake for _, shake in sorted(metadata.items())],
        )
        self._scheduler.bridge.start(_BRIDGE_START_S)

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        hand_out_runs(kv_cache_manager.block_pool)
        if self.role is not KVConnectorRole.SCHEDULER:
            return
        self._state_groups = groups_with_a_state(self._kv_cache_config)
        self._scheduler = made = open_scheduler(
            self._engine_config,
            self._vllm_config,
            self._kv_cache_config,
            kv_cache_manager,
            self._tables,
        )
        self._decode = made if isinstance(made, DecodeScheduler) else None
        self._prefill = made if isinstance(made, PrefillScheduler) else None

    def _tables(self, request_id: str, tokens: int) -> BlockTables:
        """The table of each KV group for the request's first `tokens` tokens."""
        assert self._manager is not None
        tables = self._manager.get_block_ids(request_id)
        if not self._state_groups:
            return tables
        return with_states(tables, self._state_groups, -(-tokens // self._block_size))

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.matched_beside(request, num_computed_tokens, 0)

    def matched_beside(
        self, request: "Request", computed: int, offloaded: int
    ) -> tuple[int | None, bool]:
        """`get_num_new_matched_tokens`, where another connector can load `offloaded` tokens beyond
        the computed ones. It does if this one returns none."""
        if self._prefill is not None:
            return self._prefill.num_new_matched_tokens(request, computed, offloaded)
        assert self._decode is not None
        return self._decode.num_new_matched_tokens(
            request, computed, transferable=_is_transferable(request), offloaded=offloaded
        )

    def may_load_beside(self, request: "Request") -> bool:
        """Whether another connector may load KV of the request now."""
        return self._prefill is None or self._prefill.may_load(request)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """All groups, cached or not: vLLM must not zero blocks that a writer fills."""
        return self._kv_cache_config.transfer_group_ids

    def leader_of(self, request_id: str) -> str | None:
        return None if self._decode is None else self._decode.prefills.leader_of(request_id)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._decode is not None:
            wanted = request.num_prompt_tokens - 1
            tables = self._tables(request.request_id, wanted) if num_external_tokens else ()
            self._decode.state_after_alloc(request, tables, num_external_tokens)
            # vLLM counts tokens as cached that a prefill worker has computed for this request.
            cached = self._decode.cached_tokens(request.request_id)
            if cached is not None and request.prefill_stats is not None:
                request.prefill_stats.num_cached_tokens = cached
        if self._prefill is not None:
            # The first event is the arrival. Without vLLM's statistics there are no events.
            queued_at = request.events[0].timestamp if request.events else None
            self._prefill.state_after_alloc(
                request, blocks.get_block_ids()[0], num_external_tokens, queued_at
            )

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self.step_beside(scheduler_output, in_use=False)

    def step_beside(self, scheduler_output: "SchedulerOutput", *, in_use: bool) -> StepMetadata:
        """`build_connector_meta` beside another connector. in_use: see
        `DecodeScheduler.build_step`."""
        if self._decode is not None:
            assert self._manager is not None
            speculation = self._vllm_config.speculative_config
            drafts = 0 if speculation is None else speculation.num_speculative_tokens
            filling = filling_blocks(scheduler_output, self._manager, self._block_size, drafts)
            step = self._decode.build_step(filling, in_use=in_use)
            idle = not scheduler_output.num_scheduled_tokens
            step.wait = self._waits and idle and self._decode.prefills.jobs > 0
            return StepMetadata(step)
        assert self._prefill is not None
        return StepMetadata(
            self._prefill.build_step(
                scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids or ()
            )
        )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        lost: set[str] = set(connector_output.failed_recving or ())
        received: set[str] = set(connector_output.finished_recving or ())
        sent: set[str] = set(connector_output.finished_sending or ())
        results = RankResults(sent=sent, received=received - lost, lost=lost)
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if isinstance(metadata, ReportMetadata) else None
        assert self._scheduler is not None
        self._scheduler.worker_output(results, report)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._decode is not None:
            self._decode.request_finished(request.request_id)
            return False, None
        assert self._prefill is not None
        return self._prefill.request_finished(request), None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy

    # Both halves

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        return preferred_layout(vllm_config)

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        half = self._scheduler if self._rank is None else self._rank
        counted = None if half is None else half.stats.take()
        return ConnectorStats(data=counted) if counted else None

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.bridge.close()
        if self._opened is not None:
            self._opened.close()


def _is_transferable(request: "Request") -> bool:
    """Whether a request's KV is a function of its tokens, cache salt and LoRA adapter alone."""
    return (
        not request.skip_reading_prefix_cache
        and not request.mm_features
        and request.prompt_embeds is None
    )

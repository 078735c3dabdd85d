"""The real parts of a worker: stock vLLM, JetStream, claim cells in a mapped file."""

import asyncio
import os
import uuid
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_lite.disagg.engine import DecodeEngine, PrefillEngine
from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
)
from dynamo_lite.disagg.queue.base import PrefillQueue, QueueConfig, QueueOptions
from dynamo_lite.disagg.queue.jetstream import JetStreamQueue
from dynamo_lite.protocol.options import DisaggOptions, subset
from dynamo_lite.runtime.claim_cells import ClaimCells
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.imports import import_large
from dynamo_lite.serve.services.config import PrefillWorkerConfig, VllmWorkerConfig

if TYPE_CHECKING:
    from dynamo_lite.vllm.engine.process import EngineContext


class VllmBackend:
    """What a worker runs on: engine, queue and claim cells. A simulation passes its own."""

    async def prepare(self) -> None:
        """Everything that takes long and needs no other process."""
        await asyncio.to_thread(import_large, "dynamo_lite.vllm.engine.core")

    def open_cells(self, host: Host, config: PrefillWorkerConfig) -> ClaimCells:
        return ClaimCells(config.most_jobs, _engine_file(host.spec, "claims"))

    def open_queue(
        self, host: Host, options: QueueOptions
    ) -> AbstractAsyncContextManager[PrefillQueue]:
        spec, config = host.spec, QueueConfig.of(options)
        return JetStreamQueue(spec.nats_url, spec.namespace, config, on_drop=host.drops)

    def open_decode_engine(
        self, host: Host, config: VllmWorkerConfig
    ) -> AbstractAsyncContextManager[DecodeEngine]:
        from dynamo_lite.vllm.engine.decode_engine import VllmDecodeEngine

        remote = config.remote_prefill
        role = decode_role(config, host.spec.component) if remote else None
        return VllmDecodeEngine(
            _context(host, role),
            publishes_kv=config.kv_events,
            takes_first_tokens=remote and config.first_token_from_prefill,
        )

    def open_prefill_engine(
        self, host: Host, config: PrefillWorkerConfig, cells: ClaimCells
    ) -> AbstractAsyncContextManager[PrefillEngine]:
        from dynamo_lite.vllm.engine.prefill_engine import VllmPrefillEngine

        assert cells.path is not None
        role = prefill_role(config, cells_path=str(cells.path))
        return VllmPrefillEngine(_context(host, role))


def _context(host: Host, role: DecodeEngineConfig | PrefillEngineConfig | None) -> "EngineContext":
    """role: None for an engine without remote prefills."""
    from dynamo_lite.vllm.engine.process import EngineContext

    spec, config = host.spec, None
    if role is not None:
        config = EngineConfig(
            namespace=spec.namespace,
            engine_id=str(uuid.uuid4()),
            lease_id=host.lease.id,
            lease_ttl_s=spec.lease_ttl_s,
            nats_url=spec.nats_url,
            etcd_url=spec.etcd_url,
            role=role,
        )
    return EngineContext(
        spec.engine_args,
        engine_config=config,
        engine_config_path=_engine_file(spec, "engine.json"),
        messaging=host.messaging,
        registry=host.registry,
        on_drop=host.drops,
        tracer=host.tracer,
    )


def decode_role(config: VllmWorkerConfig, component: str) -> DecodeEngineConfig:
    return DecodeEngineConfig(
        options=subset(DisaggOptions, config),
        prefill_component="PrefillWorker",
        queue=QueueConfig.of(config.queue),
        component=component,
    )


def prefill_role(config: PrefillWorkerConfig, *, cells_path: str) -> PrefillEngineConfig:
    return PrefillEngineConfig(
        cells_path=cells_path,
        min_prefix_read_length=config.min_prefix_read_length,
        queue=QueueConfig.of(config.queue),
    )


def _engine_file(spec: ProcessSpec, suffix: str) -> Path:
    """`<state-dir>/run/<Service>-<i>-<pid>.<suffix>`, for the engine's processes to read.

    With the process id, because after the death of a supervisor the last process of this instance
    may drain beside this one. The folder exists afterwards, without files of this instance's
    processes that have ended.
    """
    folder, instance = Path(spec.state_dir) / "run", f"{spec.component}-{spec.instance}"
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{instance}-[0-9]*"):
        pid = left.name.removeprefix(f"{instance}-").partition(".")[0]
        if not Path("/proc", pid).exists():
            left.unlink(missing_ok=True)
    return folder / f"{instance}-{os.getpid()}.{suffix}"

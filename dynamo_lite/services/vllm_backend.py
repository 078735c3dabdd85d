"""The real parts of a worker: stock vLLM, JetStream, a mapped fence."""

import asyncio
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_lite.disagg.engine_config import (
    DecodeEngineConfig,
    EngineConfig,
    PrefillEngineConfig,
    PrefillOptions,
)
from dynamo_lite.protocol import names
from dynamo_lite.protocol.options import DisaggOptions, subset
from dynamo_lite.queue.base import QueueConfig, QueueOptions
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.fence import Fence, FenceHolder
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.services.config import PrefillWorkerConfig, TransferThread, VllmWorkerConfig

if TYPE_CHECKING:
    from dynamo_lite.vllm.engine.core import VllmEngine

#: The component whose members write KV for decode workers.
PREFILL_COMPONENT = "PrefillWorker"


class VllmBackend:
    """Implements WorkerBackend."""

    def __init__(self, spec: ProcessSpec):
        self._spec = spec

    async def prepare(self) -> None:
        # vLLM takes seconds to import, which must not starve the lease.
        await asyncio.to_thread(__import__, "dynamo_lite.vllm.engine.core")

    def open_fence(self, host: Host, config: PrefillWorkerConfig) -> FenceHolder:
        return FenceHolder(_engine_file(self._spec, "fence"), permits=config.most_jobs)

    def open_queue(self, host: Host, options: QueueOptions) -> JetStreamQueue:
        return JetStreamQueue(
            self._spec.nats_url,
            stream=names.prefill_stream(self._spec.namespace),
            subject=names.prefill_jobs_subject(self._spec.namespace),
            config=QueueConfig.of(options),
            on_drop=host.drops,
        )

    def open_decode_engine(self, host: Host, config: VllmWorkerConfig) -> "VllmEngine":
        if not config.remote_prefill:
            return self._engine(host, None, tells_kv=config.kv_events)
        role = decode_role(config, self._spec.component)
        engine_config = self._engine_config(host, role, config.transfer_thread)
        return self._engine(
            host,
            engine_config,
            tells_kv=config.kv_events,
            first_tokens=config.first_token_from_prefill,
        )

    def open_prefill_engine(
        self, host: Host, config: PrefillWorkerConfig, fence: Fence
    ) -> "VllmEngine":
        assert isinstance(fence, FenceHolder)
        role = prefill_role(config, fence_path=str(fence.path))
        return self._engine(host, self._engine_config(host, role, config.transfer_thread))

    def _engine_config(
        self, host: Host, role: DecodeEngineConfig | PrefillEngineConfig, thread: TransferThread
    ) -> EngineConfig:
        """The configuration of a new engine incarnation, with a fresh id."""
        return EngineConfig(
            namespace=self._spec.namespace,
            engine_id=str(uuid.uuid4()),
            lease_id=host.lease.id,
            lease_ttl_s=self._spec.lease_ttl_s,
            nats_url=self._spec.nats_url,
            etcd_url=self._spec.etcd_url,
            role=role,
            transfer_thread=None if thread == "auto" else thread == "always",
        )

    def _engine(
        self,
        host: Host,
        engine_config: EngineConfig | None,
        *,
        tells_kv: bool = False,
        first_tokens: bool = False,
    ) -> "VllmEngine":
        from dynamo_lite.vllm.engine.core import VllmEngine

        return VllmEngine(
            self._spec.engine_args,
            engine_config=engine_config,
            engine_config_path=_engine_file(self._spec, "engine.json"),
            messaging=host.messaging,
            registry=host.registry,
            on_drop=host.drops,
            tells_kv=tells_kv,
            first_tokens=first_tokens,
            tracer=host.tracer,
        )


def decode_role(config: VllmWorkerConfig, component: str) -> DecodeEngineConfig:
    return DecodeEngineConfig(
        options=subset(DisaggOptions, config),
        prefill_component=PREFILL_COMPONENT,
        queue=QueueConfig.of(config.queue),
        component=component,
    )


def prefill_role(config: PrefillWorkerConfig, *, fence_path: str) -> PrefillEngineConfig:
    return PrefillEngineConfig(
        fence_path=fence_path,
        options=subset(PrefillOptions, config),
        queue=QueueConfig.of(config.queue),
    )


def _engine_file(spec: ProcessSpec, suffix: str) -> Path:
    """`<state-dir>/run/<Service>-<i>.<suffix>`, for the engine's processes to read.

    The folder exists afterwards.
    """
    folder = Path(spec.state_dir) / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{spec.component}-{spec.instance}.{suffix}"

"""The real parts of a worker: stock vLLM, JetStream, a mapped fence."""

import asyncio
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_lite.protocol import names
from dynamo_lite.queue.base import QueueConfig
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.fence import Fence, FenceHolder
from dynamo_lite.runtime.process.host import Host, ProcessSpec
from dynamo_lite.services.config import (
    PrefillWorkerConfig,
    QueueOptions,
    TransferThread,
    VllmWorkerConfig,
)

if TYPE_CHECKING:
    from dynamo_lite.disagg.engine_config import (
        DecodeEngineConfig,
        EngineConfig,
        PrefillEngineConfig,
    )
    from dynamo_lite.vllm.engine.core import VllmEngine

#: Whose members write KV for decode workers.
PREFILL_COMPONENT = "PrefillWorker"


class VllmBackend:
    """Implements WorkerBackend."""

    def __init__(self, spec: ProcessSpec):
        self._spec = spec

    async def prepare(self) -> None:
        # vLLM takes seconds to import, which must not starve the lease.
        await asyncio.to_thread(__import__, "dynamo_lite.vllm.engine.core")

    def open_fence(self, host: Host) -> FenceHolder:
        return FenceHolder(_engine_file(self._spec, "fence"))

    def open_queue(self, host: Host, options: QueueOptions) -> JetStreamQueue:
        return JetStreamQueue(
            self._spec.nats_url,
            stream=names.prefill_stream(self._spec.namespace),
            subject=names.prefill_jobs_subject(self._spec.namespace),
            config=queue_config(options),
            on_drop=host.drops,
        )

    def open_decode_engine(self, host: Host, config: VllmWorkerConfig) -> "VllmEngine":
        from dynamo_lite.disagg.engine_config import DecodeEngineConfig

        if not config.remote_prefill:
            return self._engine(host, None, tells_kv=config.kv_events)
        role = DecodeEngineConfig(
            max_local_prefill_length_tokens=config.max_local_prefill_length,
            max_prefill_queue_size=config.max_prefill_queue_size,
            max_prefill_queue_tokens=config.max_prefill_queue_tokens,
            remote_prefill_timeout_s=config.remote_prefill_timeout_s,
            queue_view_max_age_s=config.queue_view_max_age_s,
            prefill_component=PREFILL_COMPONENT,
            queue=queue_config(config.queue),
            single_flight_min_length_tokens=config.single_flight_min_length,
            max_remote_prefills=config.max_remote_prefills,
            component=self._spec.component,
        )
        link = self._link(host, role, config.transfer_thread)
        return self._engine(host, link, tells_kv=config.kv_events)

    def open_prefill_engine(
        self, host: Host, config: PrefillWorkerConfig, fence: Fence
    ) -> "VllmEngine":
        from dynamo_lite.disagg.engine_config import PrefillEngineConfig

        assert isinstance(fence, FenceHolder)
        role = PrefillEngineConfig(
            fence_path=str(fence.path),
            kv_checksum_rate=config.kv_checksum_rate,
            min_prefix_read_length_tokens=config.min_prefix_read_length,
            stream_layers=config.stream_layers,
            short_length_tokens=(
                config.queue.short_length if config.queue.order == "short-first" else None
            ),
        )
        return self._engine(host, self._link(host, role, config.transfer_thread))

    def _link(
        self, host: Host, role: "DecodeEngineConfig | PrefillEngineConfig", thread: TransferThread
    ) -> "EngineConfig":
        """The link of a new engine incarnation: its id is fresh."""
        from dynamo_lite.disagg.engine_config import EngineConfig

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
        self, host: Host, link: "EngineConfig | None", *, tells_kv: bool = False
    ) -> "VllmEngine":
        from dynamo_lite.vllm.engine.core import VllmEngine

        return VllmEngine(
            self._spec.engine_args,
            link=link,
            link_path=_engine_file(self._spec, "engine.json"),
            messaging=host.messaging,
            registry=host.registry,
            on_drop=host.drops,
            tells_kv=tells_kv,
            tracer=host.tracer,
        )


def queue_config(options: QueueOptions) -> QueueConfig:
    return QueueConfig(
        max_depth=options.max_jobs,
        ack_wait_s=options.ack_wait_s,
        max_deliver=options.max_deliver,
        order=options.order,
        short_length_tokens=options.short_length,
    )


def _engine_file(spec: ProcessSpec, suffix: str) -> Path:
    """`<state-dir>/run/<Service>-<i>.<suffix>`, for the engine's processes to read.

    The folder exists afterwards.
    """
    folder = Path(spec.state_dir) / "run"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{spec.component}-{spec.instance}.{suffix}"

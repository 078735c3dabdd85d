"""The prefill worker: pulls jobs, computes them, writes the KV where it is wanted."""

import asyncio
import contextlib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Gauge

from dynamo_lite.components.config import PrefillWorkerConfig
from dynamo_lite.components.engine_setup import engine_file, engine_link, queue_config
from dynamo_lite.components.prefill_fence import FenceKeeper
from dynamo_lite.components.prefill_jobs import PrefillJobs
from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.queue.base import PrefillQueue
from dynamo_lite.queue.jetstream import JetStreamQueue
from dynamo_lite.runtime.fence import FenceHolder
from dynamo_lite.runtime.host import Host, ProcessSpec
from dynamo_lite.runtime.roster import Roster
from dynamo_lite.transfer.directory import MetadataDirectory

if TYPE_CHECKING:
    from dynamo_lite.engine.vllm.core import VllmEngine

_DEPTH_PERIOD_S = 2.0
#: Whose blocks are written.
_DECODE_COMPONENT = "VllmWorker"


class PrefillWorker:
    """Component. config: the fields of `PrefillWorkerConfig`."""

    def __init__(self, config: Mapping[str, Any] | PrefillWorkerConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, PrefillWorkerConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._jobs: PrefillJobs | None = None
        self._fence: FenceKeeper | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        # vLLM takes seconds to import, which must not starve the lease.
        await asyncio.to_thread(__import__, "dynamo_lite.engine.vllm.core")
        fence = FenceHolder(engine_file(self._spec, "fence"))
        self._stack.callback(fence.close)
        self._fence = keeper = FenceKeeper(host, fence)
        host.spawn(keeper.keep(), "lease-fence")
        host.progress("loading the model")
        enter = self._stack.enter_async_context
        engine = await enter(self._open_engine(host, fence))
        host.spawn(engine.run_prefills(), "engine-steps")
        queue = await enter(
            JetStreamQueue(
                self._spec.nats_url,
                stream=names.prefill_stream(self._spec.namespace),
                subject=names.prefill_jobs_subject(self._spec.namespace),
                config=queue_config(self._config.queue),
            )
        )
        self._jobs = keeper.jobs = jobs = PrefillJobs(
            namespace=self._spec.namespace,
            lease_id=host.lease.id,
            ack_wait_s=self._config.queue.ack_wait_s,
            queue=queue,
            engine=engine,
            directory=await self._open_directory(host, engine),
            messaging=host.messaging,
            registry=host.registry,
        )
        cancel = names.cancel_subject(self._spec.namespace, host.lease.id)
        await enter(host.messaging.serve(cancel, jobs.on_cancel))
        model = engine.config.model_config.model
        await host.register("prefill", model=model)
        for index in range(self._config.concurrency):
            host.spawn(jobs.run(), f"prefill-jobs-{index}")
        host.spawn(_watch_depth(host, queue), "queue-depth")
        return {"model": model}

    async def drain(self, grace_s: float) -> None:
        """Stops pulling; what was pulled is finished, its writes too."""
        if self._fence is None or self._jobs is None:
            return
        self._fence.leaving.set()
        await self._jobs.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._jobs.idle.wait(), grace_s)

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> dict[str, Any]:
        if self._jobs is None:
            return {"ok": False}
        return {"ok": True, "jobs": len(self._jobs.working)}

    def _open_engine(self, host: Host, fence: FenceHolder) -> "VllmEngine":
        from dynamo_lite.engine.remote_prefill.link import PrefillLink
        from dynamo_lite.engine.vllm.core import VllmEngine

        return VllmEngine(
            self._spec.engine_args,
            link=engine_link(self._spec, host.lease.id, PrefillLink(fence_path=str(fence.path))),
            link_path=engine_file(self._spec, "engine.json"),
            messaging=host.messaging,
            registry=host.registry,
        )

    async def _open_directory(self, host: Host, engine: "VllmEngine") -> MetadataDirectory:
        directory = MetadataDirectory(host.store, self._spec.namespace)
        prefix = names.endpoint_prefix(self._spec.namespace, _DECODE_COMPONENT, "generate")
        decoders = await self._stack.enter_async_context(Roster(host.store, prefix))
        decoders.on_change(partial(_forget_left, directory, engine))
        return directory


def _forget_left(
    directory: MetadataDirectory,
    engine: "VllmEngine",
    _joined: frozenset[int],
    left: frozenset[int],
) -> None:
    engine.forget(directory.forget_leases(left))


async def _watch_depth(host: Host, queue: PrefillQueue) -> None:
    gauge = Gauge(
        "dynamo_lite_prefill_queue_depth",
        "Jobs on the prefill queue, waiting and in flight",
        registry=host.registry,
    )
    while True:
        try:
            gauge.set((await queue.depth()).total)
        except DynamoLiteError:
            gauge.set(float("nan"))
        await asyncio.sleep(_DEPTH_PERIOD_S)

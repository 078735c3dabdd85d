"""The prefill worker: pulls jobs, computes them, and writes the KV into decode engines' blocks."""

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_lite.disagg.decision.lanes import BEFORE_LONG
from dynamo_lite.disagg.prefill.attempt import WriterParts
from dynamo_lite.disagg.prefill.jobs import PrefillJobs
from dynamo_lite.disagg.prefill.peer_links import PeerLinks
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.runtime.tasks import all_of
from dynamo_lite.serve.services.config import PrefillWorkerConfig
from dynamo_lite.serve.services.engine_probe import EngineProbe
from dynamo_lite.serve.services.metrics import BLOCK_GAUGES
from dynamo_lite.serve.services.vllm_backend import VllmBackend


class PrefillWorker:
    def __init__(
        self, config: Mapping[str, Any] | PrefillWorkerConfig, parts: VllmBackend | None = None
    ):
        self._config = msgspec.convert(config, PrefillWorkerConfig)
        self._parts = parts or VllmBackend()

    async def start(self, host: Host) -> dict[str, Any]:
        await self._parts.prepare()
        cells = self._parts.open_cells(host, self._config)
        host.stack.callback(cells.close)
        host.progress("loading the model")
        enter = host.stack.enter_async_context
        engine = await enter(self._parts.open_prefill_engine(host, self._config, cells))
        self._links = links = PeerLinks(host, engine)
        host.spawn(engine.run_prefills(links.broke), "engine-steps")
        self._probe = probe = EngineProbe(
            host,
            engine,
            busy=lambda: engine.busy,
            step_timeout_s=self._config.step_timeout_s,
            gauges=BLOCK_GAUGES,
        )
        queue = await enter(self._parts.open_queue(host, self._config.queue))
        parts = WriterParts(
            namespace=host.spec.namespace,
            lease_id=host.lease.id,
            engine=engine,
            cells=cells,
            messaging=host.messaging,
            links=links,
            clock=host.clock,
            on_drop=host.drops,
            tracer=host.tracer,
        )
        self._jobs = jobs = PrefillJobs(
            parts,
            queue,
            host.registry,
            fit=lambda: probe.verdict()[0] and not links.hopeless,
        )
        # An interrupted start does not drain. A closed queue answers each pull at once, so a loop
        # that still pulls would not let the event loop run.
        host.stack.push_async_callback(jobs.stop)
        host.spawn(links.run(), "links")
        await host.register("prefill", model=engine.model)
        self._heartbeat = probe.start(probe.run())
        for index in range(self._config.concurrency):
            host.spawn(jobs.run(), f"prefill-jobs-{index}")
        for index in range(self._config.short_slots):
            host.spawn(jobs.run(BEFORE_LONG), f"short-prefill-jobs-{index}")
        return {"model": engine.model}

    async def drain(self, grace_s: float) -> None:
        """Stops pulling, and finishes the pulled jobs with their writes."""
        self._heartbeat.cancel()
        await self._jobs.stop()
        await all_of([self._jobs.idle], timeout_s=grace_s)

    def health(self) -> Mapping[str, Any]:
        jobs, unfit = len(self._jobs.working), self._links.misfit
        return {**self._probe.facts(), "jobs": jobs, "unfit": unfit}

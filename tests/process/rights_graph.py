"""Graphs of all shipped components around engines that compute nothing."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Self

from dynamo_lite.engine.base import AttemptOutcome, EngineLoad, LinkReport, OnFirstToken
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.prefill import EngineStatus, RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.fence import Fence, FenceHolder, FenceReader
from dynamo_lite.runtime.permits import Permit, Verdict
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.services.config import PrefillWorkerConfig
from dynamo_lite.services.prefill_worker import PrefillWorker
from dynamo_lite.services.services import FRONTEND, PLANNER, PROCESSOR, ROUTER, Graph, Service
from dynamo_lite.services.vllm_backend import VllmBackend
from tests.process import null_graph

_LOOK_S = 0.002


class NullPrefillEngine:
    """PrefillEngine that writes nothing. As a real one it waits for each job's permit, in the
    component's file."""

    model = "null"
    load = EngineLoad(gave_tokens=True)
    metadata = None

    def __init__(self, fence: FenceHolder):
        self._permits = FenceReader(fence.path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._permits.close()

    async def describe(self) -> EngineStatus:
        raise Unavailable("a null engine has no process of its own")

    async def run_prefills(self) -> None:
        await asyncio.Event().wait()

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        permit: Permit,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        while (verdict := self._permits.verdict(permit)) is Verdict.PENDING:
            await asyncio.sleep(_LOOK_S)
        return AttemptOutcome(job.attempt, "written" if verdict is Verdict.GRANTED else "abandoned")

    async def test_link(self, target: EngineMetadata) -> LinkReport:
        return LinkReport()

    def forget(self, engine_ids: Sequence[str]) -> None: ...

    async def abandon(self, attempt: str) -> None: ...


class NullPrefillBackend(VllmBackend):
    """The shipped queue and fence."""

    async def prepare(self) -> None: ...

    def open_prefill_engine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, host: Host, config: PrefillWorkerConfig, fence: Fence
    ) -> AbstractAsyncContextManager[NullPrefillEngine]:
        assert isinstance(fence, FenceHolder)
        return NullPrefillEngine(fence)


class NullPrefillWorker(PrefillWorker):
    """Component. config: the fields of `PrefillWorkerConfig`."""

    def __init__(self, config: Mapping[str, Any], spec: ProcessSpec):
        super().__init__(config, spec, NullPrefillBackend(spec))


[_DECODE] = null_graph.Worker.services
_PREFILL = Service(
    name="PrefillWorker",
    config=PrefillWorkerConfig,
    component=f"{__name__}:NullPrefillWorker",
)

#: All but the Frontend: their configuration needs no model.
Backs = Graph(services=(ROUTER, _DECODE, _PREFILL, PLANNER))
#: For the Frontend, with the configuration file of any graph.
Front = (
    FRONTEND.with_defaults(router="component")
    .link(PROCESSOR)
    .link(ROUTER)
    .link(replace(_DECODE, flags="engine"))
)
#: Without a Router, as `graphs.disagg`; its configuration files fit.
Disagg = (
    FRONTEND.link(PROCESSOR)
    .link(replace(_DECODE, flags="engine"))
    .link(replace(_PREFILL, flags="engine"))
)

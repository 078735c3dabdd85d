"""Graphs of all shipped components around engines that compute nothing."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Self

from dynamo_lite.disagg.engine import AttemptOutcome, EngineLoad, OnBrokenLink, OnFirstToken
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.claim_cells import Cell, ClaimCells
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.config import PrefillWorkerConfig
from dynamo_lite.serve.services.prefill_worker import PrefillWorker
from dynamo_lite.serve.services.services import FRONTEND, PLANNER, ROUTER, Graph, Service
from dynamo_lite.serve.services.vllm_backend import VllmBackend
from tests.process import null_graph


class NullPrefillEngine:
    """PrefillEngine that writes nothing."""

    model, busy = "null", False
    load = EngineLoad(gave_tokens=True)
    metadata = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def describe(self) -> EngineStatus:
        raise Unavailable("a null engine has no process of its own")

    async def run_prefills(self, on_broken_link: OnBrokenLink) -> None:
        await asyncio.Event().wait()

    async def prefill(
        self,
        job: RemotePrefillRequest,
        target: EngineMetadata,
        cell: Cell,
        on_first_token: OnFirstToken,
    ) -> AttemptOutcome:
        return AttemptOutcome(job.attempt, "written")

    def check_peer(self, target: EngineMetadata) -> bool:
        return True

    async def abandon(self, attempt: str) -> None: ...


class NullPrefillBackend(VllmBackend):
    """The shipped queue and claim cells."""

    async def prepare(self) -> None: ...

    def open_prefill_engine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, host: Host, config: PrefillWorkerConfig, cells: ClaimCells
    ) -> AbstractAsyncContextManager[NullPrefillEngine]:
        return NullPrefillEngine()


class NullPrefillWorker(PrefillWorker):
    """Component."""

    def __init__(self, config: Mapping[str, Any]):
        super().__init__(config, NullPrefillBackend())


[_DECODE] = null_graph.Worker.services
_PREFILL = Service(
    name="PrefillWorker", config=PrefillWorkerConfig, component=f"{__name__}:NullPrefillWorker"
)

#: All but the Frontend: their configuration needs no model.
Backs = Graph(services=(ROUTER, _DECODE, _PREFILL, PLANNER))
#: For the Frontend, with the configuration file of any graph.
Front = (
    FRONTEND.with_defaults(router="component").link(ROUTER).link(replace(_DECODE, flags="engine"))
)
#: Without a Router, as `graphs.disagg`; its configuration files fit.
Disagg = FRONTEND.link(replace(_DECODE, flags="engine")).link(replace(_PREFILL, flags="engine"))

"""Graphs of all shipped components around engines that compute nothing."""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

from dynamo_lite.disagg.engine import AttemptOutcome, EngineLoad, OnBrokenLink, OnFirstToken
from dynamo_lite.protocol.errors import Unavailable
from dynamo_lite.protocol.health import EngineStatus
from dynamo_lite.protocol.prefill import RemotePrefillRequest
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.claim_cells import Cell, CellReader, ClaimCells
from dynamo_lite.runtime.clock import boottime
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.serve.services.config import PrefillWorkerConfig
from dynamo_lite.serve.services.prefill_worker import PrefillWorker
from dynamo_lite.serve.services.services import FRONTEND, PLANNER, PROCESSOR, ROUTER, Graph, Service
from dynamo_lite.serve.services.vllm_backend import VllmBackend
from tests.process import null_graph

_LOOK_S = 0.002


class NullPrefillEngine:
    """PrefillEngine that writes nothing. As a real one it acts only while the claim of a job holds,
    by its cell in the component's file.

    write_s: how long the writes of a job would take.
    """

    model = "null"
    load = EngineLoad(gave_tokens=True)
    metadata = None

    def __init__(self, cells: ClaimCells, write_s: float):
        assert cells.path is not None
        self._cells, self._write_s = CellReader(cells.path), write_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cells.close()

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
        now = asyncio.get_running_loop().time
        written_at = now() + self._write_s
        while boottime() < self._cells.until(cell):
            if now() >= written_at:
                return AttemptOutcome(job.attempt, "written")
            await asyncio.sleep(_LOOK_S)
        return AttemptOutcome(job.attempt, "abandoned")

    def check_peer(self, target: EngineMetadata) -> bool:
        return True

    async def abandon(self, attempt: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class NullPrefillConfig(PrefillWorkerConfig):
    #: How long the writes of a job take.
    write_s: float = 0.0


class NullPrefillBackend(VllmBackend):
    """The shipped queue and claim cells."""

    def __init__(self, spec: ProcessSpec, write_s: float):
        super().__init__(spec)
        self._write_s = write_s

    async def prepare(self) -> None: ...

    def open_prefill_engine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, host: Host, config: PrefillWorkerConfig, cells: ClaimCells
    ) -> AbstractAsyncContextManager[NullPrefillEngine]:
        assert cells.path is not None
        return NullPrefillEngine(cells, self._write_s)


class NullPrefillWorker(PrefillWorker):
    """Component. config: the fields of `NullPrefillConfig`."""

    def __init__(self, config: Mapping[str, Any], spec: ProcessSpec):
        own = {key: value for key, value in config.items() if key != "write_s"}
        super().__init__(own, spec, NullPrefillBackend(spec, config["write_s"]))


[_DECODE] = null_graph.Worker.services
_PREFILL = Service(
    name="PrefillWorker", config=NullPrefillConfig, component=f"{__name__}:NullPrefillWorker"
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

"""A graph whose workers have no model: the real runtime around the null engine.

`dynamo-lite serve benchmarks.null_worker:Frontend` starts it like any other, with
the real Frontend, leases, NATS subjects and token streams. The Frontend asks the
VllmWorker, whose engine steps at a pace; the BusyWorker's steps follow one another.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from dynamo_lite.request_plane.server import GenerateServer
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.services import FRONTEND, Service
from tests.null_engine import NullEngine

#: A token that has a letter in the tiny model's vocabulary.
TOKEN_ID = 70


@dataclass(frozen=True, kw_only=True)
class NullWorkerConfig:
    """step_s: time between two engine steps."""

    step_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class NullWorker:
    """Component. config: the fields of `NullWorkerConfig`."""

    def __init__(self, config: Mapping[str, Any]):
        self._step_s = msgspec.convert(config, NullWorkerConfig).step_s

    async def start(self, host: Host) -> dict[str, Any]:
        enter = host.stack.enter_async_context
        engine = await enter(NullEngine(token_id=TOKEN_ID))
        server = await enter(GenerateServer(engine))
        host.spawn(self._deliver(engine, server), "engine-steps")
        await host.register("generate", stream=server.stream_address)
        return {}

    async def _deliver(self, engine: NullEngine, server: GenerateServer) -> None:
        """As a model would: one step at a time, at its own pace."""
        async for deltas in engine.steps():
            server.deliver(deltas)
            await asyncio.sleep(self._step_s)

    async def drain(self, grace_s: float) -> None:
        """Nothing to wait for."""

    def health(self) -> dict[str, Any]:
        return {"ok": True}


def _worker(name: str) -> Service:
    component = "benchmarks.null_worker:NullWorker"
    return Service(name=name, config=NullWorkerConfig, component=component)


BUSY_WORKER = "BusyWorker"
Frontend = FRONTEND.link(_worker(FRONTEND.calls)).link(_worker(BUSY_WORKER))

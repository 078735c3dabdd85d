"""A graph of the shipped Frontend and decode workers around engines that compute nothing.

As `null_worker.py`, but with the whole decode worker: its port for requests has TLS where the
graph's address is not a loopback one.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from benchmarks.null_worker import BUSY_WORKER, TOKEN_ID
from dynamo_lite.disagg.engine import DecodeEngine
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.runtime.process.component import Host
from dynamo_lite.serve.services.config import VllmWorkerConfig
from dynamo_lite.serve.services.decode_worker import VllmWorker
from dynamo_lite.serve.services.services import FRONTEND, Graph, Service
from dynamo_lite.serve.services.vllm_backend import VllmBackend
from tests.null_engine import NullEngine


@dataclass(frozen=True, kw_only=True)
class TlsWorkerConfig(VllmWorkerConfig):
    #: Time between two engine steps.
    step_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _PacedEngine(NullEngine):
    def __init__(self, step_s: float):
        super().__init__(token_id=TOKEN_ID)
        self._step_s = step_s

    async def steps(self) -> AsyncIterator[list[TokenDelta]]:
        async for deltas in super().steps():
            yield deltas
            await asyncio.sleep(self._step_s)


class _NullBackend(VllmBackend):
    def __init__(self, step_s: float):
        self._step_s = step_s

    async def prepare(self) -> None:
        """Nothing is imported."""

    def open_decode_engine(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, host: Host, config: VllmWorkerConfig
    ) -> AbstractAsyncContextManager[DecodeEngine]:
        return _PacedEngine(self._step_s)


class TlsWorker(VllmWorker):
    """Component. config: the fields of `TlsWorkerConfig`."""

    def __init__(self, config: Mapping[str, Any]):
        own = {key: value for key, value in config.items() if key != "step_s"}
        super().__init__(own, _NullBackend(config["step_s"]))


def _worker(name: str) -> Service:
    component = f"{__name__}:TlsWorker"
    service = Service(name=name, config=TlsWorkerConfig, component=component)
    return service.with_defaults(remote_prefill=False)


_WORKERS = (_worker(FRONTEND.calls), _worker(BUSY_WORKER))
Frontend = Graph(services=(FRONTEND, *_WORKERS))
#: They start in seconds, since nothing of vLLM is imported.
Workers = Graph(services=_WORKERS)

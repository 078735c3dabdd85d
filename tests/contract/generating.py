"""A worker's generate endpoint and a client of it, with a fake engine behind."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dynamo_lite.protocol.generate import GenerateRequest, TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.server import GenerateServer
from tests.builders import endpoint_record
from tests.certificate_folders import graph_folder, of


class FakeEngine:
    """Accepts all requests, and records them and the aborts."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.running: dict[str, GenerateRequest] = {}
        self.aborted: list[str] = []
        self.refusal: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def submit(self, request: GenerateRequest) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal
        self.taken.append(request.request_id)
        self.running[request.request_id] = request

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.running.pop(request_id, None)


class Outputs:
    """What a client was pushed."""

    def __init__(self) -> None:
        self.batches: list[list[TokenDelta]] = []
        self.lost: list[tuple[list[str], str]] = []

    def on_deltas(self, deltas: list[TokenDelta]) -> None:
        self.batches.append(deltas)

    def on_lost(self, request_ids: list[str], why: str) -> None:
        self.lost.append((request_ids, why))

    @property
    def deltas(self) -> list[TokenDelta]:
        return [delta for batch in self.batches for delta in batch]


@dataclass
class Setup:
    engine: FakeEngine
    server: GenerateServer
    outputs: Outputs
    client: RemoteGenerateClient
    member: EndpointRecord
    stop_server: Callable[[], Awaitable[None]]
    #: The graph's certificates.
    folder: Path


def tokens(request_id: str, *token_ids: int, finish: str | None = None) -> TokenDelta:
    return TokenDelta(request_id=request_id, token_ids=list(token_ids), finish_reason=finish)


async def open_setup(kind: str, stack: AsyncExitStack, **options: Any) -> Setup:
    """kind: "tcp" or "tls"."""
    engine, outputs = FakeEngine(), Outputs()
    folder, own = Path(stack.enter_context(TemporaryDirectory())), None
    if kind == "tls":
        graph_folder(folder)
        own = of(folder, "Frontend")
        options |= {"certificates": of(folder, "VllmWorker")}
    serving = await stack.enter_async_context(AsyncExitStack())
    server = await serving.enter_async_context(GenerateServer(engine, **options))
    client = await stack.enter_async_context(
        RemoteGenerateClient(
            "frontend", outputs.on_deltas, outputs.on_lost, request_timeout_s=2.0, certificates=own
        )
    )
    member = endpoint_record(stream=server.stream_address, tls=own is not None)
    return Setup(engine, server, outputs, client, member, serving.aclose, folder)

"""A graph with null engines in its decode workers, and with a client in a process of its own.

The prefill workers are stand-ins that only report what a file tells them.
"""

import asyncio
import itertools
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.protocol.generate import TokenDelta
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.request_plane.base import OnDeltas, OnLost
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.request_plane.failover import FailoverClient
from dynamo_lite.request_plane.migrating_request import MigrationPlan
from dynamo_lite.routing.pickers import RoundRobin
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.serve.services.frontend.dispatcher import rotate
from dynamo_lite.serve.services.services import Graph, Service
from tests.builders import generate_request
from tests.process.null_graph import NullBackend, NullWorker, NullWorkerConfig


def token_at(prompt: list[int], position: int) -> int:
    return prompt[0] * 10_000 + position


class FleetBackend(NullBackend):
    token_at = staticmethod(token_at)


class FleetWorker(NullWorker):
    """Component. Its answers differ with their prompts and positions."""

    backend = FleetBackend


@dataclass(frozen=True, kw_only=True)
class CallerConfig:
    """requests: how many run at a time, of `tokens` each. results: file with a line for each
    that has ended. port: none; without it a graph has no URL to announce."""

    requests: int = 4
    tokens: int = 300
    prompt_tokens: int = 20
    results: str = ""


class Requests:
    """transport: as of a FailoverClient. members: that are asked, by turns."""

    def __init__(
        self,
        transport: Callable[[OnDeltas, OnLost], RemoteGenerateClient],
        members: Callable[[], Sequence[EndpointRecord]],
    ):
        self._tokens: dict[str, list[int]] = {}
        self._ends: dict[str, asyncio.Future[str]] = {}
        self.client = FailoverClient(
            transport,
            members=members,
            picker=RoundRobin(),
            on_deltas=self._on_deltas,
            on_ended=self._on_ended,
        )

    async def ask(self, request_id: str, tokens: int, prompt: list[int]) -> tuple[list[int], str]:
        """The tokens, and the reason of the end. Raises the error with which the request ends."""
        sampling = msgspec.msgpack.encode({"max_tokens": tokens})
        request = generate_request(request_id, prompt_token_ids=prompt, sampling=sampling)
        self._tokens[request_id] = []
        end = self._ends[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.client.submit(request, movable=MigrationPlan())
            return self._tokens[request_id], await end
        finally:
            del self._tokens[request_id], self._ends[request_id]

    async def all_ended(self) -> None:
        if self._ends:
            await asyncio.wait(self._ends.values())

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self._tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                self._ends[delta.request_id].set_result(delta.finish_reason)

    def _on_ended(self, request_id: str, error: DynamoLiteError) -> None:
        self._ends[request_id].set_exception(error)


class Caller:
    """A Frontend without HTTP."""

    def __init__(self, config: dict[str, Any], spec: Any):
        self._config = CallerConfig(**config)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._requests: Requests | None = None
        self._leaving = asyncio.Event()
        self._run = secrets.token_hex(3)  # others may call the same workers

    async def start(self, host: Any) -> dict[str, Any]:
        namespace, enter = self._spec.namespace, self._stack.enter_async_context
        prefix = names.endpoint_prefix(namespace, "VllmWorker", "generate")
        roster = await enter(Roster(host.store, prefix))
        health = await enter(
            HealthMonitor(host.messaging, roster, namespace=namespace, component="VllmWorker")
        )
        self._requests = Requests(
            lambda deltas, lost: RemoteGenerateClient(f"{host.lease.id:x}", deltas, lost),
            lambda: health.members_or_all,
        )
        client = await enter(self._requests.client)
        await rotate(self._stack, roster, health, client.transport, client.members_changed)
        await host.register("http")
        for number in range(self._config.requests):
            host.spawn(self._ask(self._requests, number, health), f"caller {number}")
        return {}

    async def drain(self, grace_s: float) -> None:
        self._leaving.set()
        if self._requests is not None:
            await self._requests.all_ended()

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> Mapping[str, Any]:
        return {"ok": self._requests is not None}

    async def _ask(self, requests: Requests, caller: int, health: HealthMonitor) -> None:
        """One request after the other; the first waits for a worker."""
        while not health.responsive:
            await asyncio.sleep(0.05)
        tokens = self._config.tokens
        for turn in itertools.count():
            if self._leaving.is_set():
                return
            name = f"r{self._run}-{caller}-{turn}"
            prompt = [caller * 1000 + turn, *range(self._config.prompt_tokens - 1)]
            try:
                got, end = await requests.ask(name, tokens, prompt)
            except DynamoLiteError as exc:
                got, end = [], f"{type(exc).__name__}: {exc}"
            exact = got == [token_at(prompt, position) for position in range(tokens)]
            line = {"request": name, "end": end, "exact": exact}
            with Path(self._config.results).open("a", encoding="utf-8") as results:
                results.write(json.dumps(line) + "\n")


@dataclass(frozen=True, kw_only=True)
class StandInConfig:
    """facts: a folder with a JSON file for each number of a process: what it reports."""

    facts: str = ""


class StandIn:
    def __init__(self, config: dict[str, Any], spec: Any):
        self._file = Path(config["facts"]) / f"{spec.instance}.json"

    async def start(self, host: Any) -> dict[str, Any]:
        await host.register("prefill")
        return {}

    async def drain(self, grace_s: float) -> None:
        while self._facts().get("jobs"):
            await asyncio.sleep(0.02)

    async def close(self) -> None: ...

    def health(self) -> Mapping[str, Any]:
        return {"ok": True, **self._facts()}

    def _facts(self) -> dict[str, Any]:
        return json.loads(self._file.read_text()) if self._file.exists() else {}


#: Of decode workers.
PACED = {"remote_prefill": False, "kv_events": False, "step_s": 0.02}


def _service(name: str, config: type, component: str, **more: Any) -> Service:
    path = f"tests.process.fleet_graph:{component}"
    return Service(name=name, config=config, component=path, **more)


Decoding = Graph(
    services=(
        _service("Caller", CallerConfig, "Caller"),
        _service("VllmWorker", NullWorkerConfig, "FleetWorker", scalable=True).with_defaults(
            **PACED
        ),
    )
)

Prefilling = Graph(services=(_service("PrefillWorker", StandInConfig, "StandIn", scalable=True),))

"""A graph with null engines in its decode workers, and with a client in a process of its own.

The prefill workers are stand-ins that only report what a file tells them.
"""

import asyncio
import itertools
import json
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_lite.protocol import names
from dynamo_lite.protocol.errors import DynamoLiteError
from dynamo_lite.request_plane.client import RemoteGenerateClient
from dynamo_lite.runtime.members.health import HealthMonitor
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.serve.services.frontend.dispatcher import rotate
from dynamo_lite.serve.services.services import Graph, Service
from tests.process.dispatcher import Requests
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

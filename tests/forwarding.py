"""A Forwarder's server in front of scripted engines, in one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynamo_lite.forward.engines import Engines
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.http import ForwardServer
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.forward.placing import Placer
from dynamo_lite.forward.protocols.base import SGLANG_GENERATE, VLLM_ROUTES
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.policy.forwarding import SentPrompts
from dynamo_lite.runtime.process.status import bind
from tests.scripted import HANDOVERS, Fleet, ScriptedEngine

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 4}
TEXT = " t0 t1 t2 t3"


@dataclass
class Rig:
    fleet: Fleet
    prefill: list[ScriptedEngine]
    decode: list[ScriptedEngine]
    engines: Engines
    monitor: EngineMonitor
    forwarding: Forwarding
    placer: Placer
    server: ForwardServer
    session: aiohttp.ClientSession
    url: str

    async def ask(
        self,
        body: Any = None,
        *,
        route: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
        **fields: Any,
    ) -> tuple[int, Any]:
        """Status and JSON."""
        given = {"json": body or {**COMPLETION, **fields}} if data is None else {"data": data}
        async with self.session.post(f"{self.url}{route}", headers=headers, **given) as answer:
            return answer.status, await answer.json(content_type=None)

    async def text(self, **fields: Any) -> str:
        status, answer = await self.ask(**fields)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    async def stream(self, *, route: str = "/v1/completions", **fields: Any) -> bytes:
        body = {**COMPLETION, "stream": True, **fields}
        async with self.session.post(f"{self.url}{route}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def check(self) -> None:
        """One check of every engine."""
        for engine in self.engines.all:
            await self.monitor.check(engine)

    @property
    def answered(self) -> dict[tuple[str, str], int]:
        return dict(self.forwarding.stats.answered)


@asynccontextmanager
async def rig(
    protocol: str = "nixl",
    *,
    prefill: int = 1,
    decode: int = 1,
    cached: tuple[int | None, int | None] = (None, None),
    **options: Any,
) -> AsyncIterator[Rig]:
    """cached: what prefill and decode engines report. options: of `ForwarderConfig`.

    Fails if an engine has seen its protocol broken, or if a leg is left open.
    """
    fleet = Fleet()
    async with AsyncExitStack() as stack:
        sides: dict[str, list[ScriptedEngine]] = {"prefill": [], "decode": []}
        for role, count, own in (("prefill", prefill, cached[0]), ("decode", decode, cached[1])):
            for _ in range(count):
                engine = ScriptedEngine(fleet, role, HANDOVERS[protocol], cached=own)  # type: ignore[arg-type]
                sides[role].append(await stack.enter_async_context(engine))
        config = ForwarderConfig(
            protocol=protocol,  # type: ignore[arg-type]
            engines=tuple(
                EngineOptions(
                    url=engine.url,
                    role=engine.role,
                    transfer_port=engine.port if protocol == "mooncake" else None,
                )
                for engine in (*sides["prefill"], *sides["decode"])
            ),
            **options,
        )
        kind = PROTOCOLS[protocol]
        engines = Engines(config.engines, kind)
        upstream = await stack.enter_async_context(
            Upstream(connect_s=config.connect_timeout_s, idle_s=config.idle_timeout_s)
        )
        sent = SentPrompts(1000)
        # Not entered: a test checks the engines when it means to.
        monitor = EngineMonitor(engines, upstream, config, sent)
        placer = Placer(engines, kind, config, sent, uniform=lambda: 0.0)
        forwarding = await stack.enter_async_context(
            Forwarding(kind, config, placer, upstream, monitor)
        )
        sock = bind("127.0.0.1", 0)
        server = ForwardServer(
            forwarding,
            config,
            kind.routes | VLLM_ROUTES | {SGLANG_GENERATE},
            sock,
            health=lambda: {"ok": any(e.usable for e in engines.all if e.decodes)},
        )
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        made = Rig(
            fleet, sides["prefill"], sides["decode"], engines, monitor, forwarding, placer,
            server, session, url,
        )  # fmt: skip
        await made.check()
        yield made
        assert fleet.violations == []
        async with asyncio.timeout(5):
            while any(leg.ended is None for leg in fleet.legs):
                await asyncio.sleep(0.01)
        assert forwarding.stats.in_flight == 0
        assert [(e.legs, e.waiting_tokens) for e in engines.all] == [(0, 0)] * len(engines.all)

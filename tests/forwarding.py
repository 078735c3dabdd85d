"""A Forwarder's server in front of scripted engines, in one process."""

import itertools
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynamo_lite.forward.choosing import SentPrompts
from dynamo_lite.forward.engines import KnownEngines
from dynamo_lite.forward.forwarder import engine_kv
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.http import ForwardServer, reply_of
from dynamo_lite.forward.known_blocks import KnownBlocks
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.forward.placing import Placer
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.tls import server_context
from tests.builders import eventually
from tests.external import Certificates
from tests.scripted import HANDOVERS, Fleet, ScriptedEngine

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 4}
TEXT = " t0 t1 t2 t3"


@dataclass
class Rig:
    fleet: Fleet
    prefill: list[ScriptedEngine]
    decode: list[ScriptedEngine]
    engines: KnownEngines
    upstream: Upstream
    monitor: EngineMonitor
    forwarding: Forwarding
    placer: Placer
    server: ForwardServer
    session: aiohttp.ClientSession
    url: str
    #: None without engines that publish KV events.
    known: KnownBlocks | None

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


def _transfer_port(engine: ScriptedEngine, protocol: str) -> int | None:
    """Only where the protocol's own port is not this engine's."""
    if protocol == "mooncake" or (protocol.startswith("kvt") and engine.kvt_port == engine.port):
        return engine.port
    return None


@asynccontextmanager
async def rig(
    protocol: str = "nixl",
    *,
    prefill: int = 1,
    decode: int = 1,
    cached: tuple[int | None, int | None] = (None, None),
    https: Certificates | None = None,
    trust: dict[str, Any] | None = None,
    events: Sequence[dict[str, str]] = (),
    on_drop: OnDrop = uncounted,
    **options: Any,
) -> AsyncIterator[Rig]:
    """cached: what prefill and decode engines report. https: of all servers. trust: options of all
    engines. events: of the first engines, prefill engines first. options: of `ForwarderConfig`.

    Fails if an engine has seen its protocol broken, or if a leg is left open.
    """
    fleet = Fleet()
    async with AsyncExitStack() as stack:
        sides: dict[str, list[ScriptedEngine]] = {"prefill": [], "decode": []}
        tls = None if https is None else server_context(*https.files())
        for role, count, own in (("prefill", prefill, cached[0]), ("decode", decode, cached[1])):
            for _ in range(count):
                engine = ScriptedEngine(
                    fleet,
                    role,  # type: ignore[arg-type]
                    HANDOVERS[protocol],
                    cached=own,
                    tls=tls,
                )
                sides[role].append(await stack.enter_async_context(engine))
        config = ForwarderConfig(
            protocol=protocol,  # type: ignore[arg-type]
            engines=tuple(
                EngineOptions(
                    url=engine.url,
                    role=engine.role,
                    transfer_port=_transfer_port(engine, protocol),
                    **(trust or {}),
                    **own,
                )
                for engine, own in itertools.zip_longest(
                    (*sides["prefill"], *sides["decode"]), events, fillvalue={}
                )
            ),
            **options,
        )
        kind = PROTOCOLS[protocol]
        engines = KnownEngines(config.engines, kind)
        upstream = await stack.enter_async_context(Upstream(config.idle_timeout_s))
        sent = SentPrompts()
        # Not entered: a test checks the engines when it means to.
        monitor = EngineMonitor(engines, upstream, config, sent)
        kv = engine_kv(engines, upstream, config)
        if kv is not None:
            await stack.enter_async_context(kv)
        known = kv and kv.known
        placer = Placer(engines, kind, config, sent, known=known)
        forwarding = await stack.enter_async_context(
            Forwarding(kind, config, placer, upstream, monitor, tokenizer=kv and kv.tokenizer)
        )
        sock = bind("127.0.0.1", 0)
        health = reply_of(lambda: {"ok": any(e.usable for e in engines.all if e.decodes)})
        server = ForwardServer(
            forwarding, config, kind, sock, {"/health": health}, tls=tls, on_drop=on_drop
        )
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        trusted = (
            True if https is None else ssl.create_default_context(cafile=https.folder / "ca.pem")
        )
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted))
        )
        url = f"{'http' if tls is None else 'https'}://127.0.0.1:{sock.getsockname()[1]}"
        made = Rig(
            fleet, sides["prefill"], sides["decode"], engines, upstream, monitor, forwarding,
            placer, server, session, url, known,
        )  # fmt: skip
        await made.check()
        yield made
        assert fleet.violations == []
        await eventually(lambda: all(leg.ended is not None for leg in fleet.legs), 5)
        assert forwarding.stats.in_flight == 0
        assert [(e.legs, e.waiting_tokens) for e in engines.all] == [(0, 0)] * len(engines.all)

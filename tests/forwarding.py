"""A Forwarder's server in front of scripted engines, in one process."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.client import Answer
from dynamo_lite.forward.health import KnownEngines
from dynamo_lite.forward.http import ForwardServer, reply
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.forward.placing import Placer
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.decisions import Explain
from dynamo_lite.protocol.forwarding import ForwardDecision, decode_forward_explained
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.tls import server_context
from tests.external import Certificates
from tests.scripted import HANDOVERS, Fleet, ScriptedEngine

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 4}
TEXT = " t0 t1 t2 t3"


@dataclass(kw_only=True)
class Asked:
    """A server in front of scripted engines."""

    fleet: Fleet
    prefill: list[ScriptedEngine]
    decode: list[ScriptedEngine]
    session: aiohttp.ClientSession
    url: str

    async def ask(
        self,
        body: Any = None,
        *,
        route: str = "/v1/completions",
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
        data: bytes | None = None,
        url: str = "",
        **fields: Any,
    ) -> tuple[int, Any]:
        """Status and JSON. url: of another server than this one."""
        given = {"json": body or {**COMPLETION, **fields}} if data is None else {"data": data}
        where = f"{url or self.url}{route}"
        async with self.session.post(where, headers=headers, **given) as answer:
            return answer.status, await answer.json(content_type=None)

    async def text(self, headers: Any = None, **fields: Any) -> str:
        status, answer = await self.ask(headers=headers, **fields)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    async def stream(self, *, route: str = "/v1/completions", **fields: Any) -> bytes:
        body = {**COMPLETION, "stream": True, **fields}
        async with self.session.post(f"{self.url}{route}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()


@dataclass(kw_only=True)
class Rig(Asked):
    engines: KnownEngines
    upstream: Upstream
    parts: ForwardParts
    placer: Placer
    server: ForwardServer

    async def check(self) -> None:
        """One check of every engine."""
        for engine in self.engines.all:
            await self.engines.check(engine)

    @property
    def answered(self) -> dict[tuple[str, str], int]:
        return dict(self.parts.stats.answered)


def told(r: Rig, **wanted: Any) -> list[ForwardDecision]:
    """What `explain` would be answered."""
    reply = r.parts.decisions.answer(encode(Explain(**wanted)), lease_id=7)
    answer = decode_forward_explained(reply)
    assert answer.lease_id == 7
    return answer.decisions


def trusting(https: Certificates | None) -> aiohttp.ClientSession:
    """A client that trusts these certificates."""
    ca_file = None if https is None else https.folder / "ca.pem"
    tls = ssl.create_default_context(cafile=ca_file)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls))


async def asked_engines(
    stack: AsyncExitStack,
    protocol: str,
    prefill: int,
    decode: int,
    https: Certificates | None,
) -> dict[str, Any]:
    """The fields of `Asked` but for the URL. https: of all engines."""
    made: dict[str, Any] = {"fleet": Fleet(), "prefill": [], "decode": []}
    tls = None if https is None else server_context(*https.files())
    for role, count in (("prefill", prefill), ("decode", decode)):
        for _ in range(count):
            engine = ScriptedEngine(made["fleet"], role, HANDOVERS[protocol], tls=tls)  # type: ignore[arg-type]
            made[role].append(await stack.enter_async_context(engine))
    made["session"] = await stack.enter_async_context(trusting(https))
    return made


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
    https: Certificates | None = None,
    ca_file: str | None = None,
    on_drop: OnDrop = uncounted,
    **options: Any,
) -> AsyncIterator[Rig]:
    """https: of all servers. ca_file: of all engines. options: of `ForwarderConfig`."""
    async with AsyncExitStack() as stack:
        made = await asked_engines(stack, protocol, prefill, decode, https)
        if https is not None:
            options["tls_cert"], options["tls_key"] = map(str, https.files())
        config = ForwarderConfig(
            port=0,
            protocol=protocol,  # type: ignore[arg-type]
            engines=tuple(
                EngineOptions(
                    url=engine.url,
                    role=engine.role,
                    transfer_port=_transfer_port(engine, protocol),
                    ca_file=ca_file,
                )
                for engine in (*made["prefill"], *made["decode"])
            ),
            **options,
        )
        parts = ForwardParts(config)
        engines = parts.engines
        stack.push_async_callback(parts.upstream.aclose)
        # Its engines are not entered: a test checks the engines when it means to.

        def health() -> Answer:
            return reply({"ok": any(e.usable for e in engines.all if e.decodes)})

        server = ForwardServer(parts, {"/health": health}, on_drop=on_drop)
        await stack.enter_async_context(server)
        r = Rig(
            **made,
            url=server.url,
            engines=engines,
            upstream=parts.upstream,
            parts=parts,
            placer=parts.placer,
            server=server,
        )
        await r.check()
        yield r
        await r.fleet.ends_well()
        assert parts.stats.in_flight == 0
        assert not engines.loads.requests

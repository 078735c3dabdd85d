"""A sidecar: a server beside one stock decode engine, without etcd and NATS."""

import asyncio
import random
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_lite.forward.engine_tls import engine_tls
from dynamo_lite.forward.engines import KnownEngine, KnownEngines
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.http import ForwardServer
from dynamo_lite.forward.named import AllowedHosts
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.protocols.base import SGLANG_GENERATE, VLLM_ROUTES
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.sidecar import Door, HeaderPlacer, Prefillers
from dynamo_lite.forward.sidecar_options import SidecarConfig
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.policy.routing.forwarding import SentPrompts
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.process.readiness import Probes
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.services.forwarder import ForwardMetrics, server_tls, server_url

#: Paths that the sidecar answers itself. `/metrics` is the engine's.
_OWN = frozenset({"/health", "/live", "/ready"})


class Sidecar:
    """Call `start`, then `drain`, then `close`. `close` must be called in any case."""

    def __init__(self, config: SidecarConfig):
        self._config = config
        self._stack = AsyncExitStack()
        self._servers: list[ForwardServer] = []

    async def start(self) -> list[str]:
        """The URL of each rank's server. Raises StartupError, ConfigError."""
        config, enter = self._config, self._stack.enter_async_context
        own = config.forwarder
        protocol = PROTOCOLS[own.protocol]
        tls = server_tls(own)
        # Read at the start, so that a mistake in it is reported before the first request.
        engine_tls(config.prefillers.engine("localhost:1"))
        sockets = [
            bind(own.host, own.port + rank if own.port else 0) for rank in range(config.ranks)
        ]
        for sock in sockets:
            self._stack.callback(sock.close)
        ports: list[int] = [sock.getsockname()[1] for sock in sockets]
        engines = KnownEngines(own.engines, protocol)
        upstream = await enter(Upstream(connect_s=own.connect_timeout_s, idle_s=own.idle_timeout_s))
        monitor = await enter(EngineMonitor(engines, upstream, own, SentPrompts(1)))
        prefillers = Prefillers(
            protocol,
            config.prefillers,
            monitor.check,
            every_s=own.health_interval_s,
            first_number=config.ranks,
        )
        self._stack.push_async_callback(prefillers.close)
        pick = random.Random().randrange if config.choice == "random" else _first
        placer = HeaderPlacer(engines, protocol, prefillers, pick=pick)
        forwarding = await enter(Forwarding(protocol, own, placer, upstream, monitor))
        allowed, ranks = AllowedHosts(config.allowed), dict(zip(ports, engines.all, strict=True))
        health = partial(_health, own, engines, prefillers, forwarding)
        if config.metrics_port:
            registry = CollectorRegistry()
            registry.register(ForwardMetrics(forwarding, placer, engines))
            await enter(StatusServer(health, registry, own.host, config.metrics_port))
        for port, sock in zip(ports, sockets, strict=True):
            ready = partial(_ready, ranks[port])
            server = ForwardServer(
                Door(forwarding, prefillers, allowed, ranks, port),
                own,
                protocol.routes | VLLM_ROUTES | {SGLANG_GENERATE},
                sock,
                health=ready,
                probes=Probes(live=lambda: {"ok": True}, ready=ready),
                own=_OWN,
                tls=tls,
            )
            await server.start()
            self._stack.push_async_callback(server.stop, 0.0)
            self._servers.append(server)
        return [server_url(own, port) for port in ports]

    async def drain(self, grace_s: float) -> None:
        """Accepts no new connections. Open answers may finish within `grace_s`."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def close(self) -> None:
        await self._stack.aclose()


def _first(count: int) -> int:
    del count
    return 0


def _ready(engine: KnownEngine) -> dict[str, Any]:
    trouble = "" if engine.usable else f"{engine.name}: {engine.trouble}"
    return {"ok": engine.usable, "checks": {"engine": {"ok": engine.usable, "detail": trouble}}}


def _health(
    own: ForwarderConfig, engines: KnownEngines, prefillers: Prefillers, forwarding: Forwarding
) -> Mapping[str, Any]:
    return {
        "ok": any(engine.usable for engine in engines.all),
        "protocol": own.protocol,
        "engines": {engine.name: {"trouble": engine.trouble} for engine in engines.all},
        "unfit_prefillers": prefillers.misfits,
        "requests": forwarding.stats.in_flight,
    }

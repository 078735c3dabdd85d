"""A sidecar: a server beside one stock decode engine, without etcd and NATS."""

import asyncio
import logging
import logging.config
import random
import signal
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.engines import KnownEngine, KnownEngines, engine_tls
from dynamo_lite.forward.header_placing import Door, HeaderPlacer
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.http import ForwardServer, reply_of, server_tls, server_url
from dynamo_lite.forward.metrics import ForwardMetrics
from dynamo_lite.forward.named import AllowedHosts
from dynamo_lite.forward.options import ForwarderConfig, SidecarConfig
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.process.logs import LogFormat, logging_config
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.runtime.process.stop import EXIT_STOPPED, StopRequest, stop_on_signals

logger = logging.getLogger(__name__)


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
        engine_tls(config.prefillers)
        sockets = [
            bind(own.host, own.port + rank if own.port else 0) for rank in range(config.ranks)
        ]
        for sock in sockets:
            self._stack.callback(sock.close)
        ports: list[int] = [sock.getsockname()[1] for sock in sockets]
        engines = KnownEngines(own.engines, protocol)
        upstream = await enter(Upstream(own.idle_timeout_s))
        monitor = await enter(EngineMonitor(engines, upstream, own.health_interval_s, None))
        pick = random.randrange if config.choice == "random" else lambda count: 0
        placer = HeaderPlacer(engines, protocol, config, monitor, pick=pick)
        parts = ForwardParts(
            protocol=protocol, config=own, placer=placer, upstream=upstream, monitor=monitor
        )
        forwarding = Forwarding(parts)
        allowed, ranks = AllowedHosts(config.allowed), dict(zip(ports, engines.all, strict=True))
        if config.metrics_port:
            registry = CollectorRegistry()
            registry.register(ForwardMetrics(forwarding.stats, placer, engines))
            health = partial(_health, own, engines, placer, forwarding)
            await enter(StatusServer(health, registry, own.host, config.metrics_port))
        for port, sock in zip(ports, sockets, strict=True):
            ready = reply_of(partial(_ready, ranks[port]))
            # `/metrics` is the engine's.
            own_paths = {"/health": ready, "/ready": ready, "/live": reply_of(lambda: {"ok": True})}
            door = Door(forwarding, placer, allowed, ranks, port)
            server = ForwardServer(door, own, sock, own_paths, tls=tls)
            await server.start()
            self._stack.push_async_callback(server.stop, 0.0)
            self._servers.append(server)
        return [server_url(own, port) for port in ports]

    async def drain(self, grace_s: float) -> None:
        """Accepts no new connections. Open answers may finish within `grace_s`."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def close(self) -> None:
        await self._stack.aclose()


def run(config: SidecarConfig, *, grace_s: float, level: str, log_format: LogFormat) -> int:
    """Runs a sidecar until it is stopped. Returns 0 after a drain, 130 after a second signal.
    Raises StartupError, ConfigError."""
    logging.config.dictConfig(logging_config(log_format, "sidecar", 0, level=level))
    return uvloop.run(_run(config, grace_s))


async def _run(config: SidecarConfig, grace_s: float) -> int:
    stop, sidecar = StopRequest(), Sidecar(config)
    # A closed terminal ends it in order, too.
    with stop_on_signals(stop, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        try:
            urls = await sidecar.start()
            print("ready", *urls, flush=True)
            await stop.wait()
            logger.info("draining: no new connections, open answers have %g s", grace_s)
            await sidecar.drain(grace_s)
        finally:
            await sidecar.close()
    return EXIT_STOPPED


def _ready(engine: KnownEngine) -> dict[str, Any]:
    trouble = "" if engine.usable else f"{engine.name}: {engine.trouble}"
    return {"ok": engine.usable, "checks": {"engine": {"ok": engine.usable, "detail": trouble}}}


def _health(
    own: ForwarderConfig, engines: KnownEngines, placer: HeaderPlacer, forwarding: Forwarding
) -> Mapping[str, Any]:
    return {
        "ok": any(engine.usable for engine in engines.all),
        "protocol": own.protocol,
        "engines": {engine.name: {"trouble": engine.trouble} for engine in engines.all},
        "unfit_prefillers": placer.misfits,
        "requests": forwarding.stats.in_flight,
    }

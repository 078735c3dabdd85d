"""A sidecar: a server beside one stock decode engine, without etcd and NATS."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.client import error
from dynamo_lite.forward.engines import KnownEngine, trust
from dynamo_lite.forward.failures import Final
from dynamo_lite.forward.http import ForwardServer, reply_of, server_tls
from dynamo_lite.forward.metrics import ForwardMetrics
from dynamo_lite.forward.named import PREFILLER_HEADER, AllowedHosts, parse_host_port
from dynamo_lite.forward.options import SidecarConfig
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.runtime.address import host_port, local_url
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.process.status import StatusServer
from dynamo_lite.runtime.process.stop import EXIT_STOPPED, StopRequest, stop_on_signals

logger = logging.getLogger(__name__)

#: Most prefill engines that one request may name, and that are known at a time.
MAX_NAMED, MAX_PREFILLERS = 64, 256
#: How long a prefill engine is checked after a client has named it.
_NAMED_S = 60.0


class NamedPrefillers:
    """The prefill engines that clients name, of those hosts that are allowed."""

    def __init__(self, parts: ForwardParts, config: SidecarConfig):
        self._parts, self._config = parts, config
        self._allowed = AllowedHosts(config.allowed)
        self._refusals = LogLimit()
        #: By HOST:PORT; the one that was named longest ago is the first.
        self._known: OrderedDict[str, KnownEngine] = OrderedDict()

    async def find(self, names: Sequence[str]) -> list[KnownEngine]:
        """Raises Final."""
        found = dict.fromkeys(map(self._accepted, names))
        if len(found) > MAX_NAMED:
            text = f"{PREFILLER_HEADER}: at most {MAX_NAMED} engines"
            raise Final(error(400, "BadRequestError", text))
        return list(await asyncio.gather(*map(self._engine, found)))

    def _accepted(self, name: str) -> str:
        """The name as HOST:PORT. Raises Final."""
        try:
            host, port = parse_host_port(name)
        except ValueError as exc:
            text = f"{PREFILLER_HEADER}: expected HOST:PORT, got {name[:100]!r}"
            raise Final(error(400, "BadRequestError", text)) from exc
        if host not in self._allowed:
            text = (
                f"{PREFILLER_HEADER}: {host} is not accepted. Accepted are"
                f" {', '.join(self._allowed.entries)} (the sidecar's --allow-prefiller)"
            )
            self._refusals.log(logger, "%s", text)
            raise Final(error(403, "PermissionDeniedError", text))
        return host_port(host, port)

    async def _engine(self, name: str) -> KnownEngine:
        engine = self._known.get(name)
        if engine is None or engine.left:
            engine = self._add(name)
        self._known.move_to_end(name)
        engine.named_until = asyncio.get_running_loop().time() + _NAMED_S
        if self._parts.protocol.query_path:
            await engine.checked.wait()
        return engine

    def _add(self, name: str) -> KnownEngine:
        """It counts as healthy until a leg or a check fails, unless its ids have to be known."""
        engines = self._parts.engines
        engine = self._known[name] = engines.add(self._config.prefiller(name))
        if len(self._known) > MAX_PREFILLERS:
            engines.remove(self._known.popitem(last=False)[1])
        if not self._parts.protocol.query_path:
            engine.passed()
        engines.follow(engine)
        return engine


@asynccontextmanager
async def sidecar(config: SidecarConfig) -> AsyncIterator[tuple[str, ForwardServer]]:
    """Gives the URL and the server of a sidecar that runs while the context lasts.

    Raises StartupError, ConfigError.
    """
    own, tls = config.forwarder, server_tls(config.forwarder)
    if config.prefillers.secure:
        trust(config.prefillers.ca_file)  # a mistake in it ends the start
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        sock = bind(own.host, own.port)
        stack.callback(sock.close)
        port = sock.getsockname()[1]
        parts = ForwardParts(own, by_load=False)
        await enter(parts.upstream)
        await enter(parts.engines)
        if config.metrics_port:
            registry = CollectorRegistry()
            registry.register(ForwardMetrics(parts.stats, parts.placer, parts.engines))
            await enter(StatusServer(parts.facts, registry, own.host, config.metrics_port))
        ready = reply_of(partial(_ready, parts.engines.all[0]))
        # `/metrics` is the engine's.
        own_paths = {"/health": ready, "/ready": ready, "/live": reply_of(lambda: {"ok": True})}
        forwarding = Forwarding(parts, NamedPrefillers(parts, config).find)
        server = ForwardServer(forwarding, own, sock, own_paths, tls=tls)
        await server.start()
        stack.push_async_callback(server.stop, 0.0)
        yield local_url(own.host, port, tls=tls is not None), server


def run(config: SidecarConfig, grace_s: float) -> int:
    """Runs a sidecar until it is stopped. Returns 0 after a drain. Raises StartupError,
    ConfigError."""
    return uvloop.run(_run(config, grace_s))


async def _run(config: SidecarConfig, grace_s: float) -> int:
    stop = StopRequest()
    with stop_on_signals(stop):
        async with sidecar(config) as (url, server):
            print("ready", url, flush=True)
            await stop.wait()
            logger.info("draining: no new connections, open answers have %g s", grace_s)
            await server.stop(grace_s)
    return EXIT_STOPPED


def _ready(engine: KnownEngine) -> dict[str, Any]:
    trouble = "" if engine.usable else f"{engine.name}: {engine.trouble}"
    return {"ok": engine.usable, "checks": {"engine": {"ok": engine.usable, "detail": trouble}}}

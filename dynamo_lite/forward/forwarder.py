"""The Forwarder: an HTTP server in front of stock engines, which know nothing of dynamo-lite."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import msgspec

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.client import Answer, error
from dynamo_lite.forward.discovery import Discovery
from dynamo_lite.forward.engines import check_trust
from dynamo_lite.forward.http import ForwardServer, reply_of, server_tls, server_url
from dynamo_lite.forward.metrics import ForwardMetrics
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.protocol import names
from dynamo_lite.runtime.address import advertised_address
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host, ProcessSpec


class Forwarder:
    """The component. config: the fields of `ForwarderConfig`."""

    def __init__(self, config: Mapping[str, Any] | ForwarderConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, ForwarderConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._parts = ForwardParts(self._config)
        self._server: ForwardServer | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Serves HTTP without waiting for engines: 503 until one of them is healthy."""
        config, parts, enter = self._config, self._parts, self._stack.enter_async_context
        sock = bind(config.host, config.port, shared=self._spec.instances > 1)
        self._stack.callback(sock.close)
        port = sock.getsockname()[1]
        await enter(parts.upstream)
        await enter(parts.engines)
        if config.discovers:
            check_trust(config.joined_ca_file, "joined-ca-file")
            prefix = names.components_prefix(self._spec.namespace)
            roster = await enter(Roster(host.store, prefix, host.drops))
            Discovery(roster, parts)
        forwarding = Forwarding(parts)
        host.registry.register(ForwardMetrics(parts.stats, parts.placer, parts.engines))
        await enter(self._explaining(host, forwarding))
        await host.register("http", stream=advertised_address(config.host, port))
        own = {
            "/health": reply_of(self.health),
            **{path: reply_of(make) for path, make in host.probes.items()},
            "/metrics": _no_metrics,
        }
        self._server = server = ForwardServer(
            forwarding, config, sock, own, tls=server_tls(config), on_drop=host.drops
        )
        await server.start()
        self._stack.push_async_callback(server.stop, 0.0)
        return {"url": server_url(config, port)}

    def _explaining(self, host: Host, forwarding: Forwarding) -> AbstractAsyncContextManager[None]:
        """Answers `dynamo-lite explain`."""
        lease_id = host.lease.id

        async def answer(payload: bytes) -> bytes:
            return forwarding.decisions.answer(payload, lease_id)

        subject = names.forward_explain_subject(self._spec.namespace, lease_id)
        return host.messaging.serve(subject, counted(answer, "explain", host.drops))

    async def drain(self, grace_s: float) -> None:
        """Accepts no new connections. Open answers may finish within `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> dict[str, Any]:
        engines, facts = self._parts.engines, self._parts.facts()
        return facts | {
            "checks": {"engines": "" if facts["ok"] else self._engines_trouble()},
            "without_broker": "Requests are forwarded; `explain` has no answer.",
            "unused_engines": [
                {"engine": name, "lease": lease, "role": why.role, "trouble": why.trouble}
                for (name, lease), why in engines.unused.items()
            ],
            "prefill_engines": sum(engine.can_prefill for engine in engines.all),
            "decode_engines": sum(engine.decodes and engine.usable for engine in engines.all),
        }

    def _engines_trouble(self) -> str:
        engines = self._parts.engines
        found = [f"{e.name}: {e.trouble}" for e in engines.all if e.decodes]
        found += [f"{name}: {why.trouble}" for (name, _), why in engines.unused.items()]
        if not found and self._config.discovers:
            namespace = self._spec.namespace
            return f"no decode engine has joined {namespace}: start `dynamo-lite join` beside one"
        return f"no decode engine is healthy ({'; '.join(found)}): start one, or see its log"


def _no_metrics() -> Answer:
    """If the path was passed on, any of the engines would answer."""
    text = "metrics are at the status URL that `dynamo-lite ps` shows, and at each engine"
    return error(404, "NotFoundError", text)

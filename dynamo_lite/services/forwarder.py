"""The Forwarder: an HTTP server in front of stock engines, which know nothing of dynamo-lite."""

import random
import ssl
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.forward.discovery import Discovery, Trust, unused_by_reason
from dynamo_lite.forward.engine_tls import check_trust
from dynamo_lite.forward.engines import KnownEngines
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.http import ForwardServer
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.placing import Placer, Places
from dynamo_lite.forward.protocols.base import SGLANG_GENERATE, VLLM_ROUTES
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.policy.routing.forwarding import SentPrompts
from dynamo_lite.protocol import names
from dynamo_lite.runtime.address import advertised_address, host_port
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.listening import bind
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.tls import server_context
from dynamo_lite.services.forward_kv import EngineKv, counts, kv_events


class Forwarder:
    """The component. config: the fields of `ForwarderConfig`."""

    def __init__(self, config: Mapping[str, Any] | ForwarderConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, ForwarderConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._protocol = PROTOCOLS[self._config.protocol]
        self._engines = KnownEngines(self._config.engines, self._protocol)
        self._forwarding: Forwarding | None = None
        self._server: ForwardServer | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Serves HTTP without waiting for engines: 503 until one of them is healthy."""
        config, enter = self._config, self._stack.enter_async_context
        sock = bind(config.host, config.port, shared=self._spec.instances > 1)
        self._stack.callback(sock.close)
        port = sock.getsockname()[1]
        upstream = await enter(
            Upstream(connect_s=config.connect_timeout_s, idle_s=config.idle_timeout_s)
        )
        sent = SentPrompts(config.routing.max_index_blocks)
        monitor = await enter(EngineMonitor(self._engines, upstream, config, sent))
        kv = await enter(kv_events(self._engines, upstream, config, host.registry))
        placer = Placer(
            self._engines,
            self._protocol,
            config,
            sent,
            uniform=random.Random().random,
            known=None if kv is None else kv.known,
        )
        if config.discovers and kv is not None:
            await enter(self._discovery(host, monitor, placer, kv))
        self._forwarding = forwarding = await enter(
            Forwarding(
                self._protocol,
                config,
                placer,
                upstream,
                monitor,
                tokens=None if kv is None else kv.tokens,
            )
        )
        host.registry.register(ForwardMetrics(forwarding, placer, self._engines))
        await enter(self._explaining(host, forwarding))
        await host.register("http", stream=advertised_address(config.host, port))
        self._server = server = ForwardServer(
            forwarding,
            config,
            self._protocol.routes | VLLM_ROUTES | {SGLANG_GENERATE},
            sock,
            health=self.health,
            probes=host.probes,
            tls=server_tls(config),
            on_drop=host.drops,
        )
        await server.start()
        self._stack.push_async_callback(server.stop, 0.0)
        return {"url": server_url(config, port)}

    def _discovery(
        self, host: Host, monitor: EngineMonitor, placer: Placer, kv: EngineKv
    ) -> Discovery:
        """Raises ConfigError when the authorities' file cannot be read."""
        config = self._config
        trust = Trust(config.joined_ca_file, config.joined_insecure_skip_verify)
        check_trust(trust.ca_file)
        return Discovery(
            Roster(host.store, names.components_prefix(self._spec.namespace), host.drops),
            self._engines,
            monitor,
            placer,
            kv.follower,
            protocol=self._protocol.name,
            trust=trust,
        )

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
        engines = self._engines.all
        decoding = [engine for engine in engines if engine.decodes and engine.usable]
        prefilling = [engine for engine in engines if engine.can_prefill]
        return {
            "ok": bool(decoding),
            "checks": {"engines": "" if decoding else self._engines_trouble()},
            "without_broker": "Requests are forwarded; `explain` has no answer.",
            "protocol": self._protocol.name,
            "engines": {
                engine.name: {
                    "role": engine.options.role,
                    "trouble": engine.trouble or engine.misfit,
                    **({"lease": engine.lease} if engine.lease else {}),
                }
                for engine in engines
            },
            "unused_engines": [
                {"engine": name, "lease": lease, "role": why.role, "trouble": why.trouble}
                for (name, lease), why in self._engines.unused.items()
            ],
            "prefill_engines": len(prefilling),
            "decode_engines": len(decoding),
            "requests": self._forwarding.stats.in_flight if self._forwarding is not None else 0,
        }

    def _engines_trouble(self) -> str:
        engines = self._engines
        found = [f"{e.name}: {e.trouble}" for e in engines.all if e.decodes]
        found += [f"{name}: {why.trouble}" for (name, _), why in engines.unused.items()]
        if not found and self._config.discovers:
            namespace = self._spec.namespace
            return f"no decode engine has joined {namespace}: start `dynamo-lite join` beside one"
        return f"no decode engine is healthy ({'; '.join(found)}): start one, or see its log"


def server_tls(config: ForwarderConfig) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises ConfigError."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_context(Path(config.tls_cert), Path(config.tls_key))


def server_url(config: ForwarderConfig, port: int) -> str:
    """As a client on this host reaches the server."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    return f"{'https' if config.tls_cert else 'http'}://{host_port(local, port)}"


class ForwardMetrics(Collector):
    """Reads the counts from their owners."""

    def __init__(self, forwarding: Forwarding, placer: Places, engines: KnownEngines):
        self._stats, self._placer, self._engines = forwarding.stats, placer, engines

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        yield counts(
            "dynamo_lite_forward_answers",
            "Answers that were begun: with a prefill leg, without one (and why), passed on",
            ("how", "reason"),
            stats.answered,
        )
        yield counts(
            "dynamo_lite_forward_leg_failures",
            "Legs that failed before the client had a byte",
            ("leg", "kind"),
            stats.failures,
        )
        yield counts(
            "dynamo_lite_forward_choices",
            "Engines that were chosen, by leg and reason",
            ("leg", "reason"),
            self._placer.choices,
        )
        yield counts(
            "dynamo_lite_forward_refused",
            "Requests that got an error because no engine answered them",
            ("status",),
            {(str(status),): count for status, count in stats.refused.items()},
        )
        yield CounterMetricFamily(
            "dynamo_lite_forward_broken", "Answers that broke off", value=stats.broken
        )
        yield CounterMetricFamily(
            "dynamo_lite_forward_clients_gone",
            "Clients that disconnected before the end of their answer",
            value=stats.gone,
        )
        yield CounterMetricFamily(
            "dynamo_lite_forward_removed_fields",
            "Fields of clients' bodies that only a forwarder may set",
            value=stats.removed_fields,
        )
        yield GaugeMetricFamily(
            "dynamo_lite_forward_requests", "Requests in flight", value=stats.in_flight
        )
        yield self._per_engine(
            "dynamo_lite_forward_engine_usable",
            "1 while the engine gets legs",
            {engine.number: float(engine.usable) for engine in self._engines.all},
        )
        yield self._per_engine(
            "dynamo_lite_forward_engine_legs",
            "Legs of this process at the engine",
            {engine.number: float(engine.legs) for engine in self._engines.all},
        )
        unused = GaugeMetricFamily(
            "dynamo_lite_forward_unused_engines",
            "Engines that are known and not used, by reason",
            labels=["reason"],
        )
        for reason, count in unused_by_reason(self._engines).items():
            unused.add_metric([reason], count)
        yield unused

    def _per_engine(self, name: str, text: str, values: Mapping[int, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["engine", "role"])
        for engine in self._engines.all:
            family.add_metric([engine.name, engine.options.role], values[engine.number])
        return family

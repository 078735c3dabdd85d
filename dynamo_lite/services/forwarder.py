"""The Forwarder: an HTTP server in front of stock engines, which know nothing of dynamo-lite."""

import random
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_lite.forward.engines import Engines
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.http import ForwardServer
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.placing import Placer
from dynamo_lite.forward.protocols.base import SGLANG_GENERATE, VLLM_ROUTES
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.policy.forwarding import SentPrompts
from dynamo_lite.runtime.address import advertised_address, host_port
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.status import bind


class Forwarder:
    """The component. config: the fields of `ForwarderConfig`."""

    def __init__(self, config: Mapping[str, Any] | ForwarderConfig, spec: ProcessSpec):
        self._config = msgspec.convert(config, ForwarderConfig)
        self._spec = spec
        self._stack = AsyncExitStack()
        self._protocol = PROTOCOLS[self._config.protocol]
        self._engines = Engines(self._config.engines, self._protocol)
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
        placer = Placer(self._engines, self._protocol, config, sent, uniform=random.Random().random)
        self._forwarding = forwarding = await enter(
            Forwarding(self._protocol, config, placer, upstream, monitor)
        )
        host.registry.register(ForwardMetrics(forwarding, placer, self._engines))
        await host.register("http", stream=advertised_address(config.host, port))
        self._server = server = ForwardServer(
            forwarding,
            config,
            self._protocol.routes | VLLM_ROUTES | {SGLANG_GENERATE},
            sock,
            health=self.health,
            probes=host.probes,
        )
        await server.start()
        self._stack.push_async_callback(server.stop, 0.0)
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
        return {"url": f"http://{host_port(local, port)}"}

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
            "protocol": self._protocol.name,
            "engines": {
                engine.name: {"role": engine.options.role, "trouble": engine.trouble}
                for engine in engines
            },
            "prefill_engines": len(prefilling),
            "decode_engines": len(decoding),
            "requests": self._forwarding.stats.in_flight if self._forwarding is not None else 0,
        }

    def _engines_trouble(self) -> str:
        found = [f"{e.name}: {e.trouble}" for e in self._engines.all if e.decodes]
        return f"no decode engine is healthy ({'; '.join(found)}): start one, or see its log"


class ForwardMetrics(Collector):
    """Reads the counts from their owners."""

    def __init__(self, forwarding: Forwarding, placer: Placer, engines: Engines):
        self._stats, self._placer, self._engines = forwarding.stats, placer, engines

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        yield _counts(
            "dynamo_lite_forward_answers",
            "Answers that were begun: with a prefill leg, without one (and why), passed on",
            ("how", "reason"),
            stats.answered,
        )
        yield _counts(
            "dynamo_lite_forward_leg_failures",
            "Legs that failed before the client had a byte",
            ("leg", "kind"),
            stats.failures,
        )
        yield _counts(
            "dynamo_lite_forward_choices",
            "Engines that were chosen, by leg and reason",
            ("leg", "reason"),
            self._placer.choices,
        )
        yield _counts(
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

    def _per_engine(self, name: str, text: str, values: Mapping[int, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["engine", "role"])
        for engine in self._engines.all:
            family.add_metric([engine.name, engine.options.role], values[engine.number])
        return family


def _counts(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for value, count in values.items():
        family.add_metric(list(value), count)
    return family

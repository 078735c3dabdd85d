"""The Forwarder: an HTTP server in front of stock engines, which know nothing of dynamo-lite."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.client import Answer, error
from dynamo_lite.forward.engines import trust
from dynamo_lite.forward.http import ForwardServer, Reply, reply
from dynamo_lite.forward.metrics import ForwardMetrics
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.protocol import names
from dynamo_lite.protocol.forwarding import JOINED_AS
from dynamo_lite.protocol.records import EndpointRecord, StockEngine
from dynamo_lite.runtime.address import advertised_address, host_port
from dynamo_lite.runtime.drops import counted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host

logger = logging.getLogger(__name__)

_NO_METRICS = "metrics are at the status URL that `dynamo-lite ps` shows, and at each engine"


def sort_out(
    records: Iterable[EndpointRecord], listed: Collection[str], config: ForwarderConfig
) -> tuple[dict[str, tuple[EngineOptions, EndpointRecord]], dict[str, str]]:
    """Which joined engines may be used, by name, and why others may not, by lease.

    listed: names of the engines of the configuration.
    """
    usable: dict[str, tuple[EngineOptions, EndpointRecord]] = {}
    unused: dict[str, str] = {}
    taken = {name: "in this Forwarder's configuration" for name in listed}
    for record in sorted(records, key=lambda r: (r.started_at, r.lease_id)):
        if (engine := record.engine) is None:
            continue
        lease = f"{record.lease_id:x}"
        try:
            options = _options(record.component, engine, config)
            name = host_port(*options.address)
            if name in taken:
                raise ValueError(f"it is already known {taken[name]}: join or list an engine once")
        except ValueError as exc:
            unused[lease] = f"{engine.url} ({engine.role}): {exc}"
            continue
        taken[name] = f"by lease {lease}"
        usable[name] = options, record
    return usable, unused


def _options(component: str, engine: StockEngine, config: ForwarderConfig) -> EngineOptions:
    """Raises ValueError."""
    if engine.protocol != config.protocol:
        raise ValueError(f"it speaks {engine.protocol}, and this Forwarder {config.protocol}")
    if component != JOINED_AS.get(engine.role, component):
        raise ValueError(f"a {component} may not register it: it would get prompts")
    ca_file = config.joined_ca_file if engine.url.startswith("https://") else None
    given = {**msgspec.structs.asdict(engine), "ca_file": ca_file}
    options = msgspec.convert(given, EngineOptions)
    options.transfer_address(config.protocol)
    return options


def discover(roster: Roster, parts: ForwardParts) -> None:
    """Follows the engines that have joined: their records. roster: entered."""
    engines = parts.engines
    listed = tuple(engine.name for engine in engines.all)

    def update(*_: object) -> None:
        usable, unused = sort_out(roster.members, listed, parts.config)
        joined = {engine.name: engine for engine in engines.all if engine.lease}
        for name, engine in list(joined.items()):
            options, record = usable.get(name, (None, None))
            if record is None or (options, record.model) != (engine.options, engine.model):
                logger.info("engine %s (%s) has left", name, engine.options.role)
                engines.remove(joined.pop(name))
        for name, (options, record) in usable.items():
            lease = f"{record.lease_id:x}"
            if name not in joined:
                joined[name] = engines.add(options, lease=lease, model=record.model)
                logger.info("engine %s (%s) has joined, lease %s", name, options.role, lease)
                engines.follow(joined[name])
            # Another `join` process may represent the engine now, because the earlier process was
            # killed.
            joined[name].lease = lease
        for lease, why in unused.items():
            if engines.unused.get(lease) != why:  # each reason is logged once
                logger.error("an engine that has joined by lease %s is not used: %s", lease, why)
        engines.unused = unused

    roster.on_change(update)
    update()


class Forwarder:
    """The component. config: the fields of `ForwarderConfig`."""

    def __init__(self, config: Mapping[str, Any] | ForwarderConfig):
        self._config = msgspec.convert(config, ForwarderConfig)
        self._parts = ForwardParts(self._config)
        self._server: ForwardServer | None = None

    async def start(self, host: Host) -> dict[str, Any]:
        """Serves HTTP without waiting for engines: 503 until one of them is healthy."""
        self._host = host
        config, parts, enter = self._config, self._parts, host.stack.enter_async_context
        await enter(parts)
        if config.discovers:
            trust(config.joined_ca_file)  # a mistake in it ends the start
            prefix = names.components_prefix(host.spec.namespace)
            roster = await enter(Roster(host.store, prefix, host.drops))
            discover(roster, parts)
        host.registry.register(ForwardMetrics(parts.stats, parts.placer, parts.engines))
        subject = names.forward_explain_subject(host.spec.namespace, host.lease.id)

        async def explain(payload: bytes) -> bytes:
            return parts.decisions.answer(payload, host.lease.id)

        await enter(host.messaging.serve(subject, counted(explain, "explain", host.drops)))
        pages = {"/health": self.health, **host.probes}
        own: dict[str, Reply] = {path: partial(_for_clients, page) for path, page in pages.items()}
        # If the path was passed on, any of the engines would answer.
        own["/metrics"] = lambda: error(404, "NotFoundError", _NO_METRICS)
        shared = host.spec.instances > 1
        server = ForwardServer(parts, own, shared=shared, on_drop=host.drops)
        self._server = await enter(server)
        await host.register("http", stream=advertised_address(config.host, server.port))
        return {"url": server.url}

    async def drain(self, grace_s: float) -> None:
        """Accepts no new connections. Open answers may finish within `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def health(self) -> dict[str, Any]:
        engines, facts = self._parts.engines, self._parts.facts()
        return facts | {
            "checks": {"engines": "" if facts["ok"] else self._engines_trouble()},
            "without_broker": "Requests are forwarded; `explain` has no answer.",
            "unused_engines": engines.unused,
            "prefill_engines": sum(engine.can_prefill for engine in engines.all),
            "decode_engines": sum(engine.decodes and engine.usable for engine in engines.all),
        }

    def _engines_trouble(self) -> str:
        engines = self._parts.engines
        found = [f"{e.name}: {e.trouble}" for e in engines.all if e.decodes]
        found += engines.unused.values()
        if not found and self._config.discovers:
            where = self._host.spec.namespace
            return f"no decode engine has joined {where}: start `dynamo-lite join` beside one"
        return f"no decode engine is healthy ({'; '.join(found)}): start one, or see its log"


def _for_clients(read: Callable[[], Mapping[str, Any]]) -> Answer:
    """Without texts, which name engines' addresses: the status server has these."""
    return reply({key: value for key, value in read().items() if isinstance(value, int)})

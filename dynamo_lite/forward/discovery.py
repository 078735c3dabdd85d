"""Follows the engines that have joined: their records in the store."""

import logging
from collections.abc import Collection, Iterable

import msgspec

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.engines import KnownEngine, Unused
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.protocol.records import EndpointRecord, StockEngine
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.members.roster import Roster

logger = logging.getLogger(__name__)

#: Name (HOST:PORT, or the URL if it is malformed) and lease of a joined engine.
UnusedKey = tuple[str, str]


def sort_out(
    records: Iterable[EndpointRecord], listed: Collection[str], config: ForwarderConfig
) -> tuple[dict[str, tuple[EngineOptions, EndpointRecord]], dict[UnusedKey, Unused]]:
    """Which joined engines may be used, by name, and why others may not.

    listed: names of the engines of the configuration.
    """
    usable: dict[str, tuple[EngineOptions, EndpointRecord]] = {}
    unused: dict[UnusedKey, Unused] = {}
    taken = {name: "in this Forwarder's configuration" for name in listed}
    for record in sorted(records, key=lambda r: (r.started_at, r.lease_id)):
        if (engine := record.engine) is None:
            continue
        lease = f"{record.lease_id:x}"
        if engine.protocol != config.protocol:
            trouble = f"it speaks {engine.protocol}, and this Forwarder {config.protocol}"
            unused[engine.url, lease] = Unused(engine.role, "protocol", trouble)
            continue
        try:
            options = _options(engine, config)
        except ValueError as exc:
            unused[engine.url, lease] = Unused(engine.role, "options", str(exc))
            continue
        name = host_port(*options.address)
        if name in taken:
            trouble = f"it is already known {taken[name]}: join or list an engine once"
            unused[name, lease] = Unused(options.role, "twice", trouble)
            continue
        taken[name] = f"by lease {lease}"
        usable[name] = options, record
    return usable, unused


def _options(engine: StockEngine, config: ForwarderConfig) -> EngineOptions:
    """Raises ValueError."""
    ca_file = config.joined_ca_file if engine.url.startswith("https://") else None
    given = {**msgspec.structs.asdict(engine), "ca_file": ca_file}
    options = msgspec.convert(given, EngineOptions)
    options.transfer_address(config.protocol)
    return options


class Discovery:
    """roster: entered; it calls this for each change."""

    def __init__(self, roster: Roster, parts: ForwardParts):
        self._roster, self._parts, self._engines = roster, parts, parts.engines
        self._listed = tuple(engine.name for engine in parts.engines.all)
        self._joined: dict[str, KnownEngine] = {}
        roster.on_change(lambda *_: self._update())
        self._update()

    def _update(self) -> None:
        engines = self._engines
        usable, unused = sort_out(self._roster.members, self._listed, self._parts.config)
        for name, engine in list(self._joined.items()):
            options, record = usable.get(name, (None, None))
            if record is None or (options, record.model) != (engine.options, engine.model):
                logger.info("engine %s (%s) has left", name, engine.options.role)
                engines.remove(self._joined.pop(name))
        for name, (options, record) in usable.items():
            lease = f"{record.lease_id:x}"
            if name not in self._joined:
                engine = engines.add(options, lease=lease, model=record.model)
                logger.info("engine %s (%s) has joined, lease %s", name, options.role, lease)
                self._joined[name] = engine
                engines.follow(engine)
            # Another `join` process may represent the engine now, because the earlier process was
            # killed.
            self._joined[name].lease = lease
        for key, why in unused.items():
            if engines.unused.get(key) != why:  # each reason is logged once
                logger.error("engine %s (lease %s) is not used: %s", *key, why.trouble)
        engines.unused = unused

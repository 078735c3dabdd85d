"""Follows the engines that have joined: their records in the store."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec

from dynamo_lite.forward.attempt import ForwardParts
from dynamo_lite.forward.engines import KnownEngine, Unused
from dynamo_lite.forward.options import EngineOptions, ForwarderConfig
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.members.roster import Roster

logger = logging.getLogger(__name__)

#: Name (HOST:PORT, or the URL if it is malformed) and lease of a joined engine.
UnusedKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Joined:
    """The record of a joined engine. lease: hexadecimal."""

    options: EngineOptions
    model: str
    lease: str


def sort_out(
    records: Iterable[EndpointRecord], listed: Collection[str], config: ForwarderConfig
) -> tuple[dict[str, Joined], dict[UnusedKey, Unused]]:
    """Which joined engines may be used, by name, and why others may not.

    listed: names of the engines of the configuration.
    """
    usable: dict[str, Joined] = {}
    unused: dict[UnusedKey, Unused] = {}
    taken = {name: "in this Forwarder's configuration" for name in listed}
    for record in sorted(records, key=lambda r: (r.started_at, r.lease_id)):
        if record.engine is None:
            continue
        lease = f"{record.lease_id:x}"
        options = _options(record, config)
        if isinstance(options, Unused):
            unused[record.engine.url, lease] = options
            continue
        name = host_port(*options.address)
        if name in taken:
            trouble = f"it is already known {taken[name]}: join or list an engine once"
            unused[name, lease] = Unused(options.role, "twice", trouble)
            continue
        taken[name] = f"by lease {lease}"
        usable[name] = Joined(options, record.model, lease)
    return usable, unused


def _options(record: EndpointRecord, config: ForwarderConfig) -> EngineOptions | Unused:
    engine, protocol = record.engine, config.protocol
    assert engine is not None
    if engine.protocol != protocol:
        trouble = f"it speaks {engine.protocol}, and this Forwarder {protocol}"
        return Unused(engine.role, "protocol", trouble)
    given = msgspec.structs.asdict(engine)
    del given["protocol"]
    if engine.url.startswith("https://"):
        given["ca_file"] = config.joined_ca_file
    try:
        options = msgspec.convert(given, EngineOptions)
        options.transfer_address(protocol)
    except ValueError as exc:
        return Unused(engine.role, "options", str(exc))
    return options


class Discovery:
    """roster: entered; it calls this for each change."""

    def __init__(self, roster: Roster, parts: ForwardParts):
        self._roster, self._engines, self._config = roster, parts.engines, parts.config
        self._monitor, self._placer = parts.monitor, parts.placer
        self._listed = tuple(engine.name for engine in parts.engines.all)
        self._joined: dict[str, KnownEngine] = {}
        roster.on_change(lambda *_: self._update())
        self._update()

    def _update(self) -> None:
        usable, unused = sort_out(self._roster.members, self._listed, self._config)
        for name, engine in list(self._joined.items()):
            record = usable.get(name)
            if record is None or (record.options, record.model) != (engine.options, engine.model):
                self._remove(self._joined.pop(name))
        for name, record in usable.items():
            if name in self._joined:
                # Another `join` process may represent the engine now, because the earlier process
                # was killed.
                self._joined[name].lease = record.lease
            else:
                self._joined[name] = self._add(record)
        for key, why in unused.items():
            if self._engines.unused.get(key) != why:  # each reason is logged once
                logger.error("engine %s (lease %s) is not used: %s", *key, why.trouble)
        self._engines.unused = unused

    def _add(self, record: Joined) -> KnownEngine:
        engine = self._engines.add(record.options, lease=record.lease, model=record.model)
        logger.info(
            "engine %s (%s) has joined, lease %s", engine.name, engine.options.role, record.lease
        )
        self._monitor.follow(engine)
        return engine

    def _remove(self, engine: KnownEngine) -> None:
        logger.info("engine %s (%s) has left", engine.name, engine.options.role)
        self._engines.remove(engine)
        self._placer.forget(engine)
        self._monitor.compare()

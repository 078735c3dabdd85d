"""Follows the engines that have joined: their records in the store."""

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Protocol, Self, get_args

import msgspec

from dynamo_lite.forward.engines import KnownEngine, KnownEngines, Unused
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.options import EngineOptions, EngineRole
from dynamo_lite.forward.placing import Placer
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.members.roster import Roster

logger = logging.getLogger(__name__)

ROLES: tuple[str, ...] = get_args(EngineRole)

#: Name (HOST:PORT, or the URL if it is malformed) and lease of a joined engine.
UnusedKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Joined:
    """The record of a joined engine. lease: hexadecimal."""

    options: EngineOptions
    model: str
    lease: str


@dataclass(frozen=True, slots=True)
class Sorted:
    """Joined engines, as a Forwarder sees them."""

    #: By name.
    usable: dict[str, Joined]
    unused: dict[UnusedKey, Unused]


@dataclass(frozen=True, slots=True)
class Trust:
    """How certificates of joined engines are checked; see `EngineOptions`."""

    ca_file: str | None = None
    insecure_skip_verify: bool = False


class FollowsKv(Protocol):
    """Follows the KV events of engines."""

    def follow(self, engine: KnownEngine) -> None: ...

    def leave(self, engine: KnownEngine) -> None: ...


def sort_out(
    records: Iterable[EndpointRecord],
    *,
    protocol: str,
    listed: Collection[str],
    trust: Trust = Trust(),
) -> Sorted:
    """Which joined engines may be used, and why others may not.

    listed: names of the engines of the configuration.
    """
    usable: dict[str, Joined] = {}
    unused: dict[UnusedKey, Unused] = {}
    taken = {name: "in this Forwarder's configuration" for name in listed}
    for record in sorted(records, key=lambda r: (r.started_at, r.lease_id)):
        if record.engine is None:
            continue
        lease = f"{record.lease_id:x}"
        options = _options(record, protocol, trust)
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
    return Sorted(usable, unused)


def _options(record: EndpointRecord, protocol: str, trust: Trust) -> EngineOptions | Unused:
    engine = record.engine
    assert engine is not None
    if engine.protocol != protocol:
        trouble = f"it speaks {engine.protocol}, and this Forwarder {protocol}"
        return Unused(engine.role, "protocol", trouble)
    if engine.role not in ROLES:
        trouble = f"its role {engine.role!r} is unknown here; known: {', '.join(ROLES)}"
        return Unused(engine.role, "role", trouble)
    given = msgspec.structs.asdict(engine)
    del given["protocol"]
    if engine.url.startswith("https://"):
        given |= asdict(trust)
    try:
        options = EngineOptions(**given)
        options.transfer_address(protocol)
    except ValueError as exc:
        return Unused(engine.role, "address", str(exc))
    return options


class Discovery:
    """Async context manager; entering it waits for the first list of members.

    Raises StoreUnavailable without one.
    """

    def __init__(
        self,
        roster: Roster,
        engines: KnownEngines,
        monitor: EngineMonitor,
        placer: Placer,
        kv: FollowsKv,
        *,
        protocol: str,
        trust: Trust,
    ):
        self._roster, self._engines, self._kv = roster, engines, kv
        self._monitor, self._placer, self._protocol = monitor, placer, protocol
        self._trust = trust
        self._listed = tuple(engine.name for engine in engines.all)
        self._joined: dict[str, KnownEngine] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._roster)
        self._roster.on_change(lambda *_: self._update())
        self._update()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _update(self) -> None:
        found = sort_out(
            self._roster.members, protocol=self._protocol, listed=self._listed, trust=self._trust
        )
        for name, engine in list(self._joined.items()):
            record = found.usable.get(name)
            if record is None or (record.options, record.model) != (engine.options, engine.model):
                self._remove(self._joined.pop(name))
        for name, record in found.usable.items():
            if name in self._joined:
                # Another `join` process may represent the engine now, because the earlier process
                # was killed.
                self._joined[name].lease = record.lease
            else:
                self._joined[name] = self._add(record)
        self._engines.unused = self._note(found.unused)

    def _add(self, record: Joined) -> KnownEngine:
        engine = self._engines.add(record.options, lease=record.lease, model=record.model)
        logger.info(
            "engine %s (%s) has joined, lease %s", engine.name, engine.options.role, record.lease
        )
        self._monitor.follow(engine)
        self._kv.follow(engine)
        return engine

    def _remove(self, engine: KnownEngine) -> None:
        logger.info("engine %s (%s) has left", engine.name, engine.options.role)
        self._engines.remove(engine)
        self._placer.forget(engine)
        self._kv.leave(engine)
        self._monitor.compare()

    def _note(self, unused: dict[UnusedKey, Unused]) -> dict[UnusedKey, Unused]:
        """Logs each reason once."""
        for key, why in unused.items():
            if self._engines.unused.get(key) != why:
                logger.error("engine %s (lease %s) is not used: %s", *key, why.trouble)
        return unused


def unused_by_reason(engines: KnownEngines) -> Counter[str]:
    """Number of known engines that are not used, although they may be healthy."""
    counted = Counter(why.reason for why in engines.unused.values())
    counted["model"] = sum(engine.healthy and bool(engine.trouble) for engine in engines.all)
    return counted

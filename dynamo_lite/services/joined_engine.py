"""`dynamo-lite join`: the process beside a stock engine that registers it, and drains it.

The engine knows nothing of it. Its record is there while the engine is healthy.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from dynamo_lite.forward.engines import KnownEngine, StockEngineLoad
from dynamo_lite.forward.options import EngineOptions, EngineRole, ProtocolName
from dynamo_lite.forward.probe import StockEngineProbe
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import LegFailed, Upstream
from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.protocol.records import StockEngine
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.store import LeaseLoss

logger = logging.getLogger(__name__)

#: Component of the record, by role.
COMPONENTS: Mapping[EngineRole, str] = {
    "prefill": "PrefillEngine",
    "decode": "DecodeEngine",
    "prefill-decode": "Engine",
}
ROLES: tuple[EngineRole, ...] = get_args(EngineRole)

_CONNECT_S = 2.0
#: Between two readings of the engine's metrics, for displays.
_LOAD_INTERVAL_S = 2.0
#: How long an engine must stay idle during a drain. A Forwarder may have sent a leg just before it
#: saw that the record is gone. The other engine may still read the KV of a prefill leg that has
#: ended.
_DRAIN_INTERVAL_S = 0.25
_IDLE_READINGS = 5


@dataclass(frozen=True, kw_only=True)
class JoinOptions(EngineOptions):
    """How `dynamo-lite join` describes the engine."""

    protocol: ProtocolName
    #: Name of the model, for engines whose `/v1/models` requires a key; empty: the name listed
    #: there.
    model: str = ""
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        super().__post_init__()
        self.transfer_address(self.protocol)

    @property
    def record(self) -> StockEngine:
        return StockEngine(
            url=self.url,
            role=self.role,
            protocol=self.protocol,
            transfer_host=self.transfer_host,
            transfer_port=self.transfer_port,
            notify_port=self.notify_port,
            kv_events=self.kv_events,
            kv_replay=self.kv_replay,
        )


class JoinedEngine:
    """The component. config: the fields of `JoinOptions`."""

    def __init__(self, config: Mapping[str, Any] | JoinOptions, spec: ProcessSpec):
        self._options = options = msgspec.convert(config, JoinOptions)
        self._spec = spec
        self._engine = KnownEngine(
            0, options, PROTOCOLS[options.protocol], lease="", model=options.model
        )
        self._stack = AsyncExitStack()
        self._probe: StockEngineProbe | None = None
        self._load: StockEngineLoad | None = None
        self._host: Host | None = None
        #: Whether the record is in the store; None: a call has failed, so it may be there or not.
        self._registered: bool | None = False
        self._draining = False

    async def start(self, host: Host) -> dict[str, Any]:
        """Returns when the engine is healthy and registered."""
        self._host = host
        upstream = await self._stack.enter_async_context(
            Upstream(connect_s=_CONNECT_S, idle_s=self._options.health_timeout_s)
        )
        self._probe = StockEngineProbe(upstream, within_s=self._options.health_timeout_s)
        told = ""
        while not await self._check():
            if told != self._engine.trouble:
                told = self._engine.trouble
                host.progress(f"waiting for {self._options.url}: {told}")
            await asyncio.sleep(self._options.health_interval_s)
        await self._register()
        host.spawn(self._follow(), "engine health")
        host.spawn(self._follow_load(), "engine load")
        return {"engine": self._options.url, "model": self._model}

    async def drain(self, grace_s: float) -> None:
        """The record is gone already: waits until the engine is idle."""
        assert self._host is not None
        self._draining = True
        # A registration may have been under way when the stop came, or still be.
        await self._host.deregister()
        if self._host.lease.loss is LeaseLoss.EXPIRED:
            return  # no drain was asked for: the engine is registered again
        try:
            async with asyncio.timeout(grace_s):
                await self._until_idle()
        except TimeoutError:
            left = "an unknown number of" if self._load is None else str(self._load.requests)
            logger.warning("the engine has %s requests after %g s", left, grace_s)

    async def close(self) -> None:
        await self._stack.aclose()

    def health(self) -> dict[str, Any]:
        engine, load = self._engine, self._load
        facts: dict[str, Any] = {
            "ok": self._registered is True,
            "checks": {"engine": "" if engine.healthy else engine.trouble},
            "engine": self._options.url,
            "role": self._options.role,
            "protocol": self._options.protocol,
            "model": self._model,
        }
        if load is not None:
            facts |= {
                "running": load.requests - load.waiting,
                "waiting": load.waiting,
                "kv_usage": load.kv_usage,
            }
        return facts

    async def _check(self) -> bool:
        """Whether the engine is healthy."""
        assert self._probe is not None
        engine = self._engine
        try:
            await self._probe.check(engine)
        except LegFailed as exc:
            if engine.failed(str(exc), at_once=exc.kind == "refused"):
                logger.warning("%s is unhealthy", exc)
            elif not engine.healthy:
                engine.trouble = str(exc)
        else:
            if engine.passed():
                logger.info("engine %s is healthy", engine.name)
        return engine.healthy

    async def _follow(self) -> None:
        """Registers the engine when it becomes healthy, and deregisters it when it no longer is."""
        while not self._draining:
            await asyncio.sleep(self._options.health_interval_s)
            healthy = await self._check()
            if self._draining:
                return
            try:
                if healthy and not self._registered:
                    await self._register()
                    if self._draining:
                        await self._deregister()
                elif not healthy and self._registered is not False:
                    await self._deregister()
            except StoreUnavailable as exc:
                logger.warning("the engine cannot be registered now, retrying: %s", exc)

    @property
    def _model(self) -> str:
        return next(iter(self._engine.models), "")

    async def _register(self) -> None:
        assert self._host is not None
        self._registered = None
        await self._host.register(
            "http", stream=self._engine.name, model=self._model, engine=self._options.record
        )
        self._registered = True

    async def _deregister(self) -> None:
        assert self._host is not None
        self._registered = None
        if await self._host.deregister():
            self._registered = False

    async def _follow_load(self) -> None:
        while not self._draining:
            await self._read_load()
            await asyncio.sleep(_LOAD_INTERVAL_S)

    async def _read_load(self) -> bool:
        """Returns whether the engine could be asked."""
        assert self._probe is not None
        try:
            self._load = await self._probe.load(self._engine)
        except LegFailed as exc:
            logger.debug("no load: %s", exc)
            self._load = None
            return exc.kind != "refused"
        return True

    async def _until_idle(self) -> None:
        """An engine that refuses connections has ended."""
        idle = 0
        while idle < _IDLE_READINGS:
            if not await self._read_load():
                return
            idle = idle + 1 if self._load is not None and not self._load.requests else 0
            await asyncio.sleep(_DRAIN_INTERVAL_S)

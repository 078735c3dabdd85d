"""`dynamo-lite join`: the process beside a stock engine that registers it, and drains it.

The engine knows nothing of it. Its record is there while the engine is healthy. There is no
supervisor.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_lite.forward.health import CHECK_S, KnownEngines
from dynamo_lite.forward.options import EngineOptions
from dynamo_lite.forward.protocols.registry import PROTOCOLS
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.protocol.errors import StoreUnavailable
from dynamo_lite.protocol.forwarding import ProtocolName
from dynamo_lite.protocol.records import StockEngine
from dynamo_lite.runtime.process.component import Host, ProcessSpec
from dynamo_lite.runtime.process.host import run_process
from dynamo_lite.runtime.process.stop import (
    EXIT_LEASE_EXPIRED,
    EXIT_START_FAILED,
    EXIT_STOPPED,
    StopRequest,
    stop_on_signals,
)
from dynamo_lite.runtime.store import LeaseLoss
from dynamo_lite.runtime.tasks import first_of

logger = logging.getLogger(__name__)

#: How long an engine must stay idle during a drain. A Forwarder may have sent a leg just before it
#: saw that the record is gone. The other engine may still read the KV of a prefill leg that has
#: ended.
_DRAIN_INTERVAL_S = 0.25
_IDLE_READINGS = 5
#: Pause before the next try to get a lease again.
_RESTART_S = 2.0


@dataclass(frozen=True, kw_only=True)
class JoinOptions(EngineOptions):
    """How `dynamo-lite join` describes the engine."""

    protocol: ProtocolName
    #: Name of the model, for engines whose `/v1/models` requires a key.
    model: str = ""
    health_interval_s: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError."""
        super().__post_init__()
        if self.protocol == "neuron-static":
            raise ValueError("the engines of neuron-static are listed; use neuron-dynamic")
        self.transfer_address(self.protocol)


class JoinedEngine:
    """The component."""

    _host: Host

    def __init__(self, options: JoinOptions):
        self._options = options
        self._upstream = Upstream(CHECK_S)
        protocol, every_s = PROTOCOLS[options.protocol], options.health_interval_s
        self._engines = KnownEngines((), protocol, self._upstream, every_s)
        self._engine = self._engines.add(options, model=options.model)
        #: Whether the record is in the store, or will be removed when the store is back.
        self._registered = False
        self._draining = False

    async def start(self, host: Host) -> dict[str, Any]:
        """Returns when the engine is healthy and registered."""
        self._host = host
        host.stack.push_async_callback(self._upstream.aclose)
        told = ""
        while not await self._check():
            if told != self._engine.trouble:
                told = self._engine.trouble
                host.progress(f"waiting for {self._options.url}: {told}")
            await asyncio.sleep(self._options.health_interval_s)
        await self._register()
        host.spawn(self._follow(), "engine health")
        return {"engine": self._options.url, "model": self._model}

    async def drain(self, grace_s: float) -> None:
        """The record is gone already: waits until the engine is idle."""
        self._draining = True
        if self._host.lease.loss is LeaseLoss.EXPIRED:
            return  # no drain was asked for: the engine is registered again
        try:
            async with asyncio.timeout(grace_s):
                await self._until_idle()
        except TimeoutError:
            load = self._engines.load(self._engine.number)
            left = "an unknown number of" if load is None else load.running + load.waiting
            logger.warning("the engine has %s requests after %g s", left, grace_s)

    def health(self) -> dict[str, Any]:
        engine, load = self._engine, self._engines.load(self._engine.number)
        facts: dict[str, Any] = {
            "ok": self._registered,
            "checks": {"engine": "" if engine.healthy else engine.trouble},
            "engine": self._options.url,
            "role": self._options.role,
            "protocol": self._options.protocol,
            "model": self._model,
        }
        if load is not None:
            facts |= {"running": load.running, "waiting": load.waiting, "kv_usage": load.kv_usage}
        return facts

    async def _check(self) -> bool:
        """Whether the engine is healthy. Its load is for displays."""
        await self._engines.check(self._engine)
        await self._engines.read_load(self._engine)
        return self._engine.healthy

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
                elif not healthy:
                    self._registered = False
                    await self._host.deregister()
            except StoreUnavailable as exc:
                logger.warning("the engine cannot be registered now, retrying: %s", exc)
        # The drain may have begun during a registration.
        await self._host.deregister()

    @property
    def _model(self) -> str:
        return next(iter(self._engine.models), "")

    async def _register(self) -> None:
        record = msgspec.convert(self._options, StockEngine, from_attributes=True)
        await self._host.register(
            "http", stream=self._engine.name, model=self._model, engine=record
        )
        self._registered = True

    async def _until_idle(self) -> None:
        """An engine that refuses connections has ended."""
        idle = 0
        while idle < _IDLE_READINGS:
            if not await self._engines.read_load(self._engine):
                return
            load = self._engines.load(self._engine.number)
            idle = idle + 1 if load is not None and not load.running + load.waiting else 0
            await asyncio.sleep(_DRAIN_INTERVAL_S)


async def register(spec: ProcessSpec, options: JoinOptions) -> int:
    """Returns the exit code. After a lease that expired while etcd was out of reach, a new one is
    granted: no other process would register the engine again."""
    expired = False
    while True:
        code = await run_process(spec, JoinedEngine(options), _report)
        expired = expired or code == EXIT_LEASE_EXPIRED
        if not expired or code not in (EXIT_LEASE_EXPIRED, EXIT_START_FAILED):
            return code
        stop = StopRequest()
        with stop_on_signals(stop):
            await first_of(stop.wait(), timeout_s=_RESTART_S)
        if stop.is_set:
            return EXIT_STOPPED


def _report(line: dict[str, Any]) -> None:
    """What is not logged by the process itself."""
    match line:
        case {"state": "starting", "detail": detail}:
            logger.info("%s", detail)
        case {"state": "ready"}:
            print(
                f"joined {line['engine']} model={line['model'] or 'unknown'}"
                f" lease={line['lease']} status={line['status_url']}",
                flush=True,
            )
        case {"state": "failed", "error": error}:
            logger.error("%s", error)

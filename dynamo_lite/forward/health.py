"""Follows the engines: whether they answer, what they serve, and how busy they are."""

import asyncio
import logging
from typing import Self

import msgspec

from dynamo_lite.forward.engines import Engine, Engines, parse_load
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.protocols.mooncake import engine_ids
from dynamo_lite.forward.upstream import LegFailed, Upstream
from dynamo_lite.policy.forwarding import SentPrompts
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class EngineMonitor:
    """Async context manager: checks every engine while it lasts."""

    def __init__(
        self, engines: Engines, upstream: Upstream, config: ForwarderConfig, sent: SentPrompts
    ):
        self._engines, self._upstream, self._config, self._sent = engines, upstream, config, sent
        self._tasks = OwnedTasks()
        #: Of the first decode engine that named any.
        self._models: tuple[str, ...] = ()

    async def __aenter__(self) -> Self:
        weighs = {"least-load", "prefix"} & {
            self._config.prefill_choice,
            self._config.decode_choice,
        }
        for engine in self._engines.all:
            self._tasks.start(self._follow(engine), name=f"health of {engine.name}")
            if weighs:
                self._tasks.start(self._follow_load(engine), name=f"load of {engine.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()

    def lost(self, engine: Engine, failure: LegFailed) -> None:
        """A leg could not be sent: the engine gets nothing until its next check passes.

        A broken connection says nothing about others: an engine may have closed an idle one.
        """
        if failure.kind == "refused" and engine.failed(str(failure), at_once=True):
            logger.warning("%s is unhealthy", failure)
            self._sent.forget(engine.number)

    async def _follow(self, engine: Engine) -> None:
        while True:
            await self.check(engine)
            await asyncio.sleep(self._config.health_interval_s)

    async def check(self, engine: Engine) -> None:
        """One check; what the engine serves is read when it has become healthy."""
        try:
            await self._passes(engine)
            if not engine.healthy:
                await self._read_models(engine)
            if engine.protocol.query_path and engine.prefills:
                # Each time: the ids are new ones after a restart, however short.
                await self._query(engine)
        except LegFailed as exc:
            if engine.failed(str(exc), at_once=exc.kind == "refused"):
                logger.warning("%s is unhealthy", exc)
                self._sent.forget(engine.number)
            elif not engine.healthy:
                engine.trouble = str(exc)
            return
        if engine.passed():
            logger.info("engine %s (%s) is healthy", engine.name, engine.options.role)
            self._compare()

    async def _passes(self, engine: Engine) -> None:
        status, _ = await self._fetch(engine, f"{engine.base}/health")
        if status != 200:
            raise LegFailed(engine.name, "broken", f"/health answered {status}")

    async def _fetch(self, engine: Engine, url: str) -> tuple[int, bytes]:
        return await self._upstream.fetch(engine, url, within_s=self._config.health_timeout_s)

    async def _read_models(self, engine: Engine) -> None:
        """Not known where the engine asks for a key."""
        status, page = await self._fetch(engine, f"{engine.base}/v1/models")
        try:
            found = msgspec.json.decode(page, type=_Models) if status == 200 else _Models([])
        except msgspec.DecodeError:
            found = _Models([])
        engine.models = tuple(model.id for model in found.data)

    async def _query(self, engine: Engine) -> None:
        url = f"http://{host_port(*engine.transfer_address)}{engine.protocol.query_path}"
        status, page = await self._fetch(engine, url)
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            engine.engine_ids = engine_ids(page)
        except ValueError as exc:
            raise LegFailed(engine.name, "broken", f"{url}: {exc}") from exc

    def _compare(self) -> None:
        """An engine of another model than the first one that decodes is not used."""
        serving = [e for e in self._engines.all if e.healthy]
        if not self._models:
            self._models = next((e.models for e in serving if e.decodes and e.models), ())
        for engine in serving:
            engine.trouble = ""
            if self._models and engine.models and not set(engine.models) & set(self._models):
                engine.trouble = (
                    f"it serves {', '.join(engine.models)} and not {', '.join(self._models)}, as"
                    " the first decode engine does: start it with the same model"
                )
                logger.error("engine %s is not used: %s", engine.name, engine.trouble)

    async def _follow_load(self, engine: Engine) -> None:
        while True:
            if engine.healthy:
                try:
                    _, page = await self._fetch(engine, f"{engine.base}/metrics")
                except LegFailed as exc:
                    logger.debug("no load: %s", exc)
                else:
                    load = parse_load(page.decode(errors="replace"))
                    if load is not None:
                        engine.reported(load)
            await asyncio.sleep(self._config.load_interval_s)

"""Follows the engines: whether they answer, what they serve, and how busy they are."""

import asyncio
import logging
from typing import Self

from dynamo_lite.forward.engines import FAILURES, KnownEngine, KnownEngines
from dynamo_lite.forward.options import ForwarderConfig
from dynamo_lite.forward.probe import StockEngineProbe
from dynamo_lite.forward.upstream import LegFailed, Upstream
from dynamo_lite.policy.routing.forwarding import SentPrompts
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: An engine whose server has been silent for the time of this many checks, and does not answer then
#: either, stands still or cannot be reached.
_SILENT_TIMES = 2


class EngineMonitor:
    """Async context manager: checks every engine while it lasts. least_silence_s: shortest silence
    after which an engine's legs are given up. A shorter timeout of checks does not shorten it,
    because an engine that is only busy may be silent for seconds."""

    def __init__(
        self,
        engines: KnownEngines,
        upstream: Upstream,
        config: ForwarderConfig,
        sent: SentPrompts,
        *,
        least_silence_s: float = 10.0,
    ):
        self._engines, self._config, self._sent = engines, config, sent
        self._upstream = upstream
        self._probe = StockEngineProbe(upstream, within_s=config.health_timeout_s)
        self._silence_s = max(least_silence_s, _SILENT_TIMES * config.health_timeout_s)
        self._tasks = OwnedTasks()
        #: Numbers of engines that `look` checks now.
        self._looking: set[int] = set()
        #: Model names of the first decode engine that reported any.
        self._models: tuple[str, ...] = ()

    async def __aenter__(self) -> Self:
        for engine in self._engines.all:
            self.follow(engine)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()

    def follow(self, engine: KnownEngine) -> None:
        """Checks the engine until it has left."""
        weighs = {"least-load", "prefix"} & {
            self._config.prefill_choice,
            self._config.decode_choice,
        }
        self._tasks.start(self._follow(engine), name=f"health of {engine.name}")
        if weighs:
            self._tasks.start(self._follow_load(engine), name=f"load of {engine.name}")

    def lost(self, engine: KnownEngine, failure: LegFailed) -> None:
        """A leg could not be sent: the engine gets no legs until its next check passes.

        A broken connection does not count, because an engine may close an idle connection.
        """
        if failure.kind == "refused" and engine.failed(str(failure), at_once=True):
            logger.warning("%s is unhealthy", failure)
            self._sent.forget(engine.number)

    def look(self, engine: KnownEngine) -> None:
        """Starts a check of an engine that is not followed, if none is under way."""
        if not engine.followed and engine.number not in self._looking:
            self._looking.add(engine.number)
            self._tasks.start(self._look(engine), name=f"check of {engine.name}")

    async def _look(self, engine: KnownEngine) -> None:
        try:
            await self.check(engine)
        finally:
            self._looking.discard(engine.number)

    async def _follow(self, engine: KnownEngine) -> None:
        # An engine that has left may have open legs.
        while not engine.left or engine.legs:
            await self.check(engine)
            await asyncio.sleep(self._config.health_interval_s)

    async def check(self, engine: KnownEngine) -> None:
        """One check; what the engine serves is read when it has become healthy. Legs that wait for
        an engine that is silent are given up."""
        loop = asyncio.get_running_loop()
        try:
            await self._probe.check(engine)
        except LegFailed as exc:
            if exc.answered:
                engine.answered_at = loop.time()
            if engine.failed(str(exc), at_once=exc.kind == "refused"):
                logger.warning("%s is unhealthy", exc)
                self._sent.forget(engine.number)
            elif not engine.healthy:
                engine.trouble = str(exc)
            if not exc.answered:
                await self._end_silent(engine)
            return
        engine.answered_at = loop.time()
        engine.reconsider(loop.time())
        if engine.passed():
            logger.info("engine %s (%s) is healthy", engine.name, engine.options.role)
            self.compare()

    async def _end_silent(self, engine: KnownEngine) -> None:
        """Gives up the legs of which nothing was shown, if nothing at all comes from the engine. An
        engine that computes for long, or whose streams move, may answer checks late and keeps its
        legs."""
        now = asyncio.get_running_loop().time()
        silent_s = now - max(engine.answered_at, self._upstream.heard_at(engine))
        if not engine.legs or engine.failures < FAILURES or silent_s < self._silence_s:
            return
        if await self._probe.answers(engine, within_s=self._silence_s / _SILENT_TIMES):
            engine.answered_at = asyncio.get_running_loop().time()
            return
        if self._upstream.heard_at(engine) > now:
            return
        engine.ends += 1
        if count := self._upstream.give_up(engine, "the engine has fallen silent"):
            logger.warning("engine %s is silent: %d waiting legs are given up", engine.name, count)

    def compare(self) -> None:
        """An engine of another model than the first one that decodes is not used."""
        if not any(set(engine.models) & set(self._models) for engine in self._engines.all):
            self._models = ()  # all engines of that model have left
        serving = [e for e in self._engines.all if e.healthy]
        if not self._models:
            self._models = next((e.models for e in serving if e.decodes and e.models), ())
        for engine in serving:
            known, engine.trouble = engine.trouble, ""
            if self._models and engine.models and not set(engine.models) & set(self._models):
                engine.trouble = (
                    f"it serves {', '.join(engine.models)} and not {', '.join(self._models)}, as"
                    " the first decode engine does: start it with the same model"
                )
            if engine.trouble not in ("", known):
                logger.error("engine %s is not used: %s", engine.name, engine.trouble)

    async def _follow_load(self, engine: KnownEngine) -> None:
        while not engine.left:
            if engine.healthy:
                try:
                    load = await self._probe.load(engine)
                except LegFailed as exc:
                    logger.debug("no load: %s", exc)
                else:
                    if load is not None:
                        engine.reported(load)
            await asyncio.sleep(self._config.load_interval_s)

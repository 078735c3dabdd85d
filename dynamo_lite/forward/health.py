"""The engines behind a Forwarder: whether they answer, what they serve, and how busy they are."""

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence

import msgspec

from dynamo_lite.forward import engines
from dynamo_lite.forward.engines import FAILURES, KnownEngine, parse_load
from dynamo_lite.forward.failures import LegFailed
from dynamo_lite.forward.options import EngineOptions
from dynamo_lite.forward.prompts import BLOCK_BYTES
from dynamo_lite.forward.protocols.base import ForwardProtocol
from dynamo_lite.forward.protocols.mooncake import engine_ids
from dynamo_lite.forward.upstream import Upstream
from dynamo_lite.protocol.kv import Load
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.worker_loads import WorkerLoads
from dynamo_lite.runtime.address import host_port
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Timeout of each question to an engine.
CHECK_S = 5.0
#: How long the model of an engine that does not answer is still that of the others.
_MODEL_KEPT_S = 60.0
#: Most different blocks of prompts that are remembered.
_MAX_INDEX_BLOCKS = 500_000


class KnownEngines:
    """Those of the configuration and those that were added. Its owner calls `end`.

    by_load: whether engines are chosen by their load, which is read only then.
    """

    def __init__(
        self,
        options: Sequence[EngineOptions],
        protocol: ForwardProtocol,
        upstream: Upstream,
        interval_s: float,
        *,
        by_load: bool = True,
    ):
        self.all: tuple[KnownEngine, ...] = ()
        #: Why joined engines are not used, by lease.
        self.unused: dict[str, str] = {}
        #: What each engine was sent, by its number, until it has ended or left.
        self.prompts = KvIndex(BLOCK_BYTES, _MAX_INDEX_BLOCKS)
        #: The legs of this process at each engine, by its number.
        self.loads = WorkerLoads(self, lost_s=math.inf)
        #: Loads that engines have reported, by their numbers.
        self._reports: dict[int, Load | None] = {}
        self.protocol = protocol
        self._upstream, self._interval_s, self._by_load = upstream, interval_s, by_load
        self._numbers = itertools.count()
        self._tasks = OwnedTasks()
        #: Model names of the first decode engine that reported any.
        self._models: tuple[str, ...] = ()
        for one in options:
            self.add(one)

    async def end(self) -> None:
        await self._tasks.end()

    def add(self, options: EngineOptions, *, lease: str = "", model: str = "") -> KnownEngine:
        engine = KnownEngine(next(self._numbers), options, self.protocol, lease=lease, model=model)
        self.all = (*self.all, engine)
        return engine

    def follow(self, engine: KnownEngine) -> None:
        """Checks the engine until it has left."""
        self._tasks.start(self._follow(engine), name=f"health of {engine.name}")

    def remove(self, engine: KnownEngine) -> None:
        """The engine gets no new leg. Its open legs continue."""
        engine.left = True
        engine.checked.set()  # it may never be
        self.all = tuple(one for one in self.all if one is not engine)
        self.prompts.leave(engine.number)
        self._compare()

    def load(self, number: int) -> Load | None:
        """The last report of an engine."""
        return self._reports.get(number)

    def index(self, number: int) -> KvIndex:
        return self.prompts

    async def _follow(self, engine: KnownEngine) -> None:
        loop = asyncio.get_running_loop()
        # An engine that has left may have open legs.
        while not engine.left or engine.on_end:
            # Together: a slow page of metrics must not delay that silence is noticed.
            reads = [self.read_load(engine)] if self._by_load and engine.healthy else []
            try:
                await asyncio.gather(self.check(engine), *reads)
            finally:
                engine.checked.set()
            await asyncio.sleep(self._interval_s)
            if loop.time() > engine.named_until:
                self.remove(engine)
        self._reports.pop(engine.number, None)
        self.loads.left(engine.number)

    async def check(self, engine: KnownEngine) -> None:
        """One check; what the engine serves is read when it has become healthy. Legs that wait for
        an engine that is silent are given up."""
        try:
            await check(self._upstream, engine)
        except LegFailed as exc:
            self.failed(engine, exc)
            await self._end_silent(engine)
        else:
            if engine.passed():
                logger.info("engine %s (%s) is healthy", engine.name, engine.options.role)
            self._compare()

    def failed(self, engine: KnownEngine, failure: LegFailed) -> None:
        """A check has failed, or a connection was refused."""
        if engine.failed(str(failure), at_once=failure.kind == "refused"):
            logger.warning("%s is unhealthy", failure)
            self.prompts.leave(engine.number)
            self._reports.pop(engine.number, None)

    async def _end_silent(self, engine: KnownEngine) -> None:
        """An engine from which nothing at all has come for `SILENCE_S`, and which then does not
        answer within `CHECK_S` either, stands still or cannot be reached: it counts as ended. One
        that computes for long, or whose streams move, may answer checks late."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        silent = now - engine.heard_at >= engines.SILENCE_S
        if not silent or not engine.on_end or engine.failures < FAILURES:
            return
        try:
            # Nothing is computed for a list of models, while `/health` may wait for a computation
            # (SGLang's runs a request). Whatever it says, its server answers.
            await self._upstream.fetch(engine, "/v1/models", within_s=CHECK_S)
        except LegFailed:
            if engine.heard_at <= now:
                engine.ended("it has fallen silent")

    def _compare(self) -> None:
        """An engine of another model than the first one that decodes is not used. That model is
        forgotten when no engine of it has answered for `_MODEL_KEPT_S`, as after a restart of all
        with another one."""
        heard_after = asyncio.get_running_loop().time() - _MODEL_KEPT_S
        known = [one.models for one in self.all if one.healthy or one.heard_at > heard_after]
        if not any(set(models) & set(self._models) for models in known):
            self._models = ()
        serving = [e for e in self.all if e.healthy]
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

    async def read_load(self, engine: KnownEngine) -> bool:
        """Returns whether the engine accepts connections."""
        load, refused = None, False
        try:
            _, page = await self._upstream.fetch(engine, "/metrics", within_s=CHECK_S)
            load = parse_load(page.decode(errors="replace"))
        except LegFailed as exc:
            logger.debug("no load: %s", exc)
            refused = exc.kind == "refused"
        self.reported(engine, load)
        return not refused

    def reported(self, engine: KnownEngine, load: Load | None) -> None:
        """load: None if it is not known now."""
        self._reports[engine.number] = load
        self.loads.reported(engine.number, 0.0)


async def check(upstream: Upstream, engine: KnownEngine) -> None:
    """Returns if the engine is healthy. Its model names are read when it has become healthy.

    Raises LegFailed.
    """
    status, _ = await upstream.fetch(engine, "/health", within_s=CHECK_S)
    if status != 200:
        raise LegFailed(engine, "check", "broken", f"/health answered {status}")
    if not engine.healthy:
        status, page = await upstream.fetch(engine, "/v1/models", within_s=CHECK_S)
        # If the engine requires a key, its record may name the model.
        engine.models = _model_names(page) or ((engine.model,) if engine.model else ())
    path, at = engine.protocol.query_path, (engine.peer.host, engine.peer.port)
    if not path or not engine.prefills:
        return
    # Read each time, because the ids change after every restart.
    status, page = await upstream.fetch(engine, path, within_s=CHECK_S, at=at)
    try:
        engine.has_ids(engine_ids(page))
    except ValueError as exc:
        text = f"{path} at {host_port(*at)} answered {status}: {exc}"
        raise LegFailed(engine, "check", "broken", text) from exc


def _model_names(page: bytes) -> tuple[str, ...]:
    """Of the answer to `/v1/models`; empty for an error."""
    try:
        return tuple(str(model["id"]) for model in msgspec.json.decode(page)["data"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return ()

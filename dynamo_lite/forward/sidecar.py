"""A server beside one decode engine: the client's headers name the prefill engine.

The workflow is the Forwarder's; only the choice of engines differs. A `Door` in front of it checks
the engines that the headers name, and `HeaderPlacer` chooses them.
"""

import asyncio
import dataclasses
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.client import Answer, Client, Incoming, error, send
from dynamo_lite.forward.engines import KnownEngine, KnownEngines
from dynamo_lite.forward.failures import PrefillFailed
from dynamo_lite.forward.named import (
    PREFILLER_HEADER,
    RANK_HEADER,
    AllowedHosts,
    Named,
    NotAllowed,
    accepted,
    parse_host_port,
)
from dynamo_lite.forward.placing import CannotServe, EnginePlacement, Tried, why_alone
from dynamo_lite.forward.protocols.base import ForwardProtocol
from dynamo_lite.forward.sidecar_options import PrefillerOptions
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.policy.routing.forwarding import tokens_of
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.runtime.log_limit import LogLimit
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Most prefill engines that are remembered.
MAX_PREFILLERS = 1024
#: How long an engine that has answered by another protocol gets no leg. It is then asked again,
#: because a sidecar does not check prefill engines and would not notice that it was restarted.
MISFIT_S = 60.0
#: How long an engine that has refused a leg, or did not answer it in time, gets no other one. Each
#: would wait as long in vain, because no check tells that the engine is gone.
AVOIDED_S = 5.0


class Prefillers:
    """The prefill engines that headers have named, by HOST:PORT. `close` ends its checks.

    check: asks an engine for the data that its protocol needs before the first leg. every_s: how
    long the data is valid. first_number: number of the first engine; decode engines have smaller
    numbers.
    """

    def __init__(
        self,
        protocol: ForwardProtocol,
        options: PrefillerOptions,
        check: Callable[[KnownEngine], Awaitable[None]],
        *,
        every_s: float,
        first_number: int,
    ):
        self._protocol, self._options = protocol, options
        self._check, self._every_s = check, every_s
        self._number = first_number
        self._engines: OrderedDict[str, KnownEngine] = OrderedDict()
        self._checked: dict[int, float] = {}
        self._checks: dict[int, asyncio.Task[None]] = {}
        #: When an engine that does not fit was last asked, by its number.
        self._misfits: dict[int, float] = {}
        #: Since when an engine gets no leg after a failure, by its number.
        self._avoided: dict[int, float] = {}
        self._tasks = OwnedTasks()

    async def close(self) -> None:
        await self._tasks.end()

    def get(self, name: str) -> KnownEngine:
        """When there are too many engines, the one named longest ago is forgotten."""
        engine = self._engines.get(name)
        if engine is None:
            options = self._options.engine(name)
            engine = KnownEngine(self._number, options, self._protocol, followed=False)
            self._number += 1
            self._engines[name] = engine
            if len(self._engines) > MAX_PREFILLERS:
                _, oldest = self._engines.popitem(last=False)
                self._checked.pop(oldest.number, None)
                self._misfits.pop(oldest.number, None)
                self._avoided.pop(oldest.number, None)
        self._engines.move_to_end(name)
        return engine

    @property
    def misfits(self) -> dict[str, str]:
        """Why engines get no legs, by their names."""
        return {name: engine.misfit for name, engine in self._engines.items() if engine.misfit}

    def may_ask(self, engine: KnownEngine) -> bool:
        """Whether it may get a leg: it speaks this protocol, or it is time to ask again."""
        if not engine.misfit:
            self._misfits.pop(engine.number, None)
            return True
        now = asyncio.get_running_loop().time()
        return now - self._misfits.setdefault(engine.number, now) >= MISFIT_S

    def avoids(self, engine: KnownEngine) -> bool:
        since = self._avoided.get(engine.number)
        return since is not None and asyncio.get_running_loop().time() - since < AVOIDED_S

    def avoid(self, engine: KnownEngine) -> None:
        """The engine has refused a leg, or was late."""
        self._avoided[engine.number] = asyncio.get_running_loop().time()

    def answered(self, engine: KnownEngine) -> None:
        self._avoided.pop(engine.number, None)

    def asked(self, engine: KnownEngine) -> None:
        """The engine gets a leg. After a failure, other requests go on without it meanwhile."""
        if engine.number in self._avoided:
            self.avoid(engine)
        if engine.misfit:
            self._misfits[engine.number] = asyncio.get_running_loop().time()

    async def prepare(self, name: str) -> None:
        """Returns when the engine was asked for its ids lately, where legs need them.

        An engine that did not answer has no ids, and gets no legs. It is asked again, but no
        request waits for that.
        """
        if not self._protocol.query_path:
            return
        engine = self.get(name)
        now, last = asyncio.get_running_loop().time(), self._checked.get(engine.number)
        if last is not None and now - last < self._every_s:
            return
        check = self._checks.get(engine.number)
        if check is None:
            check = self._tasks.start(
                self._check_once(name, engine), name=f"check of {engine.name}"
            )
            self._checks[engine.number] = check
        if last is None or engine.engine_ids:
            await asyncio.shield(check)

    async def _check_once(self, name: str, engine: KnownEngine) -> None:
        try:
            await self._check(engine)
            if self._engines.get(name) is engine:  # else it was forgotten meanwhile
                self._checked[engine.number] = asyncio.get_running_loop().time()
        finally:
            del self._checks[engine.number]


class HeaderPlacer:
    """Implements `Places`. pick: takes a number n and returns one below n."""

    def __init__(
        self,
        engines: KnownEngines,
        protocol: ForwardProtocol,
        prefillers: Prefillers,
        *,
        pick: Callable[[int], int],
    ):
        self.choices: Counter[tuple[str, str]] = Counter()
        self._protocol, self._prefillers, self._pick = protocol, prefillers, pick
        self._decode = {engine.name: engine for engine in engines.all}

    def place(self, request: ClientRequest, tried: Tried) -> EnginePlacement:
        """Raises NoWorkers, CannotServe."""
        decode = self._decode[request.named.decode]
        if not decode.usable or decode.number in tried.decode:
            raise NoWorkers("the decode engine is not healthy")
        alone = tried.alone or self._why_alone(request)
        prefill = None if alone else self._prefill(request.named.prefill, tried)
        if prefill is None and not alone:
            if not self._protocol.decodes_alone:
                raise NoWorkers("no prefill engine that was named is left")
            alone = self._why_none(request.named.prefill, tried)
        tokens = tokens_of(request.prompt)
        return EnginePlacement(
            prefill=prefill,
            decode=decode,
            alone=alone,
            chain=(),
            prompt_tokens=tokens,
            uncached_tokens=tokens,
        )

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> KnownEngine:
        """Called only if the decode engine has become unhealthy meanwhile. There is no other
        one."""
        raise NoWorkers("the decode engine is not healthy")

    def sent(self, engine: KnownEngine, placement: EnginePlacement) -> None:
        """Choices do not depend on sent prompts."""
        self._prefillers.answered(engine)

    def prefill_failed(self, failure: PrefillFailed) -> None:
        if failure.kind in ("refused", "timeout"):
            self._prefillers.avoid(failure.engine)

    def _why_alone(self, request: ClientRequest) -> str:
        if not request.named.prefill:
            return "no_header" if request.route else "route"
        reason = why_alone(request, self._protocol)
        if reason and request.route and not self._protocol.decodes_alone:
            raise CannotServe(
                f"{request.route} with {reason} cannot be handed over with {self._protocol.name}"
            )
        return reason

    def _prefill(self, names: tuple[str, ...], tried: Tried) -> KnownEngine | None:
        able = [
            engine
            for engine in self._left(names, tried)
            if (engine.engine_ids or not self._protocol.query_path)
            and self._prefillers.may_ask(engine)
        ]
        good = [engine for engine in able if not self._prefillers.avoids(engine)]
        if good or self._protocol.decodes_alone:
            able = good
        if not able:
            return None
        self.choices["prefill", "header"] += 1
        engine = able[self._pick(len(able))]
        self._prefillers.asked(engine)
        return engine

    def _why_none(self, names: tuple[str, ...], tried: Tried) -> str:
        unfit = any(engine.misfit for engine in self._left(names, tried))
        return "misfit" if unfit else "no_prefill_worker"

    def _left(self, names: tuple[str, ...], tried: Tried) -> list[KnownEngine]:
        """The named engines that the request has not tried."""
        named = [self._prefillers.get(name) for name in names]
        return [engine for engine in named if engine.number not in tried.prefill]


class Door:
    """Implements `Answering` for one data-parallel rank: requests that name what is accepted reach
    the workflow.

    ranks: the decode engine's, by the port of the server in front of each. own: this one's port.
    """

    def __init__(
        self,
        forwarding: Forwarding,
        prefillers: Prefillers,
        allowed: AllowedHosts,
        ranks: dict[int, KnownEngine],
        own: int,
    ):
        self._forwarding, self._prefillers, self._allowed = forwarding, prefillers, allowed
        self._ranks, self._own = ranks, own
        self._refusals = LogLimit()

    async def generate(self, incoming: Incoming, route: str, data: bytes, client: Client) -> None:
        try:
            named = Named(accepted(incoming.named.prefill, self._allowed), self._rank(incoming))
        except ValueError as exc:
            return await self._refuse(client, error(400, "BadRequestError", str(exc)))
        except NotAllowed as exc:
            return await self._refuse(client, self._not_allowed(exc))
        await asyncio.gather(*(self._prefillers.prepare(name) for name in named.prefill))
        incoming = dataclasses.replace(incoming, named=named)
        await self._forwarding.generate(incoming, route, data, client)

    async def pass_on(self, incoming: Incoming, data: bytes, client: Client) -> None:
        """For routes that generate nothing, the engines that headers name are ignored."""
        named = Named(decode=self._ranks[self._own].name)
        incoming = dataclasses.replace(incoming, named=named)
        await self._forwarding.pass_on(incoming, data, client)

    def _rank(self, incoming: Incoming) -> str:
        """The decode engine's rank that the request is for. Raises ValueError."""
        given = incoming.named.decode
        if not given:
            return self._ranks[self._own].name
        try:
            _, port = parse_host_port(given)
        except ValueError as exc:
            raise ValueError(f"{RANK_HEADER}: expected HOST:PORT, got {given[:100]!r}") from exc
        if port not in self._ranks:
            first, last = min(self._ranks), max(self._ranks)
            raise ValueError(
                f"{RANK_HEADER}: port {port} belongs to no rank; the ranks have {first} to {last}"
            )
        return self._ranks[port].name

    def _not_allowed(self, host: NotAllowed) -> Answer:
        if (held_back := self._refusals.allow()) is not None:
            more = f" ({held_back} more)" if held_back else ""
            logger.warning("%s names %s, which is not accepted%s", PREFILLER_HEADER, host, more)
        text = (
            f"{PREFILLER_HEADER}: {host} is not accepted. Accepted are"
            f" {', '.join(self._allowed.entries)} (the sidecar's --allow-prefiller)"
        )
        return error(403, "PermissionDeniedError", text)

    async def _refuse(self, client: Client, answer: Answer) -> None:
        self._forwarding.stats.refused[answer.status] += 1
        await send(client, answer)

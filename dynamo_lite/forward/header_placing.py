"""The client's headers name the prefill engine.

The workflow is the Forwarder's; only the choice of engines differs. A `Door` in front of it checks
the engines that the headers name, and `HeaderPlacer` chooses among them.
"""

import asyncio
import dataclasses
import itertools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable

from dynamo_lite.forward.bodies import ClientRequest
from dynamo_lite.forward.choosing import tokens_of
from dynamo_lite.forward.client import Answer, Client, Incoming, error
from dynamo_lite.forward.engines import KnownEngine, KnownEngines
from dynamo_lite.forward.health import EngineMonitor
from dynamo_lite.forward.named import (
    PREFILLER_HEADER,
    RANK_HEADER,
    AllowedHosts,
    Named,
    NotAllowed,
    accepted,
    parse_host_port,
)
from dynamo_lite.forward.options import SidecarConfig
from dynamo_lite.forward.placing import CannotServe, EnginePlacement, Tried, why_alone
from dynamo_lite.forward.protocols.base import ForwardProtocol
from dynamo_lite.forward.workflow import Forwarding
from dynamo_lite.protocol.errors import NoWorkers
from dynamo_lite.runtime.log_limit import LogLimit

logger = logging.getLogger(__name__)

#: Most prefill engines that are remembered.
MAX_PREFILLERS = 1024


class HeaderPlacer:
    """Implements `Places`, with the prefill engines that headers have named. pick: takes a number n
    and returns one below n."""

    def __init__(
        self,
        engines: KnownEngines,
        protocol: ForwardProtocol,
        config: SidecarConfig,
        monitor: EngineMonitor,
        *,
        pick: Callable[[int], int],
    ):
        self.choices: Counter[tuple[str, str]] = Counter()
        self._protocol, self._config, self._monitor = protocol, config, monitor
        self._pick = pick
        self._decode = {engine.name: engine for engine in engines.all}
        self._numbers = itertools.count(len(engines.all))
        #: By HOST:PORT.
        self._prefill: OrderedDict[str, KnownEngine] = OrderedDict()

    def named(self, name: str) -> KnownEngine:
        """A prefill engine. When there are too many, the one named longest ago is forgotten."""
        engine = self._prefill.get(name)
        if engine is None:
            options = self._config.prefiller(name)
            engine = KnownEngine(next(self._numbers), options, self._protocol, followed=False)
            self._prefill[name] = engine
            if len(self._prefill) > MAX_PREFILLERS:
                self._prefill.popitem(last=False)
        self._prefill.move_to_end(name)
        return engine

    @property
    def misfits(self) -> dict[str, str]:
        """Why prefill engines get no legs, by their names."""
        return {name: one.misfit for name, one in self._prefill.items() if one.misfit}

    async def prepare(self, name: str) -> None:
        """Returns when the engine was asked for its ids lately, where legs need them.

        An engine that did not answer has no ids, and gets no legs. It is asked again, but no
        request waits for that.
        """
        if not self._protocol.query_path:
            return
        engine, now = self.named(name), asyncio.get_running_loop().time()
        if now - engine.checked_at < self._config.forwarder.health_interval_s:
            return
        look = self._monitor.look(engine)
        if engine.checked_at == -math.inf or engine.engine_ids:
            await asyncio.shield(look)

    def place(self, request: ClientRequest, tried: Tried) -> EnginePlacement:
        """Raises NoWorkers, CannotServe."""
        decode = self._decode[request.named.decode]
        if not decode.usable or decode.number in tried.decode:
            raise NoWorkers("the decode engine is not healthy")
        alone, prefill = tried.alone or self._why_alone(request), None
        if not alone:
            named = map(self.named, request.named.prefill)
            left = [one for one in named if one.number not in tried.prefill]
            prefill = self._choose(left)
            if prefill is None and not self._protocol.decodes_alone:
                raise NoWorkers("no prefill engine that was named is left")
            if prefill is None:
                alone = "misfit" if any(one.misfit for one in left) else "no_prefill_worker"
        tokens = tokens_of(request.prompt)
        return EnginePlacement(
            prefill=prefill,
            decode=decode,
            alone=alone,
            prompt_tokens=tokens,
            uncached_tokens=tokens,
        )

    def place_decode(self, placement: EnginePlacement, tried: Tried) -> KnownEngine:
        """Called only if the decode engine has become unhealthy meanwhile. There is no other
        one."""
        raise NoWorkers("the decode engine is not healthy")

    def sent(self, engine: KnownEngine, placement: EnginePlacement) -> None:
        """Choices do not depend on sent prompts."""

    def _why_alone(self, request: ClientRequest) -> str:
        if not request.named.prefill:
            return "no_header" if request.route else "route"
        reason = why_alone(request, self._protocol)
        if reason and request.route and not self._protocol.decodes_alone:
            raise CannotServe(
                f"{request.route} with {reason} cannot be handed over with {self._protocol.name}"
            )
        return reason

    def _choose(self, left: list[KnownEngine]) -> KnownEngine | None:
        """left: those that the request has not tried."""
        able = [one for one in left if one.fits]
        good = [one for one in able if not one.avoided]
        if good or self._protocol.decodes_alone:
            able = good
        if not able:
            return None
        self.choices["prefill", "header"] += 1
        return able[self._pick(len(able))]


class Door:
    """In front of the workflow, for one data-parallel rank: requests that name what is accepted
    reach it.

    ranks: the decode engine's, by the port of the server in front of each. own: this one's port.
    """

    def __init__(
        self,
        forwarding: Forwarding,
        placer: HeaderPlacer,
        allowed: AllowedHosts,
        ranks: dict[int, KnownEngine],
        own: int,
    ):
        self._forwarding, self._placer, self._allowed = forwarding, placer, allowed
        self._ranks, self._own = ranks, own
        self._refusals = LogLimit()

    async def generate(self, incoming: Incoming, route: str, data: bytes, client: Client) -> None:
        refuse = self._forwarding.refuse
        try:
            named = Named(accepted(incoming.named.prefill, self._allowed), self._rank(incoming))
        except ValueError as exc:
            return await refuse(client, error(400, "BadRequestError", str(exc)))
        except NotAllowed as exc:
            return await refuse(client, self._not_allowed(exc))
        await asyncio.gather(*(self._placer.prepare(name) for name in named.prefill))
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

"""A client of the Router process that picks workers by it."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence, Set

from prometheus_client import Counter

from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DeadlineExceeded, NoWorkers, ProtocolError, Unavailable
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.routing import Chosen, PickRequest, RequestOutcomes, decode_pick_reply
from dynamo_lite.routing.pickers import Picker, RoundRobin, Selection
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.process.component import Host

logger = logging.getLogger(__name__)

#: How long a request waits for routers, in total.
ANSWER_S = 0.5
#: How long a router that has failed is left alone. A killed one stays registered until its lease
#: expires, and precedes its replacement in the order.
ALONE_S = 5.0
#: Of each kind in one message: ids have at most 256 characters, a message 1 MiB by default.
_MOST_OUTCOMES = 1000
#: How often it is looked whether outcomes can be published again.
_AGAIN_S = 1.0


class RemoteRouter(Picker):
    """Sends pick requests to the first router of the roster that responds.

    All Frontends use the same order, so one router knows all requests. While NATS is disconnected
    none is asked. The Frontend, whose host this is, must own `publish_outcomes`.
    """

    def __init__(self, host: Host, routers: Roster):
        self._host, self._routers = host, routers
        #: Picks workers while no router responds.
        self._fallback = RoundRobin()
        self._fallbacks = Counter(
            "dynamo_lite_router_fallbacks",
            "Requests placed round-robin because no router responded",
            registry=host.registry,
        )
        self._sent = 0
        #: Request id to the router that placed it and the id used there.
        self._placed: dict[str, tuple[int, str]] = {}
        #: Router to the ids (answered, released) that were not published yet.
        self._outcomes: dict[int, tuple[list[str], list[str]]] = {}
        self._has_outcomes = asyncio.Event()
        #: Routers that have failed, and until when they are left alone.
        self._failed: dict[int, float] = {}

    async def pick(
        self,
        members: Sequence[EndpointRecord],
        request: GenerateRequest,
        without: Set[int] = frozenset(),
    ) -> Selection:
        candidates = {m.lease_id: m for m in members if m.lease_id not in without}
        if not candidates:
            raise NoWorkers("no live worker")
        until = _now() + ANSWER_S
        for router in self._routers.members if self._host.messaging.connected else ():
            now = _now()
            if now < self._failed.get(router.lease_id, 0.0) or now >= until:
                continue
            try:
                return await self._request_pick(router, candidates, request, until - now)
            except (Unavailable, DeadlineExceeded, ProtocolError) as exc:
                # Many requests wait for a router that is killed: the first one that fails says so.
                if _now() < self._failed.get(router.lease_id, 0.0):
                    continue
                live = self._routers.lease_ids
                self._failed = {k: end for k, end in self._failed.items() if k in live}
                self._failed[router.lease_id] = _now() + ALONE_S
                logger.warning(
                    "router %x failed, and is left alone for %g s: request %s: %s",
                    router.lease_id,
                    ALONE_S,
                    request.request_id,
                    exc,
                )
        self._fallbacks.inc()
        return self._fallback.pick(members, request, without)

    def answered(self, request_id: str) -> None:
        if (placed := self._placed.get(request_id)) is not None:
            router, own_id = placed
            self._outcomes_for(router)[0].append(own_id)

    def released(self, request_id: str) -> None:
        if (placed := self._placed.pop(request_id, None)) is not None:
            router, own_id = placed
            self._outcomes_for(router)[1].append(own_id)

    async def _request_pick(
        self,
        router: EndpointRecord,
        candidates: Mapping[int, EndpointRecord],
        request: GenerateRequest,
        timeout_s: float,
    ) -> Selection:
        """Raises Unavailable, DeadlineExceeded, ProtocolError.

        After a failure the request is released, in case the router has placed it. Each pick
        request has its own id, so that outcomes of an earlier one cannot be mistaken for it.
        """
        self._sent += 1
        own_id = f"{request.request_id}~{self._sent}"
        message = PickRequest(
            client=self._host.lease.id,
            request_id=own_id,
            prompt_token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            candidates=list(candidates),
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            media=request.inputs is not None,
            session=request.session,
        )
        self.released(request.request_id)
        self._placed[request.request_id] = router.lease_id, own_id
        try:
            reply = await self._host.messaging.request(
                router.transport.nats_tcp, encode(message), timeout_s=timeout_s
            )
            return self._selection(reply, candidates)
        except BaseException as exc:
            if isinstance(exc, ProtocolError):
                self._host.drops("pick_reply")
            self.released(request.request_id)
            raise

    def _selection(self, reply: bytes, candidates: Mapping[int, EndpointRecord]) -> Selection:
        chosen = decode_pick_reply(reply)
        if not isinstance(chosen, Chosen):
            raise Unavailable("it knows none of the candidate workers")
        member = candidates.get(chosen.lease_id)
        if member is None:
            raise ProtocolError(f"it chose worker {chosen.lease_id:x}, which is not a candidate")
        return Selection(member, chosen.reason)

    def _outcomes_for(self, router: int) -> tuple[list[str], list[str]]:
        self._has_outcomes.set()
        return self._outcomes.setdefault(router, ([], []))

    async def publish_outcomes(self) -> None:
        """Outcomes of one iteration of the event loop are published together. Without them a router
        counts its requests as running, so they are kept while NATS is disconnected."""
        messaging = self._host.messaging
        while True:
            await self._has_outcomes.wait()
            if not messaging.connected:
                await asyncio.sleep(_AGAIN_S)
                continue
            router, (answered, released) = self._outcomes.popitem()
            if not self._outcomes:
                self._has_outcomes.clear()
            subject = names.fates_subject(self._host.spec.namespace, router)
            for start in range(0, max(len(answered), len(released)), _MOST_OUTCOMES):
                part = slice(start, start + _MOST_OUTCOMES)
                notice = RequestOutcomes(
                    client=self._host.lease.id, answered=answered[part], released=released[part]
                )
                # Disconnected in this moment: it is lost, as one that was just sent.
                with contextlib.suppress(Unavailable):
                    await messaging.publish(subject, encode(notice))


def _now() -> float:
    return asyncio.get_running_loop().time()

"""The Frontend's client of the Router process."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Self

from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.policy.routing import Picker, Selection
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import DeadlineExceeded, NoWorkers, ProtocolError, Unavailable
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.routing import Chosen, PickRequest, RequestOutcomes, decode_pick_reply
from dynamo_lite.request_plane.placement import WorkerSelector
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: Timeout of a pick request.
ANSWER_S = 0.5
#: After a failure a router gets no pick requests for this time.
REST_S = 1.0


class RemoteRouter(WorkerSelector):
    """Sends pick requests to the first router of the roster that responds.

    All Frontends use the same order, so one router knows all requests. Async context manager;
    the roster must be open.

    Args:
        lease_id: of this Frontend.
        fallback: picks workers while no router responds.
    """

    def __init__(
        self,
        messaging: Messaging,
        routers: Roster,
        *,
        namespace: str,
        lease_id: int,
        fallback: Picker,
        registry: CollectorRegistry | None = None,
        on_drop: OnDrop = uncounted,
    ):
        self._messaging, self._routers = messaging, routers
        self._namespace, self._lease_id = namespace, lease_id
        self._fallback, self._on_drop = fallback, on_drop
        self._fallbacks = Counter(
            "dynamo_lite_router_fallbacks",
            "Requests placed round-robin because no router responded",
            registry=registry or CollectorRegistry(),
        )
        self._sent = 0
        #: Request id to the router that placed it and the id used there.
        self._placed: dict[str, tuple[int, str]] = {}
        #: Router to the ids (answered, released) that were not published yet.
        self._outcomes: dict[int, tuple[list[str], list[str]]] = {}
        self._has_outcomes = asyncio.Event()
        #: Router to the loop time until which it gets no requests.
        self._paused_until: dict[int, float] = {}
        #: Routers whose failure was logged.
        self._silent: set[int] = set()
        self._tasks = OwnedTasks()

    async def __aenter__(self) -> Self:
        self._tasks.start(self._publish_outcomes(), name="router-outcomes")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()

    async def choose(
        self, members: Sequence[EndpointRecord], request: GenerateRequest
    ) -> Selection:
        if not members:
            raise NoWorkers("no live worker")
        for router in self._usable():
            try:
                picked = await self._request_pick(router, members, request)
            except (Unavailable, DeadlineExceeded, ProtocolError) as exc:
                self._paused_until[router.lease_id] = _now() + REST_S
                known = router.lease_id in self._silent
                self._silent.add(router.lease_id)
                logger.log(
                    logging.DEBUG if known else logging.WARNING,
                    "request %s: router %x failed: %s; it gets no requests for %g s",
                    request.request_id,
                    router.lease_id,
                    exc,
                    REST_S,
                )
            else:
                self._silent.discard(router.lease_id)
                return picked
        self._fallbacks.inc()
        return self._fallback.pick(members, request)

    def _usable(self) -> list[EndpointRecord]:
        """The routers to try, in order. A killed one stays registered until its lease
        expires, before its replacement in the order."""
        routers, now = self._routers.members, _now()
        live = {router.lease_id for router in routers}
        self._paused_until = {k: v for k, v in self._paused_until.items() if k in live and v > now}
        self._silent &= live
        return [router for router in routers if router.lease_id not in self._paused_until]

    def answered(self, request_id: str) -> None:
        if (placed := self._placed.get(request_id)) is not None:
            router, own_id = placed
            self._outcomes_for(router)[0].append(own_id)
        self._fallback.answered(request_id)

    def released(self, request_id: str) -> None:
        if (placed := self._placed.pop(request_id, None)) is not None:
            router, own_id = placed
            self._outcomes_for(router)[1].append(own_id)
        self._fallback.released(request_id)

    async def _request_pick(
        self, router: EndpointRecord, members: Sequence[EndpointRecord], request: GenerateRequest
    ) -> Selection:
        """Raises Unavailable, DeadlineExceeded, ProtocolError.

        After a failure the request is released, in case the router has placed it. Each pick
        request has its own id, so that outcomes of an earlier one cannot be mistaken for it.
        """
        self._sent += 1
        own_id = f"{request.request_id}~{self._sent}"
        message = PickRequest(
            client=self._lease_id,
            request_id=own_id,
            prompt_token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            candidates=[member.lease_id for member in members],
            cache_salt=request.cache_salt,
            session=request.session,
        )
        self.released(request.request_id)
        self._placed[request.request_id] = router.lease_id, own_id
        try:
            reply = await self._messaging.request(
                router.transport.nats_tcp, encode(message), timeout_s=ANSWER_S
            )
            return self._selection(reply, members)
        except ProtocolError:
            self._on_drop("pick_reply")
            self.released(request.request_id)
            raise
        except BaseException:
            self.released(request.request_id)
            raise

    def _selection(self, reply: bytes, members: Sequence[EndpointRecord]) -> Selection:
        chosen = decode_pick_reply(reply)
        if not isinstance(chosen, Chosen):
            raise Unavailable("it knows none of the candidate workers")
        member = next((m for m in members if m.lease_id == chosen.lease_id), None)
        if member is None:
            raise ProtocolError(f"it chose worker {chosen.lease_id:x}, which is not a candidate")
        return Selection(member, chosen.reason)

    def _outcomes_for(self, router: int) -> tuple[list[str], list[str]]:
        self._has_outcomes.set()
        return self._outcomes.setdefault(router, ([], []))

    async def _publish_outcomes(self) -> None:
        """Outcomes of one iteration of the event loop are published together."""
        while True:
            await self._has_outcomes.wait()
            self._has_outcomes.clear()
            outcomes, self._outcomes = self._outcomes, {}
            for router, (answered, released) in outcomes.items():
                notice = RequestOutcomes(
                    client=self._lease_id, answered=answered, released=released
                )
                subject = names.fates_subject(self._namespace, router)
                try:
                    await self._messaging.publish(subject, encode(notice))
                except Unavailable as exc:
                    logger.debug("router %x: cannot publish request outcomes: %s", router, exc)


def _now() -> float:
    return asyncio.get_running_loop().time()

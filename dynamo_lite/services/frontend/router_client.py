"""The Frontend's side of a router that runs in a process of its own."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Self

from prometheus_client import CollectorRegistry, Counter

from dynamo_lite.policy.routing import Picker, Selection
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.errors import (
    DeadlineExceeded,
    NoWorkers,
    ProtocolError,
    Unavailable,
)
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.records import EndpointRecord
from dynamo_lite.protocol.routing import Chosen, PickRequest, RequestOutcomes, decode_pick_reply
from dynamo_lite.request_plane import WorkerSelector
from dynamo_lite.runtime.drops import OnDrop, uncounted
from dynamo_lite.runtime.members.roster import Roster
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

#: How long a router may take, and for how long it is not asked when it did not answer.
ANSWER_S = 0.5
REST_S = 1.0


class RemoteRouter(WorkerSelector):
    """Asks the first router of a roster that answers. Async context manager, over an open roster.

    So all Frontends ask the same one, and it knows of all requests. fallback: chooses
    while none answers.
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
            "Requests that were placed by turns, since no router answered",
            registry=registry or CollectorRegistry(),
        )
        self._asked = 0
        self._placed: dict[str, tuple[int, str]] = {}
        self._fates: dict[int, tuple[list[str], list[str]]] = {}
        self._told = asyncio.Event()
        self._rests_until: dict[int, float] = {}
        self._silent: set[int] = set()
        self._tasks = OwnedTasks()

    async def __aenter__(self) -> Self:
        self._tasks.start(self._tell(), name="router-fates")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.end()

    async def choose(
        self, members: Sequence[EndpointRecord], request: GenerateRequest
    ) -> Selection:
        if not members:
            raise NoWorkers("no live worker")
        for router in self._awake():
            try:
                picked = await self._ask(router, members, request)
            except (Unavailable, DeadlineExceeded, ProtocolError) as exc:
                self._rests_until[router.lease_id] = _now() + REST_S
                known = router.lease_id in self._silent
                self._silent.add(router.lease_id)
                logger.log(
                    logging.DEBUG if known else logging.WARNING,
                    "request %s: router %x: %s; not asked for a while",
                    request.request_id,
                    router.lease_id,
                    exc,
                )
            else:
                self._silent.discard(router.lease_id)
                return picked
        self._fallbacks.inc()
        return self._fallback.pick(members, request)

    def _awake(self) -> list[EndpointRecord]:
        """Those to be asked, first to last. One that was killed stays registered for the
        rest of its lease, before the one that was started in its place."""
        routers, now = self._routers.members, _now()
        live = {router.lease_id for router in routers}
        self._rests_until = {k: v for k, v in self._rests_until.items() if k in live and v > now}
        self._silent &= live
        return [router for router in routers if router.lease_id not in self._rests_until]

    def answered(self, request_id: str) -> None:
        if (placed := self._placed.get(request_id)) is not None:
            router, own_id = placed
            self._note(router)[0].append(own_id)
        self._fallback.answered(request_id)

    def released(self, request_id: str) -> None:
        if (placed := self._placed.pop(request_id, None)) is not None:
            router, own_id = placed
            self._note(router)[1].append(own_id)
        self._fallback.released(request_id)

    async def _ask(
        self, router: EndpointRecord, members: Sequence[EndpointRecord], request: GenerateRequest
    ) -> Selection:
        """What it has placed although we do not hear of it, it is told to forget.

        Each question has an id of its own: what is said of one is about no other.
        """
        self._asked += 1
        own_id = f"{request.request_id}~{self._asked}"
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
            return self._picked(reply, members)
        except ProtocolError:
            self._on_drop("pick_reply")
            self.released(request.request_id)
            raise
        except BaseException:
            self.released(request.request_id)
            raise

    def _picked(self, reply: bytes, members: Sequence[EndpointRecord]) -> Selection:
        chosen = decode_pick_reply(reply)
        if not isinstance(chosen, Chosen):
            raise Unavailable("it knows none of the workers")
        member = next((m for m in members if m.lease_id == chosen.lease_id), None)
        if member is None:
            raise ProtocolError("it has chosen a worker that was not to be had")
        return Selection(member, chosen.reason)

    def _note(self, router: int) -> tuple[list[str], list[str]]:
        self._told.set()
        return self._fates.setdefault(router, ([], []))

    async def _tell(self) -> None:
        """Fates of one turn of the loop go together."""
        while True:
            await self._told.wait()
            self._told.clear()
            fates, self._fates = self._fates, {}
            for router, (answered, released) in fates.items():
                notice = RequestOutcomes(
                    client=self._lease_id, answered=answered, released=released
                )
                subject = names.fates_subject(self._namespace, router)
                try:
                    await self._messaging.publish(subject, encode(notice))
                except Unavailable as exc:
                    logger.debug("router %x does not hear of requests: %s", router, exc)


def _now() -> float:
    return asyncio.get_running_loop().time()

"""A component's end of preflights: it asks its own engine's process, and hears how they end."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from dynamo_lite.disagg.engine_config import EngineConfig
from dynamo_lite.disagg.prefill.link_test_rank import LIMIT_S
from dynamo_lite.engine.base import LinkReport
from dynamo_lite.protocol import names
from dynamo_lite.protocol.codec import encode_sealed
from dynamo_lite.protocol.errors import DeadlineExceeded, Unavailable
from dynamo_lite.protocol.prefill import LinkTest, Listen
from dynamo_lite.protocol.records import EngineMetadata
from dynamo_lite.runtime.messaging import Messaging
from dynamo_lite.runtime.tasks import OwnedTasks

logger = logging.getLogger(__name__)

_ASK_S = 2.0
#: The ranks end a preflight by themselves; later than this nothing comes any more.
_ANSWER_S = LIMIT_S + 5.0


class LinkTestClient:
    """wake: has an engine that is idle look whether there is something to do. It may
    return late: an engine that is not idle first ends its step."""

    def __init__(
        self, link: EngineConfig, messaging: Messaging, wake: Callable[[], Awaitable[None]]
    ):
        self._link, self._messaging, self._wake = link, messaging, wake
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[LinkReport]] = {}
        self._waking = OwnedTasks()

    async def fly(self, target: EngineMetadata) -> LinkReport:
        """Raises Unavailable, DeadlineExceeded or ProtocolError when the engine was not heard."""
        order = f"{self._link.lease_id:x}.{next(self._numbers)}"
        subject = names.preflight_subject(self._link.namespace, self._link.engine_id)
        ended: asyncio.Future[LinkReport] = asyncio.get_running_loop().create_future()
        self._waiting[order] = ended
        try:
            preflight = encode_sealed(LinkTest(order=order, target=target))
            await self._messaging.request(subject, preflight, timeout_s=_ASK_S)
            self._wake_soon()
            async with asyncio.timeout(_ANSWER_S):
                return await ended
        except TimeoutError as exc:
            raise DeadlineExceeded("the engine's preflight", _ANSWER_S) from exc
        finally:
            del self._waiting[order]

    async def listen(self, listen: Listen) -> None:
        """Passes it on to a decode engine. Raises Unavailable or DeadlineExceeded."""
        subject = names.poll_subject(self._link.namespace, self._link.engine_id)
        await self._messaging.request(subject, encode_sealed(listen), timeout_s=_ASK_S)
        self._wake_soon()

    def settle(self, ended: Sequence[tuple[str, str, int, float, float]]) -> None:
        """As the halves have counted it."""
        for order, failure, lanes, contact_s, round_trip_s in ended:
            waiting = self._waiting.get(order)
            if waiting is not None and not waiting.done():
                waiting.set_result(LinkReport(failure or None, lanes, contact_s, round_trip_s))

    def _wake_soon(self) -> None:
        self._waking.start(self._wake_safely(), name="wake")

    async def _wake_safely(self) -> None:
        try:
            await self._wake()
        except Unavailable as exc:
            logger.warning("%s", exc)

    def close(self) -> None:
        self._waking.cancel()
        for waiting in self._waiting.values():
            waiting.cancel()

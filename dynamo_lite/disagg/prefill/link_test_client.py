"""The component's part of link tests: it orders them at its engine's process and awaits them."""

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
#: The ranks end each test within LIMIT_S; after this timeout no result will come.
_ANSWER_S = LIMIT_S + 5.0


class LinkTestClient:
    """wake: makes an idle engine run a step. It may return late, as an engine that is not idle
    ends its step first."""

    def __init__(
        self, config: EngineConfig, messaging: Messaging, wake: Callable[[], Awaitable[None]]
    ):
        self._config, self._messaging, self._wake = config, messaging, wake
        self._numbers = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[LinkReport]] = {}
        self._waking = OwnedTasks()

    async def test(self, target: EngineMetadata) -> LinkReport:
        """Raises Unavailable, DeadlineExceeded or ProtocolError if the engine did not answer."""
        order = f"{self._config.lease_id:x}.{next(self._numbers)}"
        subject = names.preflight_subject(self._config.namespace, self._config.engine_id)
        ended: asyncio.Future[LinkReport] = asyncio.get_running_loop().create_future()
        self._waiting[order] = ended
        try:
            link_test = encode_sealed(LinkTest(order=order, target=target))
            try:
                await self._messaging.request(subject, link_test, timeout_s=_ASK_S)
            except DeadlineExceeded:
                self._wake_soon()  # the engine may have the order
                raise
            self._wake_soon()
            async with asyncio.timeout(_ANSWER_S):
                return await ended
        except TimeoutError as exc:
            raise DeadlineExceeded("the engine's link test", _ANSWER_S) from exc
        finally:
            del self._waiting[order]

    async def listen(self, listen: Listen) -> None:
        """Passes the order to this decode engine. Raises Unavailable or DeadlineExceeded."""
        subject = names.poll_subject(self._config.namespace, self._config.engine_id)
        await self._messaging.request(subject, encode_sealed(listen), timeout_s=_ASK_S)
        self._wake_soon()

    def resolve(self, ended: Sequence[tuple[str, str, int, float, float]]) -> None:
        """ended: order, failure, lanes, contact_s and round_trip_s of each, as in the counters."""
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
            logger.warning("could not wake the engine: %s", exc)

    def close(self) -> None:
        self._waking.cancel()
        for waiting in self._waiting.values():
            waiting.cancel()

"""Large requests take turns: one at a time uses the event loop and the tokenizer."""

import asyncio
import time
from contextlib import ExitStack

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from dynamo_lite.vllm.frontend.refusal import late_error
from dynamo_lite.vllm.frontend.request_context import RequestContext

#: The longest turn: a prompt's media may be downloaded in it, from a slow host.
_MAX_TURN_S = 2.0


class BodyTurns:
    def __init__(self):
        self._turn = asyncio.Lock()
        self._resume_at = 0.0

    async def wait(self, context: RequestContext | None, receive: Receive) -> ExitStack:
        """The turn is over when the result is closed, at the latest after `_MAX_TURN_S`.

        context: None for a request without a time limit. receive: of a request whose whole body has
        been received. Raises GracefulHTTPError if the request times out, ClientDisconnect.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            try:
                async with asyncio.timeout_at(None if context is None else context.deadline):
                    await self._turn.acquire()
                    stack.callback(self._turn.release)
                    await asyncio.sleep(self._resume_at - loop.time())
            except TimeoutError as exc:
                assert context is not None
                raise late_error(context.timeout_s) from exc
            if await _has_gone(receive):
                raise ClientDisconnect
            stack.callback(self._pause, time.thread_time())
            turn = stack.pop_all()
        turn.callback(loop.call_later(_MAX_TURN_S, turn.close).cancel)
        return turn

    def _pause(self, began_s: float) -> None:
        """The next turn begins when the event loop has had as much time for the streams as it has
        computed in this one. began_s: the thread's CPU time at its beginning."""
        used_s = time.thread_time() - began_s
        self._resume_at = asyncio.get_running_loop().time() + used_s


async def _has_gone(receive: Receive) -> bool:
    try:
        async with asyncio.timeout(0):
            return (await receive())["type"] == "http.disconnect"
    except TimeoutError:
        return False

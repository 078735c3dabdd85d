"""Turns on the event loop: work that holds it for long is done piece by piece, with pauses."""

import asyncio

#: Iterations of the event loop that belong to a turn: middleware may pass a body on through
#: several callbacks before the app parses it.
_ITERATIONS = 4


class LoopTurns:
    """One turn at a time, in order. After each the loop is left alone for as long as the
    turn took, at most `max_pause_s`, so that it has at least half of its time for others."""

    def __init__(self, max_pause_s: float = 5.0):
        self._max_pause_s = max_pause_s
        self._lock = asyncio.Lock()
        self._resume_at = 0.0

    async def wait(self) -> None:
        """Returns when it is the caller's turn; `begin` or `give_up` must follow."""
        await self._lock.acquire()
        try:
            pause_s = self._resume_at - asyncio.get_running_loop().time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
        except BaseException:
            self._lock.release()
            raise

    def begin(self) -> None:
        """What the caller does now, until it waits for something, is its turn; it ends by
        itself."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._measure, loop.time(), _ITERATIONS)

    def give_up(self) -> None:
        """The turn is not used."""
        self._lock.release()

    def _measure(self, began: float, iterations: int) -> None:
        loop = asyncio.get_running_loop()
        if iterations:
            loop.call_soon(self._measure, began, iterations - 1)
            return
        now = loop.time()
        self._resume_at = now + min(now - began, self._max_pause_s)
        self._lock.release()

"""Turns for large requests: only one at a time uses the event loop and the tokenizer."""

import asyncio

#: Iterations of the event loop in which the app parses a body: middleware may pass it on through
#: several callbacks.
_ITERATIONS = 4


class LoopTurns:
    """One turn at a time, in order of arrival. After each there is a pause as long as the turn
    has blocked the event loop, at most `max_pause_s`. A turn ends after `max_turn_s` at most.
    """

    def __init__(self, max_pause_s: float = 5.0, max_turn_s: float = 10.0):
        self.max_pause_s, self.max_turn_s = max_pause_s, max_turn_s
        self.resume_at = 0.0
        self._lock = asyncio.Lock()

    async def wait(self) -> "Turn":
        """Waits for the caller's turn. The caller must end it."""
        await self._lock.acquire()
        try:
            pause_s = self.resume_at - asyncio.get_running_loop().time()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
        except BaseException:
            self._lock.release()
            raise
        return Turn(self, self._lock)


class Turn:
    """A turn in progress; `end` is idempotent."""

    def __init__(self, turns: LoopTurns, lock: asyncio.Lock):
        self._turns, self._lock = turns, lock
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(turns.max_turn_s, self.end)

    def handed_over(self) -> None:
        """The app has the body: measures how long it blocks the event loop from here on."""
        self._loop.call_soon(self._measure, self._loop.time(), _ITERATIONS)

    def end(self) -> None:
        self._timer.cancel()
        if not self._ended:
            self._ended = True
            self._lock.release()

    def _measure(self, began: float, iterations: int) -> None:
        if iterations:
            self._loop.call_soon(self._measure, began, iterations - 1)
            return
        now = self._loop.time()
        pause_s = min(now - began, self._turns.max_pause_s)
        self._turns.resume_at = max(self._turns.resume_at, now + pause_s)

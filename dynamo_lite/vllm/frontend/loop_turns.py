"""Turns for large requests: one at a time holds the event loop and the tokenizer's thread."""

import asyncio

#: Iterations of the event loop in which a body that was handed over is parsed: middleware
#: may pass it on through several callbacks.
_ITERATIONS = 4


class LoopTurns:
    """One turn at a time, in order. After each the event loop is left alone for as long as
    the turn has held it, at most `max_pause_s`. A turn of more than `max_turn_s` is ended."""

    def __init__(self, max_pause_s: float = 5.0, max_turn_s: float = 10.0):
        self.max_pause_s, self.max_turn_s = max_pause_s, max_turn_s
        self.resume_at = 0.0
        self._lock = asyncio.Lock()

    async def wait(self) -> "Turn":
        """Returns when it is the caller's turn, which must be ended."""
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
    """`end` is idempotent."""

    def __init__(self, turns: LoopTurns, lock: asyncio.Lock):
        self._turns, self._lock = turns, lock
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(turns.max_turn_s, self.end)

    def handed_over(self) -> None:
        """What happens from here on, until others run, is this turn's work."""
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

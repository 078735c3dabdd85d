"""The attempts in a prefill engine, at its component: their first tokens and how they end."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from dynamo_lite.disagg.counters import ENDED
from dynamo_lite.disagg.engine import AttemptOutcome


class OpenAttempt:
    """One attempt in the engine."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[AttemptOutcome] = loop.create_future()
        self._token: asyncio.Future[tuple[int, int]] = loop.create_future()

    async def first_token(self) -> tuple[int, int] | None:
        """Waits for the sampled token, and how many tokens of the prompt were cached; None if the
        attempt ends without one."""
        await asyncio.wait((self._token, self.ended), return_when=asyncio.FIRST_COMPLETED)
        sampled = self._token.done() and not self._token.cancelled()
        return self._token.result() if sampled else None

    def sampled(self, token_id: int, cached: int) -> None:
        if not self._token.done():
            self._token.set_result((token_id, cached))

    def end(self, outcome: AttemptOutcome) -> None:
        if not self.ended.done():
            self.ended.set_result(outcome)

    def cancel(self) -> None:
        self._token.cancel()
        self.ended.cancel()


class OpenAttempts:
    """Attempts, until the engine has reported how they ended. Used on the component's event
    loop."""

    def __init__(self) -> None:
        self._open: dict[str, OpenAttempt] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def open(self, attempt: str) -> Iterator[OpenAttempt]:
        """Registers the attempt; its outcome is to be awaited within the context."""
        opened = self._open[attempt] = OpenAttempt()
        try:
            yield opened
        finally:
            self._open.pop(attempt, None)

    def sampled(self, attempt: str, token_ids: list[int], cached: int = 0) -> None:
        """The engine has sampled these tokens after the attempt's prompt, of which it had `cached`
        tokens in its prefix cache."""
        opened = self._open.get(attempt)
        if opened is not None and token_ids:
            opened.sampled(token_ids[0], cached)

    def apply(self, counts: Mapping[str, Any]) -> None:
        """Takes the outcomes from the counters of the connector's halves, of one step. The tokens
        of that step must have been taken before."""
        for attempt, outcome, detail in counts.get(ENDED, ()):
            if (opened := self._open.get(attempt)) is not None:
                opened.end(AttemptOutcome(attempt, outcome, detail))

    def died(self, why: str) -> None:
        """The engine's process has died: ends all attempts. A dead process starts no write."""
        for attempt, opened in self._open.items():
            opened.end(AttemptOutcome(attempt, "died", why))

    def cancel(self) -> None:
        for opened in self._open.values():
            opened.cancel()

"""The attempts that a prefill engine works on, until it says how they ended."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dynamo_lite.disagg.counters import ENDED, WRITTEN
from dynamo_lite.engine.base import AttemptOutcome


class Attempts:
    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[AttemptOutcome]] = {}
        self._written: dict[str, float] = {}

    @contextmanager
    def ending(self, attempt: str) -> Iterator[asyncio.Future[AttemptOutcome]]:
        """Its end, to be awaited within the context."""
        ended: asyncio.Future[AttemptOutcome] = asyncio.get_running_loop().create_future()
        self._open[attempt] = ended
        try:
            yield ended
        finally:
            self._open.pop(attempt, None)

    def hear(self, counts: Mapping[str, Any]) -> None:
        """What the connector's halves have counted in one step."""
        self._written.update(counts.get(WRITTEN, ()))
        for attempt, outcome, detail in counts.get(ENDED, ()):
            written_at = self._written.pop(attempt, None)
            self._settle(AttemptOutcome(attempt, outcome, detail, written_at))

    def died(self, why: str) -> None:
        """A dead process starts no write: say so, rather than let anybody wait."""
        for attempt in self._open:
            self._settle(AttemptOutcome(attempt, "died", why))

    def cancel(self) -> None:
        for waiting in self._open.values():
            waiting.cancel()

    def _settle(self, ended: AttemptOutcome) -> None:
        waiting = self._open.get(ended.attempt)
        if waiting is not None and not waiting.done():
            waiting.set_result(ended)

"""The attempts in a prefill engine, until it reports how they ended."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dynamo_lite.disagg.counters import ENDED, WRITTEN
from dynamo_lite.engine.base import AttemptOutcome


class Attempts:
    """Used on the component's event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[AttemptOutcome]] = {}
        self._written: dict[str, float] = {}

    @contextmanager
    def ending(self, attempt: str) -> Iterator[asyncio.Future[AttemptOutcome]]:
        """Registers the attempt; its outcome is to be awaited within the context."""
        ended: asyncio.Future[AttemptOutcome] = asyncio.get_running_loop().create_future()
        self._open[attempt] = ended
        try:
            yield ended
        finally:
            self._open.pop(attempt, None)

    def apply(self, counts: Mapping[str, Any]) -> None:
        """Takes the outcomes from the counters of the connector's halves, of one step."""
        self._written.update(counts.get(WRITTEN, ()))
        for attempt, outcome, detail in counts.get(ENDED, ()):
            written_at = self._written.pop(attempt, None)
            self._resolve(AttemptOutcome(attempt, outcome, detail, written_at))

    def died(self, why: str) -> None:
        """The engine's process has died: ends all attempts. A dead process starts no write."""
        for attempt in self._open:
            self._resolve(AttemptOutcome(attempt, "died", why))

    def cancel(self) -> None:
        for waiting in self._open.values():
            waiting.cancel()

    def _resolve(self, ended: AttemptOutcome) -> None:
        waiting = self._open.get(ended.attempt)
        if waiting is not None and not waiting.done():
            waiting.set_result(ended)

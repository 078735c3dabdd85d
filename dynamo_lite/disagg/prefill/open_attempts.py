"""The attempts in a prefill engine, at its component: their first tokens and how they end."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from dynamo_lite.disagg.counters import ENDED
from dynamo_lite.disagg.engine import AttemptOutcome, OnFirstToken


class OpenAttempts:
    """Attempts, until the engine has reported how they ended. Used on the component's event
    loop."""

    def __init__(self) -> None:
        #: What the engine has reported of each attempt: a sampled token, or its end; None: it
        #: reports nothing more.
        self._open: dict[str, asyncio.Queue[int | AttemptOutcome | None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def run(
        self, attempt: str, added: Awaitable[None], on_first_token: OnFirstToken | None
    ) -> AttemptOutcome:
        """added: gives the attempt to the engine. on_first_token: awaited with the sampled token;
        None: it is not wanted."""
        reports = self._open[attempt] = asyncio.Queue()
        try:
            await added
            while not isinstance(report := await reports.get(), AttemptOutcome):
                if report is None:
                    raise asyncio.CancelledError
                if on_first_token is not None:
                    await on_first_token(report)
            return report
        finally:
            self._open.pop(attempt, None)

    def sampled(self, attempt: str, token_ids: list[int]) -> None:
        """The engine has sampled the token after the attempt's prompt."""
        if token_ids and (reports := self._open.get(attempt)) is not None:
            reports.put_nowait(token_ids[0])

    def apply(self, counts: Mapping[str, Any]) -> None:
        """Takes the outcomes from the counters of the connector's halves, of one step. The tokens
        of that step must have been taken before."""
        for attempt, outcome, detail in counts.get(ENDED, ()):
            if (reports := self._open.get(attempt)) is not None:
                reports.put_nowait(AttemptOutcome(attempt, outcome, detail))

    def cancel(self) -> None:
        """The engine is closed, or its process has died: nothing is reported any more."""
        for reports in self._open.values():
            reports.put_nowait(None)

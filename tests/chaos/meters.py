"""What the processes count, summed over all that ever ran.

A counter dies with its process, so everybody is asked once a second and the
last answer is kept: of a killed process up to a second is missing.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable

import httpx

from dynamo_lite.serve.run_state import ProcessState

_PERIOD_S = 1.0
_TIMEOUT_S = 2.0
#: Without `dynamo_lite_` and `_total`.
_SAMPLE = re.compile(r"^dynamo_lite_(?!kv_blocks)(\w+)_total(\{.*\})? (\S+)$", re.MULTILINE)


class Meters:
    """Async context manager that asks all the time. states: gives the processes that run now."""

    def __init__(self, states: Callable[[], Iterable[ProcessState]]):
        self._states = states
        self._last: dict[int, Counter[str]] = {}
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Meters":
        self._task = asyncio.create_task(self._keep_asking(), name="meters")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._http.aclose()

    def total(self, name: str) -> int:
        return total(self.totals(), name)

    def totals(self) -> Counter[str]:
        """All counters that are not 0: `name{label="value"}`."""
        return sum(self._last.values(), Counter[str]())

    async def ask(self) -> None:
        """Reads the metrics once, now. A process that does not answer in time keeps its last
        numbers."""
        await asyncio.gather(
            *(self._ask(p.pid, p.status_url) for p in self._states() if p.status_url)
        )

    async def _keep_asking(self) -> None:
        while True:
            with contextlib.suppress(AssertionError, StopIteration):
                await self.ask()
            await asyncio.sleep(_PERIOD_S)

    async def _ask(self, pid: int, url: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            text = (await self._http.get(f"{url}/metrics")).text
            found = _SAMPLE.findall(text)
            self._last[pid] = Counter({f"{n}{labels}": float(value) for n, labels, value in found})


def total(counts: Counter[str], name: str) -> int:
    """Sum over all labels."""
    return int(sum(n for sample, n in counts.items() if sample.partition("{")[0] == name))

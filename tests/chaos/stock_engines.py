"""Stock engines behind a Forwarder: their state, as they and the Forwarder report it."""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx

from tests.vllm.stock import Forwarded, StockEngine

_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{(.*)\})? ([^ ]+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_POLL_S = 0.02
_BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
Sample = tuple[str, dict[str, str], float]


class StockCluster:
    """Async context manager; the engines and the Forwarder are started and ended by the caller.

    kills: when a decode engine was killed (`time.monotonic()`).
    """

    def __init__(self, running: Forwarded):
        self.running = running
        self.engines = (*running.prefill, *running.decode)
        self.kills: list[float] = []
        self._http = httpx.AsyncClient(timeout=10)
        process = running.graph.process("Forwarder")
        self._forwarder_pid, self._status_url = process.pid, process.status_url

    async def __aenter__(self) -> "StockCluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    @property
    def port(self) -> int:
        return int(self.running.graph.url.rpartition(":")[2])

    def excuse(self, began: float, begun: bool) -> str:
        """An answer that has begun breaks off with its decode engine. Before its first byte no
        request may fail, because another decode engine is always alive."""
        return "decode engine killed" if begun and any(at >= began for at in self.kills) else ""

    async def counters(self) -> Counter[str]:
        """The Forwarder's, without their prefix."""
        found: Counter[str] = Counter()
        for name, labels, value in await self._samples(self._status_url):
            if name.startswith("dynamo_lite_forward_") and name.endswith("_total"):
                short = name.removeprefix("dynamo_lite_forward_").removesuffix("_total")
                found[" ".join((short, *filter(None, labels.values())))] += int(value)
        return found

    async def per_engine(self, name: str) -> dict[str, float]:
        """A metric of the Forwarder, by the engine's HOST:PORT."""
        samples = await self._samples(self._status_url)
        wanted = f"dynamo_lite_forward_engine_{name}"
        return {labels["engine"]: value for found, labels, value in samples if found == wanted}

    def open_files(self) -> int:
        """Of the Forwarder."""
        return len(os.listdir(f"/proc/{self._forwarder_pid}/fd"))

    async def open_files_at_rest(self, most: int, within_s: float) -> int:
        """Of the Forwarder, as soon as there are at most `most`, or when the time is over."""
        deadline = time.monotonic() + within_s
        while (now := self.open_files()) > most and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return now

    async def when(self, engine: StockEngine, moment: str, within_s: float) -> bool:
        """Waits until a leg of this engine begins, ends or runs; False if none does in time."""
        name, before = _name(engine), None
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            legs = (await self.per_engine("legs"))[name]
            change = 0.0 if before is None else legs - before
            if (moment, True) in (("begins", change > 0), ("ends", change < 0), ("runs", legs > 0)):
                return True
            before = legs
            await asyncio.sleep(_POLL_S)
        return False

    async def back(self, engine: StockEngine, within_s: float) -> None:
        """Returns when the engine is ready and the Forwarder uses it. Raises TimeoutError."""

        async def usable() -> str:
            # Asked first: the Forwarder may not know yet that it has been killed.
            (await self._http.get(f"{engine.url}/health")).raise_for_status()
            return "" if (await self.per_engine("usable"))[_name(engine)] else "it is not used"

        if trouble := await _until_empty(usable, within_s):
            raise TimeoutError(f"{engine.role} engine {_name(engine)}: {trouble}\n{engine.tails()}")

    async def at_rest(self, within_s: float) -> str:
        """What does not come to rest in time: requests, or KV blocks in use; empty if all does."""
        return await _until_empty(self._restless, within_s)

    async def _restless(self) -> str:
        found: list[str] = []
        for engine in self.engines:
            busy = dict.fromkeys(_BUSY, 0.0)
            for name, _, value in await self._samples(engine.url):
                if name in busy:
                    busy[name] += value
            found += [f"{engine.role} {_name(engine)}: {n} {v:g}" for n, v in busy.items() if v]
        legs = await self.per_engine("legs")
        return "; ".join([*found, *(f"{name}: {n:g} legs" for name, n in legs.items() if n)])

    async def _samples(self, url: str) -> list[Sample]:
        """A parser for whole pages would take longer than what is waited for here."""
        text = (await self._http.get(f"{url}/metrics")).text
        matches = (_SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
        return [(m[1], dict(_LABEL.findall(m[2] or "")), float(m[3])) for m in matches if m]


def _name(engine: StockEngine) -> str:
    return engine.url.removeprefix("http://")


async def _until_empty(ask: Callable[[], Awaitable[str]], within_s: float) -> str:
    deadline = time.monotonic() + within_s
    while True:
        try:
            answer = await ask()
        except httpx.HTTPError as exc:
            answer = f"no answer: {type(exc).__name__}"
        if not answer or time.monotonic() > deadline:
            return answer
        await asyncio.sleep(0.2)

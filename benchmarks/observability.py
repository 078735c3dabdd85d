"""CPU time that metrics cost: of the Frontend and a decode worker, per request."""

import asyncio
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.disagg import cpu_s
from benchmarks.figures import spread, verdict
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.runtime import load

MAX_RATIO = 1.03

_CONCURRENCY = 8
_SCRAPE_S = 1.0
_SETTLE_S = 3.0

_ABOUT = """\
The same graph with the tiny model, started by turns in two ways, answers the same
streamed chat requests of 64 tokens, 8 at a time:

  bare   without vLLM's statistics in the Frontend, without KV events and load
         notices of the worker; nobody reads /metrics
  quiet  as it is by default, but nobody reads /metrics
  on     the same graph; /metrics of the Frontend's HTTP port, of its status server
         and of the worker's are read each second

With --parts also

  stats   as bare, with vLLM's statistics in the Frontend
  events  as bare, with KV events and load notices of the worker

Decisions are remembered and counted in all, since that cannot be turned off, and
tracing is off. Counted is the CPU time of the Frontend, the decode worker and its
engine; the rest of the graph is idle. A pass is one start of each graph; rounds of
quiet and on take turns in one start, and are compared by number, as are those of all
others and bare. Two starts of the same graph may differ by more than what is looked for,
above all on a busy machine.
"""


_NO_STATS = "--Frontend.disable-log-stats=true"
_NO_EVENTS = "--VllmWorker.kv-events=false"

#: What is started: options of `serve`, and the sides that it is measured as.
Starts = dict[tuple[str, ...], tuple[str, ...]]
STARTS: Starts = {(_NO_STATS, _NO_EVENTS): ("bare",), (): ("quiet", "on")}
#: With --parts.
PARTS: Starts = {(_NO_EVENTS,): ("stats",), (_NO_STATS,): ("events",)}
SIDES = [side for sides in (STARTS | PARTS).values() for side in sides]
_COMPARED = (("on", "quiet"), ("on", "bare"), ("stats", "bare"), ("events", "bare"))
#: Those of which somebody reads the metrics.
SCRAPED = ("on",)


@dataclass(frozen=True)
class Round:
    """CPU milliseconds per request."""

    side: str
    number: int
    frontend_ms: float
    worker_ms: float
    events: float

    @property
    def both_ms(self) -> float:
        return self.frontend_ms + self.worker_ms


def main() -> None:
    parser = parser_of("observability", _ABOUT)
    parser.add_argument("--passes", type=int, default=2, help="starts of each side (default 2)")
    parser.add_argument("--rounds", type=int, default=4, help="per start (default 4)")
    parser.add_argument("--requests", type=int, default=200, help="per round (default 200)")
    parser.add_argument("--parts", action="store_true", help="also each part alone")
    parser.add_argument("--quick", action="store_true", help="one pass of two small rounds")
    options = begin(parser)
    if options.quick:
        options.passes, options.rounds, options.requests = 1, 2, 60
    starts = STARTS | PARTS if options.parts else STARTS
    found: list[Round] = []
    with until_interrupted():
        for number in range(options.passes):
            for flags in (*starts,) if number % 2 == 0 else (*reversed(starts),):
                names = ", ".join(starts[flags])
                print(f"pass {number + 1} of {options.passes}: {names}", file=sys.stderr)
                first = number * options.rounds
                numbers = range(first, first + options.rounds)
                found += measure(flags, starts[flags], numbers, options.requests)
    report(found)
    write_json(options.json, [asdict(each) for each in found])


def measure(
    flags: tuple[str, ...], sides: tuple[str, ...], numbers: range, requests: int
) -> list[Round]:
    with running_graph("graphs.disagg:Frontend", "configs/disagg.yaml", *flags) as graph:
        return asyncio.run(_ask(graph, sides, numbers, requests))


async def _ask(
    graph: RunningGraph, sides: tuple[str, ...], numbers: range, requests: int
) -> list[Round]:
    found: list[Round] = []
    await load(graph.port, 4 * _CONCURRENCY, _CONCURRENCY)
    await asyncio.sleep(_SETTLE_S)
    for number in numbers:
        for side in sides if number % 2 == 0 else reversed(sides):
            async with scraping(graph if side in SCRAPED else None):
                found.append(await _round(graph, side, number, requests))
    return found


async def _round(graph: RunningGraph, side: str, number: int, requests: int) -> Round:
    pids = [graph.process(service).pid for service in ("Frontend", "VllmWorker")]
    before = [cpu_s((pid,)) for pid in pids]
    events = await load(graph.port, requests, _CONCURRENCY)
    used = [cpu_s((pid,)) - b for pid, b in zip(pids, before, strict=True)]
    frontend_ms, worker_ms = (1000 * seconds / requests for seconds in used)
    return Round(side, number, frontend_ms, worker_ms, events)


@asynccontextmanager
async def scraping(graph: RunningGraph | None) -> AsyncIterator[None]:
    """Reads all metrics each second meanwhile; None: of nobody."""
    if graph is None:
        yield
        return
    status = [graph.process(service).status_url for service in ("Frontend", "VllmWorker")]
    urls = [f"{base}/metrics" for base in (f"http://127.0.0.1:{graph.port}", *status)]
    task = asyncio.create_task(_scrape(urls))
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _scrape(urls: Sequence[str]) -> None:
    while True:
        began = time.monotonic()
        for url in urls:
            await asyncio.to_thread(_read, url)
        await asyncio.sleep(max(0.0, _SCRAPE_S - (time.monotonic() - began)))


def _read(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as answer:
        answer.read()


def report(found: list[Round]) -> None:
    """Medians, and the ratio of rounds with the same number."""
    print("CPU per streamed 64-token request; median (lowest to highest)\n")
    for name in SIDES:
        mine = [each for each in found if each.side == name]
        for part in ("frontend_ms", "worker_ms", "both_ms") if mine else ():
            values = [getattr(each, part) for each in mine]
            print(f"{name:8}{part.removesuffix('_ms'):10}{spread(values, 3)} ms")
    print()
    used = {(each.side, each.number): each.both_ms for each in found}
    for side, other in _COMPARED:
        pairs = [(ms, used.get((other, n))) for (name, n), ms in used.items() if name == side]
        ratios = [ms / base for ms, base in pairs if base]
        if ratios:
            met = statistics.median(ratios) <= MAX_RATIO
            judged = verdict(met, MAX_RATIO) if side == "on" else ""
            print(f"{f'{side} / {other}':16}{spread(ratios, 3)} x{judged}")
    events = {name: [e.events for e in found if e.side == name] for name in SIDES}
    means = (f"{name} {statistics.mean(counts):.1f}" for name, counts in events.items() if counts)
    print(f"events per answer: {', '.join(means)}")


if __name__ == "__main__":
    main()

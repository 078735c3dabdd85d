"""What an engine and a router pay for the number of others: notices of the backlog, and choices."""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of, write_json
from benchmarks.graph import ROOT
from dynamo_lite.policy.decision.backlog import IDLE_PERIOD_S, Backlogs, notice_period_s
from dynamo_lite.policy.routing.kv_chain import chain_hashes
from dynamo_lite.policy.routing.kv_index import KvIndex
from dynamo_lite.policy.routing.kv_routing import KvPicker, LoadReport, Shard
from dynamo_lite.protocol import names
from dynamo_lite.protocol.backlog import Backlog, Lane
from dynamo_lite.protocol.codec import encode
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.runtime.members.backlog import BacklogFollower
from dynamo_lite.runtime.nats.messaging import NatsMessaging
from dynamo_lite.serve.embedded import EmbeddedNats
from tests.straightforward import StraightforwardBacklogs, StraightforwardPicker

SIZES = (16, 64, 256, 512, 1000)
BLOCK_TOKENS = 64
PROMPT_TOKENS = 1024
#: So many tokens of each prompt are a system prompt that all workers hold.
SHARED_TOKENS = 256
#: Different prompts, each held by one worker or two.
PROMPTS = 1000
#: Calls of one kind before those of the next: otherwise each would find the processor's caches
#: filled by another.
_IN_A_ROW = 100

_ABOUT = f"""\
Measures, with {", ".join(map(str, SIZES))} workers:

  sum     taking one notice of the backlog into the sums of all engines, and reading the sums
  notice  the same with everything around it, over a nats-server: CPU of the engine that hears it
  pick    choosing a worker for a prompt of {PROMPT_TOKENS} tokens by prefix and load, and
          the request's end, beside the same with a look at every worker
  place   the same from the prompt's hashes, without the prompt

"old" is the straightforward way: it looks at all engines, or all workers, each time. Both ways run
in turn, in one process. Times are CPU, medians of single calls. What an engine pays for notices
is the cost of a notice times how many come: each engine sends one each {IDLE_PERIOD_S:g} s while it
is idle, and at most one per notice period while prompts come.
"""


def main() -> None:
    parser = parser_of("scale", _ABOUT)
    parser.add_argument("--calls", type=int, default=3000, help="of each kind (default 3000)")
    parser.add_argument("--quick", action="store_true", help="300 calls of each kind")
    parser.add_argument(
        "--publish", nargs=3, metavar=("URL", "ENGINES", "COUNT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.publish:
        url, engines, count = options.publish
        asyncio.run(publish(url, int(engines), int(count)))
        return
    calls = 300 if options.quick else options.calls
    found = [measure(workers, calls) for workers in SIZES]
    report(found)
    write_json(options.json, found)


def measure(workers: int, calls: int) -> dict[str, float]:
    """Times in microseconds; shares of a core."""
    print(f"{workers} workers", file=sys.stderr)
    sums, sums_old = side_by_side(
        [steps_of_sums(Backlogs(), workers), steps_of_sums(StraightforwardBacklogs(), workers)],
        calls,
    )
    pick, pick_old, place = side_by_side(
        [
            steps_of_picks(KvPicker, workers),
            steps_of_picks(StraightforwardPicker, workers),
            steps_of_picks(KvPicker, workers, hashed=True),
        ],
        calls,
    )
    notice = asyncio.run(cost_of_notices(workers, max(5 * calls, workers)))
    return {
        "workers": workers,
        "sum_us": sums,
        "sum_old_us": sums_old,
        "notice_us": notice,
        "idle_share": 1e-6 * notice * workers / IDLE_PERIOD_S,
        "busy_share": 1e-6 * notice * workers / notice_period_s(workers),
        "pick_us": pick,
        "pick_old_us": pick_old,
        "place_us": place,
    }


def side_by_side(steps: Sequence[Callable[[], None]], calls: int) -> list[float]:
    """The median time of each, in microseconds."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(0, calls, _IN_A_ROW):
        for step, into in zip(steps, times, strict=True):
            for _ in range(_IN_A_ROW):
                began = time.thread_time()
                step()
                into.append(time.thread_time() - began)
    return [1e6 * statistics.median(each) for each in times]


def notices(engines: int) -> Iterator[Backlog]:
    """Of all engines in turn."""
    rng = random.Random(engines)
    for number in itertools.count(1):
        for engine in range(engines):
            yield Backlog(
                engine_id=f"e{engine}",
                number=number,
                queued_jobs=rng.randrange(4),
                queued_tokens={Lane.SHORT: rng.randrange(2000), Lane.LONG: rng.randrange(9000)},
                claimed_jobs=1,
                claimed_tokens=rng.randrange(9000),
                done_tokens=5000 * number,
            )


def steps_of_sums(backlogs: Backlogs | StraightforwardBacklogs, engines: int) -> Callable[[], None]:
    coming = notices(engines)
    for _ in range(engines):
        backlogs.hear(next(coming), 0.0)

    def step() -> None:
        backlogs.hear(next(coming), 0.0)
        backlogs.totals(0.0)

    return step


async def cost_of_notices(engines: int, count: int) -> float:
    """CPU of a process that hears this many notices from a nats-server, in microseconds each."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedNats(Path(folder)) as server, NatsMessaging(server.url) as messaging:
            heard = asyncio.Semaphore(0)

            def on_notice(backlog: Backlog, done_tokens: int) -> None:
                follower.totals()
                heard.release()

            follower = BacklogFollower("scale", time.monotonic, on_backlog=on_notice)
            async with follower.follow(messaging):
                began = time.process_time()
                command = ["-m", "benchmarks.scale", "--publish", server.url]
                child = await asyncio.create_subprocess_exec(
                    sys.executable, *command, str(engines), str(count), cwd=ROOT
                )
                try:
                    async with asyncio.timeout(120):
                        for _ in range(count):
                            await heard.acquire()
                        await child.wait()
                finally:
                    if child.returncode is None:
                        child.kill()
                        await child.wait()
                return 1e6 * (time.process_time() - began) / count


async def publish(url: str, engines: int, count: int) -> None:
    """A little at a time, as they come from many engines."""
    async with NatsMessaging(url) as messaging:
        for number, notice in enumerate(itertools.islice(notices(engines), count)):
            await messaging.publish(names.backlog_subject("scale"), encode(notice))
            if number % 4 == 0:
                await asyncio.sleep(0.002)


class View:
    """Workers whose last reports stay valid."""

    def __init__(self, index: KvIndex, workers: int):
        rng = random.Random(workers)
        self._shard = Shard(BLOCK_TOKENS, index)
        self._reports = [
            LoadReport(rng.randrange(9), rng.randrange(9000), 0.9 * rng.random())
            for _ in range(workers)
        ]

    def load(self, lease_id: int) -> LoadReport:
        return self._reports[lease_id]

    def shard(self, lease_id: int) -> Shard:
        return self._shard


def steps_of_picks(
    kind: type[KvPicker] | type[StraightforwardPicker], workers: int, *, hashed: bool = False
) -> Callable[[], None]:
    """Each step is a request from its choice to its end. About four run at each worker."""
    rng, index = random.Random(workers), KvIndex(10_000_000)
    shared = [rng.randrange(100_000) for _ in range(SHARED_TOKENS)]
    prompts = [
        shared + [rng.randrange(100_000) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
        for _ in range(PROMPTS)
    ]
    hashes = [chain_hashes(prompt[:-1], BLOCK_TOKENS) for prompt in prompts]
    for worker in range(workers):
        index.stored(worker, chain_hashes(shared, BLOCK_TOKENS))
    for number, chain in enumerate(hashes):
        for _ in range(1 + (number % 4 == 0)):
            index.stored(rng.randrange(workers), chain)
    members = tuple(_member(worker) for worker in range(workers))
    picker: Any = kind(View(index, workers), KvRoutingOptions(), now=time.monotonic)
    for worker in range(workers):
        picker.reported(worker)
    ids, running = itertools.count(), list[str]()

    def step() -> None:
        number, request_id = rng.randrange(PROMPTS), f"r{next(ids)}"
        if hashed:
            picker.place(members, request_id, PROMPT_TOKENS, lambda size: hashes[number])
        else:
            request = GenerateRequest(
                request_id=request_id,
                client_id="",
                prompt_token_ids=prompts[number],
                sampling=b"",
                arrival_time=0.0,
            )
            picker.pick(members, request)
        picker.answered(request_id)
        running.append(request_id)
        if len(running) > 4 * workers:
            picker.released(running.pop(0))

    for _ in range(4 * workers if kind is KvPicker else 1):
        step()
    return step


def _member(worker: int) -> EndpointRecord:
    return EndpointRecord(
        component="VllmWorker",
        endpoint="generate",
        namespace="scale",
        lease_id=worker,
        transport=EndpointTransport(nats_tcp=f"generate-{worker}"),
    )


def report(found: Sequence[dict[str, float]]) -> None:
    print(f"{'workers':34s}" + "".join(f"{each['workers']:>12.0f}" for each in found))
    rows: list[tuple[str, str, Callable[[dict[str, float]], float]]] = [
        ("sum, us", "12.1f", lambda one: one["sum_us"]),
        ("  old / new", "11.1f", lambda one: one["sum_old_us"] / one["sum_us"]),
        ("notice, CPU us", "12.0f", lambda one: one["notice_us"]),
        ("all notices, idle, % of a core", "12.1f", lambda one: 100 * one["idle_share"]),
        ("all notices, at most, % of a core", "12.1f", lambda one: 100 * one["busy_share"]),
        ("pick, us", "12.0f", lambda one: one["pick_us"]),
        ("  old / new", "11.1f", lambda one: one["pick_old_us"] / one["pick_us"]),
        ("place, us", "12.0f", lambda one: one["place_us"]),
    ]
    for heading, shape, value in rows:
        ratio = "x" if "old" in heading else ""
        print(f"{heading:34s}" + "".join(f"{value(one):{shape}}{ratio}" for one in found))


if __name__ == "__main__":
    main()

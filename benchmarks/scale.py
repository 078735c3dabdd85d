"""What a router pays for the number of workers."""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.command import parser_of, write_json
from dynamo_lite.protocol.generate import GenerateRequest
from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord, EndpointTransport
from dynamo_lite.routing.kv_chain import chain_hashes
from dynamo_lite.routing.kv_index import KvIndex
from dynamo_lite.routing.kv_routing import KvPicker, LoadReport, Shard
from tests.straightforward import StraightforwardPicker

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

  pick   choosing a worker for a prompt of {PROMPT_TOKENS} tokens by prefix and load, and
         the request's end, beside the same with a look at every worker
  place  the same from the prompt's hashes, without the prompt

"old" is the straightforward way: it looks at all workers each time. All ways run in turn, in one
process. Times are CPU, medians of single calls.
"""


def main() -> None:
    parser = parser_of("scale", _ABOUT)
    parser.add_argument("--calls", type=int, default=3000, help="of each kind (default 3000)")
    parser.add_argument("--quick", action="store_true", help="300 calls of each kind")
    options = parser.parse_args()
    calls = 300 if options.quick else options.calls
    found = [measure(workers, calls) for workers in SIZES]
    report(found)
    write_json(options.json, found)


def measure(workers: int, calls: int) -> dict[str, float]:
    """Times in microseconds."""
    print(f"{workers} workers", file=sys.stderr)
    pick, pick_old, place = side_by_side(
        [
            steps_of_picks(KvPicker, workers),
            steps_of_picks(StraightforwardPicker, workers),
            steps_of_picks(KvPicker, workers, hashed=True),
        ],
        calls,
    )
    return {"workers": workers, "pick_us": pick, "pick_old_us": pick_old, "place_us": place}


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
    print(f"{'workers':14s}" + "".join(f"{each['workers']:>12.0f}" for each in found))
    rows: list[tuple[str, str, Callable[[dict[str, float]], float]]] = [
        ("pick, us", "12.0f", lambda one: one["pick_us"]),
        ("  old / new", "11.1f", lambda one: one["pick_old_us"] / one["pick_us"]),
        ("place, us", "12.0f", lambda one: one["place_us"]),
    ]
    for heading, shape, value in rows:
        ratio = "x" if "old" in heading else ""
        print(f"{heading:14s}" + "".join(f"{value(one):{shape}}{ratio}" for one in found))


if __name__ == "__main__":
    main()

"""How fast `dynamo-lite simulate` is, and how near it comes to a running graph.

    python -m benchmarks.capacity                       # 1,000 workers, 100,000 requests
    python -m benchmarks.capacity --engine --timing tiny_cpu
    python -m benchmarks.capacity --against http://127.0.0.1:8000 --workers 1P1D --timing FILE

With --engine the same requests go to a vLLM engine core in this process, whose clock is its
processor time: other processes on the machine hardly change it. With --against they are sent to a
running graph, at their times. Both medians are printed. The graph must be idle, and of the timing
file's model, --workers and thresholds.
"""

import argparse
import asyncio
import random
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.client import complete
from benchmarks.command import parser_of, write_json
from dynamo_lite.capacity.compare import parse_counts
from dynamo_lite.capacity.options import GraphModelOptions, Slo
from dynamo_lite.capacity.report import percentiles, summary
from dynamo_lite.capacity.request import TraceRequest, tokens_of
from dynamo_lite.capacity.run import Run
from dynamo_lite.capacity.scaling import Bounds, Static
from dynamo_lite.capacity.timing import Timing, read_timing
from dynamo_lite.capacity.traces import Shape, generate
from dynamo_lite.protocol.errors import ConfigError
from dynamo_lite.protocol.options import DecisionThresholds

BLOCK_TOKENS = 512
#: The targets: seconds of one core, and MiB.
MOST_CPU_S, MOST_MIB = 60.0, 1024.0
_VOCABULARY = 400


def simulated(
    requests: Sequence[TraceRequest],
    timing: Timing,
    workers: str,
    router: Any,
    thresholds: DecisionThresholds,
) -> dict[str, Any]:
    """The summary of a run, with its cost."""
    counts = parse_counts(workers)
    options = GraphModelOptions(
        router=router,
        thresholds=thresholds,
        max_jobs=max(64, 2 * thresholds.max_prefill_queue_size),
        block_tokens=BLOCK_TOKENS,
    )
    bounds = Bounds(least=parse_counts("0P1D"), most=2 * counts.total)
    began = time.process_time()
    result = Run(requests, timing, options, Static(counts), counts, bounds).run()
    cpu_s = time.process_time() - began
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**summary(result, Slo()), "cpu_s": round(cpu_s, 2), "rss_mib": round(mib, 1)}


def speed(given: argparse.Namespace) -> dict[str, Any]:
    timing, counts = read_timing(given.timing), parse_counts(given.workers)
    rate = 1.5 * counts.total
    count = 10_000 if given.quick else given.requests
    shape = Shape(
        kind="constant",
        duration_s=count / rate,
        rate=rate,
        peak=rate,
        shared_tokens=2048,
        groups=200,
        sigma=0.8,
    )
    requests = generate(shape, block_tokens=BLOCK_TOKENS, seed=given.seed).requests
    rows: dict[str, Any] = {}
    for router in ("round-robin", "kv"):
        thresholds = DecisionThresholds(max_prefill_queue_size=4 * max(counts.prefill, 2))
        run = simulated(requests, timing, given.workers, router, thresholds)
        rows[router] = {
            key: run[key] for key in ("requests", "events", "cpu_s", "rss_mib", "cached_share")
        }
        met = run["cpu_s"] < MOST_CPU_S and run["rss_mib"] < MOST_MIB
        print(
            f"{counts.total:,} workers, {len(requests):,} requests, {router}: {run['cpu_s']:.1f} s"
            f" of one core, {run['rss_mib']:.0f} MiB, {run['events']:,} events; target"
            f" {MOST_CPU_S:.0f} s, {MOST_MIB:.0f} MiB: {'met' if met else 'missed'}",
            flush=True,
        )
    return rows


def prompt_ids(number: int, request: TraceRequest) -> list[int]:
    """Equal blocks have equal tokens, all others are random."""
    shared = tokens_of(request.blocks, BLOCK_TOKENS)
    rng = random.Random(number)
    ids = [10 + value % _VOCABULARY for value in shared]
    return ids + [10 + rng.randrange(_VOCABULARY) for _ in range(request.prompt_tokens - len(ids))]


async def replay(url: str, model: str, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """Sends the requests at their times. TTFT and mean times between tokens, in seconds."""
    port = urlsplit(url).port
    if port is None:
        raise ConfigError([f"--against {url!r} has no port; accepted: http://HOST:PORT"])
    ttft: list[float] = []
    itl: list[float] = []
    total: list[float] = []
    began = time.perf_counter()

    async def one(number: int, request: TraceRequest) -> None:
        await asyncio.sleep(max(request.arrival_s - (time.perf_counter() - began), 0.0))
        answer = await complete(port, prompt_ids(number, request), request.output_tokens, model)
        ttft.append(answer.first_s)
        total.append(answer.total_s)
        if request.output_tokens > 1:
            itl.append((answer.total_s - answer.first_s) / (request.output_tokens - 1))

    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            group.create_task(one(number, request))
    return {
        "ttft_s": percentiles(ttft),
        "request_itl_s": percentiles(itl),
        "total_s": percentiles(total),
    }


def on_engine(requests: Sequence[TraceRequest], arguments: Sequence[str]) -> dict[str, Any]:
    """Plays the requests on an engine core. Its clock stands still while nothing runs."""
    from benchmarks.calibrate import TINY_ARGS, Engine
    from benchmarks.graph import TINY_MODEL

    chosen = list(arguments) or [f"--model={TINY_MODEL}", *TINY_ARGS]
    engine = Engine(chosen, time.process_time)
    for _ in range(3):  # the first steps compile and warm caches
        engine.add(1024, 4)
        while engine.busy():
            engine.step(keep=False)
    engine.records.clear()
    now, number = 0.0, 0
    by_name: dict[str, TraceRequest] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while number < len(requests) or engine.busy():
        if not engine.busy():
            now = max(now, requests[number].arrival_s)
        while number < len(requests) and requests[number].arrival_s <= now:
            request = requests[number]
            by_name[engine.add(request.prompt_tokens, request.output_tokens)] = request
            number += 1
        if (record := engine.step()) is None:
            continue
        now += record.seconds
        for name in engine.gave:
            first.setdefault(name, now)
            last[name] = now
    ttft = [first[name] - request.arrival_s for name, request in by_name.items()]
    total = [last[name] - request.arrival_s for name, request in by_name.items()]
    itl = [
        (last[name] - first[name]) / (request.output_tokens - 1)
        for name, request in by_name.items()
        if request.output_tokens > 1
    ]
    return {
        "ttft_s": percentiles(ttft),
        "request_itl_s": percentiles(itl),
        "total_s": percentiles(total),
    }


def against(given: argparse.Namespace) -> dict[str, Any]:
    timing = read_timing(given.timing)
    shape = Shape(
        kind="constant",
        duration_s=30.0 if given.quick else given.seconds,
        rate=given.rate,
        peak=given.rate,
        prompt_tokens=given.prompt_tokens,
        output_tokens=given.output_tokens,
        sigma=0.6,
    )
    requests = generate(shape, block_tokens=BLOCK_TOKENS, seed=given.seed).requests
    longest = 4096
    requests = [one for one in requests if one.prompt_tokens + one.output_tokens < longest]
    workers = "0P1D" if given.engine else given.workers
    if given.engine:
        timing = msgspec.structs.replace(timing, frontend_s=0.0)
        real = on_engine(requests, given.engine_args)
    else:
        real = asyncio.run(replay(given.against, given.model or timing.model, requests))
    thresholds = DecisionThresholds(
        max_local_prefill_length=given.max_local_prefill_length,
        max_prefill_queue_size=given.max_prefill_queue_size,
    )
    run = simulated(requests, timing, workers, given.router, thresholds)
    print(f"{len(requests)} requests in {requests[-1].arrival_s:.0f} s, {workers}")
    for name in ("ttft_s", "request_itl_s", "total_s"):
        for rank in ("p50", "p95"):
            measured, model = real[name][rank], run[name][rank]
            if measured and model:
                print(
                    f"{name:14} {rank}: {1e3 * measured:8.1f} ms measured,"
                    f" {1e3 * model:8.1f} ms simulated, {model / measured - 1:+.0%}"
                )
    if timing.held_out is not None:
        held = timing.held_out
        print(f"the timing file's own error: {held.median:.0%} median, {held.p95:.0%} p95")
    return {"measured": real, "simulated": run}


def main() -> None:
    parser = parser_of("capacity", __doc__)
    parser.add_argument("--against", metavar="URL", help="a running graph")
    parser.add_argument("--engine", action="store_true", help="a vLLM engine in this process")
    parser.add_argument(
        "--workers", default="400P600D", help="prefill and decode (default 400P600D)"
    )
    parser.add_argument("--timing", default="gpu_like", help="a timing file, or a shipped one")
    parser.add_argument("--requests", type=int, default=100_000, help="default 100000")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default 0)")
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    graph = parser.add_argument_group("with --against and --engine")
    graph.add_argument("--model", help="the served model's name; default: the timing's")
    graph.add_argument("--router", default="round-robin", help="of the graph (round-robin)")
    default = DecisionThresholds()
    graph.add_argument(
        "--max-local-prefill-length",
        type=int,
        default=default.max_local_prefill_length,
        help="of the graph (default %(default)s)",
    )
    graph.add_argument(
        "--max-prefill-queue-size",
        type=int,
        default=default.max_prefill_queue_size,
        help="of the graph (default %(default)s)",
    )
    graph.add_argument("--rate", type=float, default=1.0, help="requests per second (default 1)")
    graph.add_argument("--seconds", type=float, default=90.0, help="of requests (default 90)")
    graph.add_argument("--prompt-tokens", type=int, default=600, help="median (default 600)")
    graph.add_argument("--output-tokens", type=int, default=40, help="median (default 40)")
    parser.add_argument("engine_args", nargs="*", help="after `--`: of --engine's vLLM")
    given = parser.parse_args()
    try:
        figures = against(given) if given.against or given.engine else speed(given)
    except ConfigError as exc:
        sys.exit(f"error: {exc}")
    write_json(given.json, figures)


if __name__ == "__main__":
    main()

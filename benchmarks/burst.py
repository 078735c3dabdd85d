"""Short prompts beside a burst of long ones: in the order of arrival, and short ones first."""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.client import complete
from benchmarks.command import begin, parser_of, write_json
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.load import prompt_of

MAX_RATIO = 1.5

_LONG_TOKENS, _SHORT_TOKENS = 6000, 1024
_LONG, _SHORT = 6, 8
_EVERY_S = 1.0
_STEP_TOKENS = 128
#: All prompts fit: vLLM lets nobody pass one that waits for room in the decode engine.
_CACHE_BYTES = 256 << 20

_ABOUT = f"""\
One decode worker and one prefill worker; every prompt goes to the latter. A round is
{_SHORT} prompts of {_SHORT_TOKENS} tokens, one every {_EVERY_S:g} s: first by themselves, then as
many while {_LONG} prompts of {_LONG_TOKENS} tokens, sent all at once, are prefilled. Each of
these graphs is started in turn, and differs in `queue.short-length` alone:

  arrival      jobs in the order of their arrival: none is short
  short-first  short ones before long ones, also before those that are under way

The prefill engine's steps take {_STEP_TOKENS} tokens (max-num-batched-tokens). No prompt is taken
back: max-queue-wait-s is 60.

Prints the time to the first token of the short ones with the burst, and the median over the rounds
of its ratio to that without, both medians of a round: at most {MAX_RATIO:g} x with short-first.
"""

_FLAGS = [
    "--VllmWorker.max-prefill-queue-size=64",
    f"--VllmWorker.kv-cache-memory-bytes={_CACHE_BYTES}",
    "--VllmWorker.remote-prefill-timeout-s=60",
    "--VllmWorker.max-queue-wait-s=60",
    f"--PrefillWorker.max-num-batched-tokens={_STEP_TOKENS}",
]


@dataclass
class Result:
    """Times to first token, in ms: of short prompts by themselves and beside the burst, of long
    ones. ratios: one per round. remote: share of the prompts that were prefilled elsewhere."""

    calm_ms: list[float] = field(default_factory=list)
    burst_ms: list[float] = field(default_factory=list)
    long_ms: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    remote: float = 0.0


def main() -> None:
    parser = parser_of("burst", _ABOUT)
    parser.add_argument("--rounds", type=int, default=4, help="of each graph (default 4)")
    parser.add_argument("--quick", action="store_true", help="one round")
    options = begin(parser)
    results: dict[str, Result] = {}
    for order, flags in (("arrival", ["--Common.queue.short-length=0"]), ("short-first", [])):
        flags = [*_FLAGS, *flags]
        with running_graph("graphs.disagg:Frontend", "configs/disagg.yaml", *flags) as graph:
            rounds = 1 if options.quick else options.rounds
            results[order] = asyncio.run(measure(graph, rounds))
        print(text(order, results[order]), flush=True)
    print(f"target with short-first: {MAX_RATIO:g} x")
    write_json(options.json, {k: asdict(v) for k, v in results.items()})


async def measure(graph: RunningGraph, rounds: int) -> Result:
    rng, result = random.Random(1), Result()
    for tokens in (_SHORT_TOKENS, _LONG_TOKENS, _SHORT_TOKENS):
        await ask(graph, prompt_of(tokens, rng))
    before = _decisions(graph)
    for _ in range(rounds):
        calm_ms = await shorts(graph, rng)
        async with asyncio.TaskGroup() as group:
            long = [
                group.create_task(ask(graph, prompt_of(_LONG_TOKENS, rng))) for _ in range(_LONG)
            ]
            short = group.create_task(shorts(graph, rng))
        result.calm_ms += calm_ms
        result.burst_ms += short.result()
        result.ratios.append(statistics.median(short.result()) / statistics.median(calm_ms))
        result.long_ms += [task.result() for task in long]
    made = {verdict: count - before[verdict] for verdict, count in _decisions(graph).items()}
    result.remote = made["remote"] / sum(made.values())
    return result


async def shorts(graph: RunningGraph, rng: random.Random) -> list[float]:
    """One after another at their times, whether those before are answered or not."""
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[float]] = []
        for _ in range(_SHORT):
            await asyncio.sleep(_EVERY_S)
            tasks.append(group.create_task(ask(graph, prompt_of(_SHORT_TOKENS, rng))))
    return [task.result() for task in tasks]


async def ask(graph: RunningGraph, prompt: list[int]) -> float:
    """Returns the time to the first token, in ms."""
    return 1e3 * (await complete(graph.port, prompt, 2)).first_s


def _decisions(graph: RunningGraph) -> dict[str, float]:
    made = {"local": 0.0, "remote": 0.0}
    for name, value in graph.metrics("VllmWorker").items():
        if name.startswith("dynamo_lite_prefill_decisions_total"):
            made["remote" if 'verdict="remote"' in name else "local"] += value
    return made


def text(order: str, result: Result) -> str:
    return (
        f"{order:12s} short: {_spread(result.calm_ms)} alone, {_spread(result.burst_ms)} with the"
        f" burst: {statistics.median(result.ratios):.2f} x   long: {_spread(result.long_ms)}"
        f"   ({result.remote:.0%} prefilled elsewhere)"
    )


def _spread(times_ms: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(times_ms, n=4)
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()

"""A burst of long prompts whose prefill worker stands still half-way, with a limit to their wait
and without."""

import asyncio
import os
import random
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks import intervals
from benchmarks.burst import ask
from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.load import prompt_of

_TOKENS, _LOCAL_TOKENS = 3000, 400
#: All prompts fit: vLLM lets nobody pass one that waits for room in the decode engine.
_CACHE_BYTES = 256 << 20

#: Side -> `max-queue-wait-s`. The first one is beyond the play.
SIDES = {"off": "600", "on": "2"}

_ABOUT = f"""\
One decode worker and one prefill worker with the tiny model; every prompt has {_TOKENS} tokens and
goes to the latter. A play sends --prompts of them at once. When half of them have their first
token, the prefill worker's engine is stopped (SIGSTOP) for --stall-s, which is less than the 4 s
after which a silent worker is given up. A pair is two plays on the same graph, one after the other:

  off  max-queue-wait-s: {SIDES["off"]}
  on   max-queue-wait-s: {SIDES["on"]}

Every second pair begins with the other one. Prints the 99th percentile of the time to the first
token, and its ratio on / off.
"""

_FLAGS = [
    "--VllmWorker.max-prefill-queue-size=64",
    f"--VllmWorker.kv-cache-memory-bytes={_CACHE_BYTES}",
    "--VllmWorker.remote-prefill-timeout-s=60",
]


@dataclass
class Play:
    """Times to the first tokens, in ms, and how many prompts were taken back."""

    first_ms: list[float]
    taken_back: float

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles(self.first_ms, n=100, method="inclusive")[98]


Pair = dict[str, Play]


def main() -> None:
    parser = parser_of("stalled", _ABOUT)
    parser.add_argument("--pairs", type=int, default=8, help="of plays (default 8)")
    parser.add_argument("--prompts", type=int, default=16, help="of a play (default 16)")
    parser.add_argument(
        "--stall-s", type=float, default=3.5, help="how long it stands (default 3.5)"
    )
    parser.add_argument("--quick", action="store_true", help="two pairs")
    options = begin(parser)
    pairs: list[Pair] = []
    count = 2 if options.quick else options.pairs
    with running_graph("graphs.disagg:Frontend", "configs/disagg.yaml", *_FLAGS) as graph:
        with until_interrupted():
            asyncio.run(measure(graph, count, options.prompts, options.stall_s, pairs))
    report(pairs)
    found = [{side: asdict(play) for side, play in pair.items()} for pair in pairs]
    write_json(options.json, found)


async def measure(
    graph: RunningGraph, count: int, prompts: int, stall_s: float, into: list[Pair]
) -> None:
    """Appends each pair when it is whole."""
    rng = random.Random(1)
    for tokens in (_LOCAL_TOKENS, _TOKENS):
        await ask(graph, prompt_of(tokens, rng))
    for number in range(count):
        pair: Pair = {}
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            await asyncio.to_thread(graph.set_options, "VllmWorker", max_queue_wait_s=SIDES[side])
            pair[side] = await _play(graph, prompts, stall_s, rng)
        into.append(pair)
        print(f"pair {number + 1} of {count}: {_described(pair)}", file=sys.stderr, flush=True)


async def _play(graph: RunningGraph, prompts: int, stall_s: float, rng: random.Random) -> Play:
    before, engine = _taken_back(graph), graph.engine_pid("PrefillWorker")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(graph, prompt_of(_TOKENS, rng))) for _ in range(prompts)]
        for number, answered in enumerate(asyncio.as_completed(tasks), 1):
            await answered
            if number == prompts // 2:
                group.create_task(_stall(engine, stall_s))
    return Play([task.result() for task in tasks], _taken_back(graph) - before)


async def _stall(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def _taken_back(graph: RunningGraph) -> float:
    return graph.metrics("VllmWorker").get(
        'dynamo_lite_remote_prefills_total{outcome="taken_back"}', 0.0
    )


def report(pairs: Sequence[Pair]) -> None:
    if not pairs:
        print("no pair was measured")
        return
    for side in SIDES:
        plays = [pair[side] for pair in pairs]
        times = ", ".join(f"{play.p99_ms:.0f}" for play in plays)
        taken = sum(play.taken_back for play in plays) / sum(len(play.first_ms) for play in plays)
        print(f"{side:4} p99 of the time to first token: {times} ms; {taken:.0%} taken back")
    ratio = intervals.of_ratio(ratios(pairs))
    print(
        f"on / off, mean of {len(pairs)} pairs: {ratio.mean:.2f} x"
        f" (95 % confidence interval {ratio.low:.2f} to {ratio.high:.2f})"
    )


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """The 99th percentile with the limit over that without, of each pair."""
    return [pair["on"].p99_ms / pair["off"].p99_ms for pair in pairs]


def _described(pair: Pair) -> str:
    shown = (f"{side} {play.p99_ms:.0f} ms ({play.taken_back:g})" for side, play in pair.items())
    return f"{', '.join(shown)}: {ratios([pair])[0]:.2f} x"


if __name__ == "__main__":
    main()

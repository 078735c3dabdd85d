"""Unloaded time to first token of remote prefills against local ones, and where it goes."""

import argparse
import asyncio
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from benchmarks.client import Answer, complete
from benchmarks.command import begin, parser_of, write_json
from benchmarks.figures import quartiles, verdict
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.load import prompt_of

MAX_OVERHEAD_MS = 4.0
JUDGED_TOKENS = 1024

_STATS_S = 5.0
_STATS_POLL_S = 0.005
_PAUSE_S = 0.05

#: Stage, histogram, service whose metrics have it.
_STAGE = "dynamo_lite_remote_prefill_stage_seconds"
_SOURCES = {
    "decide": (_STAGE, "VllmWorker"),
    "queue": (_STAGE, "VllmWorker"),
    "fill": (_STAGE, "VllmWorker"),
    "resume": (_STAGE, "VllmWorker"),
    "wait": (_STAGE, "PrefillWorker"),
    "compute": (_STAGE, "PrefillWorker"),
    "write": (_STAGE, "PrefillWorker"),
}

_ABOUT = f"""\
Two graphs run side by side on the same nats-server and etcd: one hands every
prompt of more than 128 tokens to its prefill worker, the other prefills all
itself. Each round sends one fresh random prompt of each length to both, one at a
time, in alternating order, and takes the time to the first streamed token.

A prompt of one token's answer gets this token from the decode engine (`remote`). Then the first
graph gets another prompt of the same length and an answer of two tokens, of which the
first comes from the prefill worker (`early token`); --no-early-token switches that off
in the graph (first-token-from-prefill: false), for a comparison of the same requests.

The split comes from the workers' own metrics ({_STAGE}),
read before and after each request:

  decide    decode engine: from its look at the prompt to the job in hand
  queue     until a prefill worker has pulled and claimed it
  fill      from the claim until the decode engine has noticed that all KV is there:
    wait      prefill engine: from arrival to its first step
    compute   from there to the last write
    write     the last write, which carries the commit
    notice    the rest of fill: the claim's answer, the job on its way into the prefill
              engine, the notice on its way into the decode one
  resume    decode engine: until the request is scheduled for its first token

The sum without compute is to be at most {MAX_OVERHEAD_MS:g} ms at {JUDGED_TOKENS} tokens, on two
cores that have nothing else to do.
"""


@dataclass
class Length:
    """Milliseconds, one number per round. wrong: rounds whose first tokens differed."""

    tokens: int
    local: list[float] = field(default_factory=list)
    remote: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in _ROWS})
    wrong: int = 0
    skipped: int = 0


_ROWS = ("decide", "queue", "wait", "compute", "write", "notice", "resume")
_OVERHEAD = tuple(stage for stage in _ROWS if stage != "compute")


def main() -> None:
    parser = parser_of("handover", _ABOUT)
    parser.add_argument("--rounds", type=int, default=20, help="per length (default 20)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 1024, 4096], help="prompt lengths"
    )
    parser.add_argument(
        "--no-early-token", action="store_true", help="all first tokens from the decode engine"
    )
    options = begin(parser)
    with ExitStack() as stack:
        remote = stack.enter_context(
            running_graph(
                "graphs.disagg:Frontend",
                "configs/disagg.yaml",
                "--VllmWorker.max-local-prefill-length=128",
                f"--VllmWorker.first-token-from-prefill={_yaml(not options.no_early_token)}",
            )
        )
        local = stack.enter_context(
            running_graph(
                "graphs.agg:Frontend",
                "configs/agg.yaml",
                *("--namespace", "local", "--nats-url", remote.run.nats),
                *("--etcd-url", remote.run.etcd),
            )
        )
        lengths = asyncio.run(measure(remote, local, options))
    report(lengths, options.rounds)
    write_json(options.json, [asdict(length) for length in lengths])


async def measure(
    remote: RunningGraph, local: RunningGraph, options: argparse.Namespace
) -> list[Length]:
    lengths = [Length(tokens) for tokens in options.tokens]
    warm_up = [Length(tokens) for tokens in options.tokens] * 2
    for length in warm_up:
        await one_round(length, remote, local, remote_first=True)
    for number in range(options.rounds):
        for length in lengths:
            await one_round(length, remote, local, remote_first=number % 2 == 0)
    return lengths


async def one_round(
    length: Length, remote: RunningGraph, local: RunningGraph, *, remote_first: bool
) -> None:
    """The same prompt to both graphs. A prompt that was not handed over does not count."""
    rng = random.Random()
    prompt = prompt_of(length.tokens, rng)
    before = Totals(remote)
    if remote_first:
        there, here = await ask(remote, prompt), await ask(local, prompt)
    else:
        here, there = await ask(local, prompt), await ask(remote, prompt)
    stages = await before.wait_for_one()
    if stages is None:
        length.skipped += 1
        return
    early = await ask(remote, prompt_of(length.tokens, rng), tokens=2)
    length.early.append(1000 * early.first_s)
    length.local.append(1000 * here.first_s)
    length.remote.append(1000 * there.first_s)
    length.wrong += here.text != there.text
    stages["notice"] = stages["fill"] - stages["wait"] - stages["compute"] - stages["write"]
    for stage, values in length.stages.items():
        values.append(1000 * stages[stage])


async def ask(
    graph: RunningGraph, prompt: list[int], model: str = "tiny", *, tokens: int = 1
) -> Answer:
    await asyncio.sleep(_PAUSE_S)
    return await complete(graph.port, prompt, tokens, model)


class Totals:
    """What the workers have counted so far."""

    def __init__(self, graph: RunningGraph):
        self._graph = graph
        self._before = self._read()

    async def wait_for_one(self) -> dict[str, float] | None:
        """Seconds per stage of the one remote prefill since; None when there was none.

        Statistics leave an engine with a later step, so they are waited for.
        """
        deadline = time.monotonic() + _STATS_S
        while time.monotonic() < deadline:
            now = self._read()
            done = {stage: now[stage][0] - self._before[stage][0] for stage in _SOURCES}
            if set(done.values()) == {1.0}:
                return {stage: now[stage][1] - self._before[stage][1] for stage in _SOURCES}
            await asyncio.sleep(_STATS_POLL_S)
        return None

    def _read(self) -> dict[str, tuple[float, float]]:
        """Count and sum of each stage."""
        samples = {name: self._graph.metrics(name) for name in ("VllmWorker", "PrefillWorker")}
        return {
            stage: (
                samples[service].get(f'{name}_count{{stage="{stage}"}}', 0.0),
                samples[service].get(f'{name}_sum{{stage="{stage}"}}', 0.0),
            )
            for stage, (name, service) in _SOURCES.items()
        }


def report(lengths: list[Length], rounds: int) -> None:
    print(f"unloaded time to first token in ms, median (quartiles) of {rounds} rounds\n")
    columns = ("local", "remote", "remote - local", "early token")
    print(f"{'prompt':>8}" + "".join(f"{column:>22}" for column in columns))
    for length in lengths:
        more = [r - h for r, h in zip(length.remote, length.local, strict=True)]
        rows = (length.local, length.remote, more, length.early)
        print(f"{length.tokens:8}" + "".join(f"{quartiles(values, 1):>22}" for values in rows))
    print("\nsplit of the remote path in ms, median (quartiles)\n")
    print(f"{'':12}" + "".join(f"{length.tokens:>20}" for length in lengths))
    for stage in _ROWS:
        print(f"{stage:12}" + "".join(f"{quartiles(x.stages[stage], 1):>20}" for x in lengths))
    print(f"{'not compute':12}" + "".join(f"{quartiles(overhead(x), 1):>20}" for x in lengths))
    for length in lengths:
        if length.tokens == JUDGED_TOKENS and length.remote:
            middle = statistics.median(overhead(length))
            print(f"\nnot compute at {JUDGED_TOKENS} tokens {middle:.1f} ms", end="")
            print(verdict(middle <= MAX_OVERHEAD_MS, MAX_OVERHEAD_MS))
        if length.skipped or length.wrong:
            print(
                f"{length.tokens} tokens: {length.skipped} rounds not handed over,"
                f" {length.wrong} with another first token"
            )


def _yaml(value: bool) -> str:
    return str(value).lower()


def overhead(length: Length) -> list[float]:
    """Per round: all stages but compute."""
    return [sum(row) for row in zip(*(length.stages[s] for s in _OVERHEAD), strict=True)]


if __name__ == "__main__":
    main()

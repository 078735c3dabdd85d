"""What is left to do after the last computed chunk, with writes streamed and at the end."""

import asyncio
import random
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.figures import quartiles, verdict
from benchmarks.graph import (
    RunningGraph,
    make_bench_model,
    running_graph,
)
from benchmarks.handover import Totals, ask
from benchmarks.load import prompt_of

CONFIG = "benchmarks/disagg.yaml"
CHUNK_TOKENS = 256
WHOLE_TOKENS = 8192
KINDS = {"on": CHUNK_TOKENS, "off": WHOLE_TOKENS}
STAGES = ("write", "notice", "resume")
MAX_GROWTH_MS = 1.0

_ABOUT = f"""\
Two graphs side by side on the same servers differ in one number, the prefill
worker's max-num-batched-tokens:

  on   {CHUNK_TOKENS}: the prompt is computed in chunks, and the blocks of each are written
       while the next one is computed; the last write holds what is left
  off  {WHOLE_TOKENS}: one chunk, one write of all blocks at its end

Fresh random prompts of each length go to both in turn. The handover is what the
workers' own metrics show outside the computing, from the claim on (see
`benchmarks.handover --help`): write, notice and resume. With streaming on it is not
to grow by more than {MAX_GROWTH_MS:g} ms from the shortest prompt to the longest.
"""


@dataclass
class Length:
    """Milliseconds by stage, one number per round."""

    kind: str
    tokens: int
    stages: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in STAGES})
    first: list[float] = field(default_factory=list)
    skipped: int = 0

    @property
    def handover(self) -> list[float]:
        return [sum(row) for row in zip(*self.stages.values(), strict=True)]


def main() -> None:
    parser = parser_of("streaming", _ABOUT)
    parser.add_argument("--rounds", type=int, help="per length (default 7; 2 with --quick)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[288, 512, 1024, 2048, 4096], help="prompt lengths"
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, for trying")
    options = begin(parser)
    make_bench_model()
    rounds = options.rounds or (2 if options.quick else 7)
    lengths = [Length(kind, tokens) for tokens in options.tokens for kind in KINDS]
    with until_interrupted():
        with ExitStack() as stack:
            graphs = start(stack)
            asyncio.run(measure(graphs, lengths, rounds))
    report(lengths)
    found = [{**asdict(length), "handover": length.handover} for length in lengths]
    write_json(options.json, {"streaming": found})


def start(stack: ExitStack) -> dict[str, RunningGraph]:
    graphs: dict[str, RunningGraph] = {}
    for kind, chunk in KINDS.items():
        options = [f"--PrefillWorker.max-num-batched-tokens={chunk}", "--namespace", kind]
        if graphs:
            run = graphs["on"].run
            options += ["--nats-url", run.nats, "--etcd-url", run.etcd]
        graphs[kind] = stack.enter_context(
            running_graph("graphs.disagg:Frontend", CONFIG, *options)
        )
    return graphs


async def measure(graphs: dict[str, RunningGraph], lengths: list[Length], rounds: int) -> None:
    for length in lengths[:2] + lengths[-2:]:
        await one(graphs, Length(length.kind, length.tokens))
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for length in lengths if number % 2 else reversed(lengths):
            await one(graphs, length)


async def one(graphs: dict[str, RunningGraph], length: Length) -> None:
    """One prompt; it does not count when it was not handed over."""
    graph = graphs[length.kind]
    before = Totals(graph)
    answer = await ask(graph, prompt_of(length.tokens, random.Random()), "bench")
    stages = await before.wait_for_one()
    if stages is None:
        length.skipped += 1
        return
    stages["notice"] = stages["fill"] - stages["wait"] - stages["compute"] - stages["write"]
    length.first.append(1000 * answer.first_s)
    for stage, values in length.stages.items():
        values.append(1000 * stages[stage])


def report(lengths: list[Length]) -> None:
    print("ms, median (quartiles)\n")
    columns = ("handover", *STAGES, "time to first token")
    print(f"{'tokens':>8}{'streaming':>11}" + "".join(f"{name:>26}" for name in columns))
    for length in lengths:
        rows = (length.handover, *length.stages.values(), length.first)
        texts = "".join(f"{quartiles(values, 1):>26}" for values in rows)
        skipped = f"   {length.skipped} not handed over" if length.skipped else ""
        print(f"{length.tokens:8}{length.kind:>11}{texts}{skipped}")
    for kind in KINDS:
        mine = [length for length in lengths if length.kind == kind and length.handover]
        if len(mine) < 2:
            continue
        growth = statistics.median(mine[-1].handover) - statistics.median(mine[0].handover)
        line = f"\n{kind}: {growth:+.1f} ms from {mine[0].tokens} to {mine[-1].tokens} tokens"
        if kind == "on":
            line += verdict(growth <= MAX_GROWTH_MS, MAX_GROWTH_MS)
        print(line, end="")
    print()


if __name__ == "__main__":
    main()

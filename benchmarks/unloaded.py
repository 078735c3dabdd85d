"""Unloaded time to first token, remote and local in one graph, and of a plain `vllm serve`."""

import asyncio
import random
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

from benchmarks.client import complete
from benchmarks.command import begin, parser_of, until_interrupted, write_json
from benchmarks.figures import quartiles
from benchmarks.graph import RunningGraph, make_bench_model
from benchmarks.handover import Totals, ask
from benchmarks.load import prompt_of
from benchmarks.systems import add_dtype, bench_graph, engine, ready

#: Prompts of up to so many tokens are prefilled locally.
MODES = {"local": 8192, "remote": 128}
STAGES = ("decide", "queue", "wait", "compute", "write", "notice", "resume")

_ABOUT = """\
Two servers of the same random Llama of 119 million parameters, up at the same time:

  plain  one `vllm serve`, on the core of the graph's decode engine (see --core-of)
  graph  benchmarks/disagg.yaml: prefill engine and decode engine on a core each

The graph's max-local-prefill-length changes after each round, so all its prompts are
prefilled locally in one round and remotely in the next. Each fresh random prompt goes
to both servers, one at a time, in alternating order. Ratios are of such pairs.

The stages of remote prefills are those of `benchmarks.handover --help`. With
--answer 2, the first of two tokens comes from the prefill worker, which may be before
the last of these stages.
"""


#: The core of each engine in benchmarks/disagg.yaml.
_CORES = {"decode": 1, "prefill": 0}


@dataclass
class Pairs:
    """Time to first token in milliseconds, pair by pair. wrong: pairs of unequal first tokens.

    stages: of remote prefills; empty for local ones.
    """

    tokens: int
    mode: str
    graph: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0
    skipped: int = 0

    @property
    def ratios(self) -> list[float]:
        return [mine / theirs for mine, theirs in zip(self.graph, self.plain, strict=True)]

    @property
    def overhead(self) -> list[float]:
        """Milliseconds of all stages but compute."""
        stages = [self.stages[stage] for stage in STAGES if stage != "compute"]
        return [sum(row) for row in zip(*stages, strict=True)]


def main() -> None:
    parser = parser_of("unloaded", _ABOUT)
    parser.add_argument("--rounds", type=int, default=6, help="of either mode (default 6)")
    parser.add_argument("--pairs", type=int, default=4, help="per round and length (default 4)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 1024, 4096], help="prompt lengths"
    )
    parser.add_argument(
        "--core-of",
        choices=list(_CORES),
        default="decode",
        help="the engine of the graph that shares its core with plain (default decode)",
    )
    add_dtype(parser)
    parser.add_argument("--answer", type=int, default=1, help="tokens asked for (default 1)")
    options = begin(parser)
    make_bench_model()
    found = [Pairs(tokens, mode) for mode in MODES for tokens in options.tokens]
    with until_interrupted(), ExitStack() as stack:
        plain = stack.enter_context(engine(_CORES[options.core_of], options.dtype))
        graph = stack.enter_context(bench_graph(options.dtype))
        ready([plain])
        warm_up = [Pairs(pairs.tokens, pairs.mode) for pairs in found]
        asyncio.run(measure(graph, plain.port, warm_up, rounds=1, pairs=2, answer=1))
        asyncio.run(
            measure(graph, plain.port, found, options.rounds, options.pairs, options.answer)
        )
    report(found)
    write_json(options.json, [asdict(pairs) for pairs in found])


async def measure(
    graph: RunningGraph,
    plain: int,
    found: list[Pairs],
    rounds: int,
    pairs: int,
    answer: int,
) -> None:
    for _ in range(rounds):
        for mode, length in MODES.items():
            graph.set_options("VllmWorker", max_local_prefill_length=str(length))
            for number in range(pairs):
                for each in found:
                    if each.mode == mode:
                        await one_pair(each, graph, plain, answer, graph_first=number % 2 == 0)


async def one_pair(
    pairs: Pairs, graph: RunningGraph, plain: int, answer: int, *, graph_first: bool
) -> None:
    """The same prompt to both. It does not count if it should have been handed over and was not."""
    prompt = prompt_of(pairs.tokens, random.Random())
    before = Totals(graph)
    if graph_first:
        mine = await ask(graph, prompt, "bench", tokens=answer)
        theirs = await complete(plain, prompt, answer, "bench")
    else:
        theirs = await complete(plain, prompt, answer, "bench")
        mine = await ask(graph, prompt, "bench", tokens=answer)
    if pairs.mode == "remote":
        stages = await before.wait_for_one()
        if stages is None:
            pairs.skipped += 1
            return
        stages["notice"] = stages["fill"] - stages["wait"] - stages["compute"] - stages["write"]
        for stage in STAGES:
            pairs.stages.setdefault(stage, []).append(1000 * stages[stage])
    pairs.graph.append(1000 * mine.first_s)
    pairs.plain.append(1000 * theirs.first_s)
    pairs.wrong += mine.text != theirs.text


def report(found: list[Pairs]) -> None:
    print("unloaded time to first token in ms, median (quartiles)\n")
    print(f"{'prompt':>8}{'graph':>8}{'graph':>26}{'plain':>26}{'graph / plain':>22}")
    for pairs in found:
        figures = (quartiles(pairs.graph, 1), quartiles(pairs.plain, 1))
        print(
            f"{pairs.tokens:8}{pairs.mode:>8}" + "".join(f"{text:>26}" for text in figures), end=""
        )
        print(f"{quartiles(pairs.ratios, 3):>22}")
        if pairs.skipped or pairs.wrong:
            print(f"{'':8}{pairs.skipped} not handed over, {pairs.wrong} other first tokens")
    print("\nremote prefills, ms, median (quartiles)\n")
    print(f"{'prompt':>8}{'compute':>26}{'not compute':>22}{'rest beyond plain':>26}")
    for pairs in found:
        if pairs.stages:
            rows = zip(pairs.graph, pairs.plain, pairs.overhead, strict=True)
            rest = [mine - theirs - overhead for mine, theirs, overhead in rows]
            compute = quartiles(pairs.stages["compute"], 1)
            print(f"{pairs.tokens:8}{compute:>26}{quartiles(pairs.overhead, 1):>22}", end="")
            print(f"{quartiles(rest, 1):>26}")


if __name__ == "__main__":
    main()

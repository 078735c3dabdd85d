"""Growing chats with shared system prompts over two decode workers: routers compared."""

import asyncio
import random
import statistics
from dataclasses import asdict, dataclass, field

from benchmarks.client import Connection, connect
from benchmarks.command import begin, parser_of, write_json
from benchmarks.graph import RunningGraph, running_graph
from benchmarks.load import prompt_of

MIN_SHARE = 0.9

_SYSTEMS = 3
_SYSTEM_TOKENS = 512
_TURN_TOKENS = 160
_ANSWER_TOKENS = 8
_AT_A_TIME = 6
_CACHE_BYTES = 64 << 20

_ABOUT = f"""\
Chats that begin with one of {_SYSTEMS} system prompts of {_SYSTEM_TOKENS} tokens and grow by
{_TURN_TOKENS} tokens a turn, {_AT_A_TIME} of them at a time. Each of these is started in turn:

  one          one decode worker with twice the KV cache: what can be had
  kv           two decode workers, router kv
  round-robin  two decode workers, router round-robin

Prints the prefix hit rate (cached tokens of all prompts, as vLLM's usage says) and the time to the
first token. The hit rate of kv is to be at least {MIN_SHARE:g} of that of one. On two cores two
engines take turns, and times tell more of that than of routers.
"""

#: Workers, router, KV cache of each worker.
_SETUPS = {
    "one": (1, "round-robin", 2 * _CACHE_BYTES),
    "kv": (2, "kv", _CACHE_BYTES),
    "round-robin": (2, "round-robin", _CACHE_BYTES),
}


@dataclass
class Result:
    """first_ms: one per request, without the first turns, which nobody can have cached."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_ms: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def main() -> None:
    parser = parser_of("chats", _ABOUT)
    parser.add_argument("--chats", type=int, default=32, help="how many (default 32)")
    parser.add_argument("--turns", type=int, default=6, help="of each (default 6)")
    parser.add_argument("--quick", action="store_true", help="12 chats")
    options = begin(parser)
    if options.quick:
        options.chats = 12
    results: dict[str, Result] = {}
    for name, (workers, router, cache_bytes) in _SETUPS.items():
        flags = [
            f"--VllmWorker.ServiceArgs.workers={workers}",
            f"--Frontend.router={router}",
            f"--VllmWorker.kv-cache-memory-bytes={cache_bytes}",
            "--Frontend.enable-prompt-tokens-details=true",
        ]
        with running_graph("graphs.agg:Frontend", "configs/agg.yaml", *flags) as graph:
            results[name] = asyncio.run(measure(graph, options.chats, options.turns))
        print(line(name, results[name]), flush=True)
    share = results["kv"].hit_rate / results["one"].hit_rate
    print(f"kv / one: {share:.3f} (target {MIN_SHARE:g})")
    write_json(options.json, {k: asdict(v) for k, v in results.items()})


async def measure(graph: RunningGraph, chats: int, turns: int) -> Result:
    """The same chats every time; which turns meet depends on their answers."""
    rng = random.Random(1)
    systems = [prompt_of(_SYSTEM_TOKENS, rng) for _ in range(_SYSTEMS)]
    prompts = [systems[i % _SYSTEMS] + prompt_of(turns * _TURN_TOKENS, rng) for i in range(chats)]
    result, waiting = Result(), list(prompts)

    async def talk() -> None:
        async with connect(graph.port) as connection:
            while waiting:
                await chat(connection, waiting.pop(0), turns, result)

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_A_TIME):
            group.create_task(talk())
    return result


async def chat(connection: Connection, prompt: list[int], turns: int, result: Result) -> None:
    for turn in range(1, turns + 1):
        body = {
            "model": "tiny",
            "prompt": prompt[: _SYSTEM_TOKENS + turn * _TURN_TOKENS],
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        answer = await connection.stream("/v1/completions", body)
        usage = answer.events[-1]["usage"]
        result.prompt_tokens += usage["prompt_tokens"]
        result.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if turn > 1:
            result.first_ms.append(1e3 * answer.first_s)


def line(name: str, result: Result) -> str:
    tenths = statistics.quantiles(result.first_ms, n=10)
    return (
        f"{name:12s} hit rate {result.hit_rate:.3f}   first token: median"
        f" {statistics.median(result.first_ms):.0f} ms, 90 % within {tenths[8]:.0f} ms"
    )


if __name__ == "__main__":
    main()

"""The workloads of benchmarks/disagg.py, against whatever listens on a port."""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.load import Streamed, ask, prompt_of

STREAMS = 8
STREAM_PROMPT, STREAM_TOKENS = 64, 200
LONG_PROMPTS, LONG_TOKENS = (2048, 3072, 4096), 16
TTFT_LENGTHS = (100, 500, 1000, 2000, 4000)
MIX_SHORT, MIX_LONG = (64, 256), (1500, 3000)
MIX_TOKENS, MIX_CLIENTS = 32, 4
MIX_SHARE_LONG = 0.25
QUANTILES = 200


@dataclass(frozen=True)
class Sizes:
    """How long a run is. Seconds, and numbers of requests."""

    settle_s: float
    calm_s: float
    loaded_s: float
    lengths: tuple[int, ...]
    mix_requests: int


#: A stream lasts about eight seconds, and its successor's prompt is prefilled beside the others:
#: both spans must be long enough to see that, or their percentiles do not compare.
FULL = Sizes(3.0, 15.0, 30.0, TTFT_LENGTHS, 24)
QUICK = Sizes(1.0, 10.0, 10.0, (100, 1000), 6)

Result = dict[str, object]


async def warm_up(port: int, seed: int) -> None:
    """First meetings, and code paths that are compiled or loaded at their first use."""
    rng = random.Random(seed)
    for tokens in (40, 40, 700, 1500):
        await ask(port, prompt_of(tokens, rng), 4)
    await asyncio.gather(*(ask(port, prompt_of(64, rng), 8) for _ in range(STREAMS)))


async def interference(port: int, sizes: Sizes, seed: int) -> Result:
    """Decoding streams, first by themselves, then while long prompts come one after another."""
    rng = random.Random(seed)
    background: list[Streamed] = []
    long: list[Streamed] = []
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(STREAMS):
            group.create_task(_streams(port, random.Random(rng.random()), background, stop))
        await asyncio.sleep(sizes.settle_s)
        calm = await _span(sizes.calm_s)
        prompts = group.create_task(_long_prompts(port, rng, long, stop))
        loaded = await _span(sizes.loaded_s)
        stop.set()
        # What is still on its way when the time is up does not count.
        prompts.cancel()
    answers = [answer for answer in long if answer.events and answer.events[0] < loaded[1]]
    return {
        "calm_itl_ms": _gaps(background, calm),
        "itl_ms": _gaps(background, loaded),
        "calm_tokens_per_s": _rate(background, calm),
        "tokens_per_s": _rate([*background, *long], loaded),
        "long_ttft_ms": {
            str(tokens): [1000 * a.first_s for a in answers if a.prompt_tokens == tokens]
            for tokens in LONG_PROMPTS
        },
        "long_prompts": len(answers),
    }


async def unloaded(port: int, sizes: Sizes, seed: int) -> Result:
    """Time to first token of one prompt at a time."""
    rng = random.Random(seed)
    found: dict[str, float] = {}
    for tokens in sizes.lengths:
        answer = await ask(port, prompt_of(tokens, rng), 2)
        found[str(tokens)] = 1000 * answer.first_s
    return {"ttft_ms": found}


async def mix(port: int, sizes: Sizes, seed: int) -> Result:
    """Short and long prompts from a few clients, each as fast as it is answered."""
    rng = random.Random(seed)
    todo = [
        prompt_of(
            rng.randint(*(MIX_LONG if i % round(1 / MIX_SHARE_LONG) == 1 else MIX_SHORT)), rng
        )
        for i in range(sizes.mix_requests)
    ]
    left = iter(todo)
    answers: list[Streamed] = []

    async def client() -> None:
        for prompt in left:
            await ask(port, prompt, MIX_TOKENS, answers)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(MIX_CLIENTS):
            group.create_task(client())
    ended = time.perf_counter()
    short = [1000 * a.first_s for a in answers if a.prompt_tokens <= MIX_SHORT[1]]
    long = [1000 * a.first_s for a in answers if a.prompt_tokens >= MIX_LONG[0]]
    return {
        "short_ttft_ms": short,
        "long_ttft_ms": long,
        "itl_ms": _gaps(answers, (started, ended)),
        "seconds": ended - started,
        "tokens_per_s": _rate(answers, (started, ended)),
    }


#: Name in the results -> workload.
WORKLOADS: dict[str, Callable] = {"interference": interference, "unloaded": unloaded, "mix": mix}


async def _streams(
    port: int, rng: random.Random, into: list[Streamed], stop: asyncio.Event
) -> None:
    # They begin one after another, so that their ends do not fall together either.
    await asyncio.sleep(rng.random())
    while not stop.is_set():
        await ask(port, prompt_of(STREAM_PROMPT, rng), STREAM_TOKENS, into)


async def _long_prompts(
    port: int, rng: random.Random, into: list[Streamed], stop: asyncio.Event
) -> None:
    number = 0
    while not stop.is_set():
        tokens = LONG_PROMPTS[number % len(LONG_PROMPTS)]
        await ask(port, prompt_of(tokens, rng), LONG_TOKENS, into)
        number += 1


async def _span(seconds: float) -> tuple[float, float]:
    started = time.perf_counter()
    await asyncio.sleep(seconds)
    return started, time.perf_counter()


def _gaps(answers: Sequence[Streamed], span: tuple[float, float]) -> dict[str, object]:
    """Percentiles of the time between two events of an answer, in ms."""
    gaps = sorted(1000 * gap for answer in answers for gap in answer.gaps(*span))
    if len(gaps) < 2:
        return {"count": len(gaps)}
    cuts = statistics.quantiles(gaps, n=QUANTILES, method="inclusive")
    return {
        "count": len(gaps),
        "p50": cuts[QUANTILES // 2 - 1],
        "p95": cuts[QUANTILES * 95 // 100 - 1],
        "p99": cuts[QUANTILES * 99 // 100 - 1],
        "max": gaps[-1],
        "quantiles": [gaps[0], *cuts, gaps[-1]],
    }


def _rate(answers: Sequence[Streamed], span: tuple[float, float]) -> float:
    """Tokens per second: those that came, and the prompts whose first token did.

    A prompt counts by the share of its time to first token that falls into the span.
    """
    since, until = span
    total = 0.0
    for answer in answers:
        with contextlib.suppress(IndexError):
            inside = min(until, answer.events[0]) - max(since, answer.sent)
            total += answer.prompt_tokens * max(0.0, inside) / answer.first_s
        total += sum(since <= event < until for event in answer.events)
    return total / (until - since)

"""Steps of an engine that differ only by what its sequences grow."""

import math
from dataclasses import dataclass

from benchmarks.capacity.load import Request
from benchmarks.capacity.timing import StepTiming


@dataclass(eq=False, slots=True)
class Sequence:
    """One request at one engine. Written by the engine, except `first_at` and `note`."""

    request: Request
    #: Tokens that need KV before the next token: the prompt, and after a preemption the output.
    context: int
    #: Output tokens to be generated; 0 in a prefill engine.
    left: int
    #: For the owner of the engine.
    note: object = None
    #: Its KV comes from a prefill worker: only the last prompt token is computed here.
    remote: bool = False
    #: Tokens of `context` that have KV.
    computed: int = 0
    #: KV tokens that it occupies; while it decodes, without those since it joined.
    memory: int = 0
    #: Number of the step after which it decodes, and of the one after which it ends.
    joined: int = -1
    ends: int = -1
    #: When the client got the first token; set before `arrived` if it came from elsewhere.
    first_at: float | None = None
    #: When the client got the last token, if the next one is late.
    token_at: float | None = None


@dataclass(slots=True)
class Phase:
    """`steps` steps: the first takes `first` seconds, each later one `growth` longer than the one
    before it."""

    began: float
    first: float
    growth: float
    steps: int
    #: Sequences that get a token in each step.
    streams: int
    #: Prompts that it computes, with their tokens per step.
    chunks: list[tuple[Sequence, int]]
    #: Sequences whose KV has come, and that have their first step.
    joining: list[Sequence]

    @property
    def ends_at(self) -> float:
        return self.began + total_s(self.first, self.growth, self.steps)

    def shorten(self, now: float) -> bool:
        """Ends it with the step that runs now. Returns whether that is earlier."""
        steps = steps_until(self.first, self.growth, now - self.began)
        if steps >= self.steps:
            return False
        self.steps = steps
        return True


def composed(
    timing: StepTiming,
    began: float,
    steps: int,
    chunks: list[tuple[Sequence, int]],
    joining: list[Sequence],
    *,
    streams: int,
    kv_tokens: int,
) -> Phase:
    """`steps` steps that compute these tokens of these prompts."""
    tokens = attention = 0.0
    for sequence, count in chunks:
        tokens += count
        attention += count * (sequence.computed + count / 2)
    first = timing.one(tokens=tokens, attention=attention, streams=streams, kv=kv_tokens)
    more = chunks[0][1] ** 2 if chunks and steps > 1 else 0.0
    growth = timing.attention_s * more + timing.kv_token_s * streams
    return Phase(began, first, growth, steps, streams, chunks, joining)


def total_s(first: float, growth: float, steps: int) -> float:
    """Seconds of `steps` steps, of which the first takes `first` and each later one `growth` more
    than the one before it."""
    return steps * first + growth * steps * (steps - 1) / 2


def steps_until(first: float, growth: float, after: float) -> int:
    """After how many whole steps `after` seconds have passed; at least 1. first: above 0."""
    if growth <= 0:
        steps = math.ceil(after / first)
    else:
        half = first - growth / 2
        steps = math.ceil((math.sqrt(half * half + 2 * growth * max(after, 0.0)) - half) / growth)
    steps = max(steps, 1)
    while steps > 1 and total_s(first, growth, steps - 1) >= after:
        steps -= 1
    while total_s(first, growth, steps) < after:
        steps += 1
    return steps

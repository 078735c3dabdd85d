"""Steps of an engine that differ only by what its sequences grow."""

from dataclasses import dataclass

from dynamo_lite.capacity.sequence import Sequence
from dynamo_lite.capacity.timing import StepTiming, steps_until, total_s


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
    #: Whether something that arrives can be started at a step in the middle.
    open: bool

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
    """At most `steps` steps that compute these tokens of these prompts."""
    tokens = attention = 0.0
    for sequence, count in chunks:
        tokens += count
        attention += count * (sequence.computed + count / 2)
    first = timing.one(tokens=tokens, attention=attention, streams=streams, kv=kv_tokens)
    more = chunks[0][1] ** 2 if chunks and steps > 1 else 0.0
    growth = timing.attention_s * more + timing.kv_token_s * streams
    return Phase(began, first, growth, steps, streams, chunks, joining, not chunks)

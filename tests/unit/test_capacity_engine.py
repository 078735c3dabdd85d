"""The engine of `benchmarks.planner`: formulas, and an engine that makes every step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.capacity.engine import EngineModel
from benchmarks.capacity.events import Events
from benchmarks.capacity.histogram import Histogram
from benchmarks.capacity.load import Request
from benchmarks.capacity.phase import Sequence, steps_until, total_s
from benchmarks.capacity.timing import StepTiming, Timing

STEP = StepTiming(step_s=0.01, token_s=1e-5, attention_s=1e-9, stream_s=1e-4, kv_token_s=1e-7)


def timing(kv_tokens: int = 100_000, seqs: int = 64, batched: int = 512) -> Timing:
    return Timing(step=STEP, kv_tokens=kv_tokens, max_num_seqs=seqs, max_num_batched_tokens=batched)


@dataclass
class Rig:
    """One engine, and when its requests had their first and last tokens."""

    timing: Timing = field(default_factory=timing)
    first: dict[int, float] = field(default_factory=dict[int, float])
    last: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        self.events, self.gaps = Events(), Histogram()
        self.engine = EngineModel(
            self.timing,
            self.events,
            admit=lambda _: True,
            on_computed=lambda one: self._note(self.first, one),
            on_end=lambda one: self._note(self.last, one),
            gaps=self.gaps,
        )

    def _note(self, times: dict[int, float], sequence: Sequence) -> None:
        assert isinstance(sequence.note, int) and sequence.note not in times
        times[sequence.note] = self.events.now

    def ask(self, number: int, at: float, prompt: int, output: int) -> None:
        request = Request(at, prompt, output)
        sequence = Sequence(request, prompt, output, note=number)
        self.events.at(at, self.engine.add, sequence)

    def run(self) -> None:
        self.events.run()
        assert not self.engine.running and not self.engine.waiting


def test_one_request_takes_exactly_the_time_of_the_formula():
    rig = Rig()
    rig.ask(0, 3.0, 1300, 50)
    rig.run()
    chunks = [(512, 0), (512, 512), (276, 1024)]
    prefill = sum(STEP.one(tokens=p, attention=p * (c + p / 2)) for p, c in chunks)
    decode = sum(STEP.one(streams=1, kv=1300 + i) for i in range(49))
    assert rig.first[0] == pytest.approx(3.0 + prefill, rel=1e-12)
    assert rig.last[0] == pytest.approx(3.0 + prefill + decode, rel=1e-12)
    assert rig.gaps.weight == 49
    assert rig.gaps.sum_s == pytest.approx(decode)


def test_a_long_prompt_pauses_a_stream_for_its_chunks():
    alone, beside = Rig(), Rig()
    for rig in (alone, beside):
        rig.ask(0, 0.0, 100, 40)
    beside.ask(1, 0.1, 2000, 1)
    alone.run()
    beside.run()
    # Four chunks of at most 511 tokens, beside one stream.
    harm = STEP.token_s * 2000 + STEP.attention_s * 2000 * 1000
    assert beside.last[0] - alone.last[0] == pytest.approx(harm)


def test_memory_that_runs_out_preempts_the_newest_which_computes_again():
    rig = Rig(timing(400, seqs=8))
    rig.ask(0, 0.0, 150, 100)
    rig.ask(1, 0.0, 150, 100)
    rig.run()
    assert rig.engine.preemptions >= 1
    assert rig.last[0] < rig.last[1]
    assert rig.engine.used == 0
    assert rig.gaps.weight == 2 * 99


@given(
    first=st.floats(1e-4, 1.0),
    growth=st.floats(0, 1e-3),
    steps=st.integers(1, 2000),
    part=st.floats(0.01, 1.0),
)
def test_the_step_at_a_time(first: float, growth: float, steps: int, part: float):
    after = total_s(first, growth, steps) * part
    found = steps_until(first, growth, after)
    assert 1 <= found <= steps
    assert total_s(first, growth, found) >= after
    assert found == 1 or total_s(first, growth, found - 1) < after


@dataclass
class Naive:
    """The same engine, step by step: what the phases must equal."""

    timing: Timing

    def run(self, asks: list[tuple[float, int, int]]) -> tuple[list[float], list[float], float]:
        """Times of the first and the last tokens, and the sum of the gaps."""
        self.asks, self.now, self.gaps = asks, 0.0, 0.0
        self.first, self.last = [0.0] * len(asks), [0.0] * len(asks)
        self.order = sorted(range(len(asks)), key=lambda i: asks[i][0])
        self.waiting: list[int] = []
        self.computing: list[list[int]] = []  # number, tokens done
        self.decoding: dict[int, list[int]] = {}  # number to KV tokens, tokens left
        while self.order or self.waiting or self.computing or self.decoding:
            if not (self.waiting or self.computing or self.decoding):
                self.now = max(self.now, asks[self.order[0]][0])
            while self.order and asks[self.order[0]][0] <= self.now:
                self.waiting.append(self.order.pop(0))
            self.step(self.scheduled())
        return self.first, self.last, self.gaps

    def scheduled(self) -> list[tuple[list[int], int]]:
        """The prompts of the next step, with their tokens."""
        budget = self.timing.max_num_batched_tokens - len(self.decoding)
        room = self.timing.max_num_seqs - len(self.computing) - len(self.decoding)
        chunks: list[tuple[list[int], int]] = []
        for one in self.computing:
            tokens = min(self.asks[one[0]][1] - one[1], budget)
            if tokens:
                chunks.append((one, tokens))
            budget -= tokens
        while budget and self.waiting and room:
            one = [self.waiting.pop(0), 0]
            self.computing.append(one)
            tokens = min(self.asks[one[0]][1], budget)
            chunks.append((one, tokens))
            budget -= tokens
            room -= 1
        return chunks

    def step(self, chunks: list[tuple[list[int], int]]) -> None:
        took = STEP.one(
            tokens=sum(tokens for _, tokens in chunks),
            attention=sum(tokens * (one[1] + tokens / 2) for one, tokens in chunks),
            streams=len(self.decoding),
            kv=sum(kv for kv, _ in self.decoding.values()),
        )
        self.now += took
        self.gaps += took * len(self.decoding)
        for number in list(self.decoding):
            self.decoding[number][0] += 1
            self.decoding[number][1] -= 1
            if not self.decoding[number][1]:
                del self.decoding[number]
                self.last[number] = self.now
        for one, tokens in chunks:
            one[1] += tokens
            _, prompt, output = self.asks[one[0]]
            if one[1] == prompt:
                self.computing.remove(one)
                self.first[one[0]] = self.last[one[0]] = self.now
                if output > 1:
                    self.decoding[one[0]] = [prompt, output - 1]


ASKS = st.lists(
    st.tuples(st.floats(0, 5).map(lambda x: round(x, 4)), st.integers(1, 900), st.integers(1, 120)),
    min_size=1,
    max_size=25,
    unique_by=lambda ask: ask[0],
)


@settings(max_examples=80, deadline=None)
@given(asks=ASKS, seqs=st.integers(1, 12), budget=st.integers(16, 300))
def test_phases_are_the_steps_of_an_engine_that_makes_each(
    asks: list[tuple[float, int, int]], seqs: int, budget: int
):
    limits = timing(10**6, seqs=seqs, batched=max(budget, seqs + 1))
    rig = Rig(limits)
    for number, ask in enumerate(asks):
        rig.ask(number, *ask)
    rig.run()
    first, last, gaps = Naive(limits).run(asks)
    assert [rig.first[i] for i in range(len(asks))] == pytest.approx(first, rel=1e-9)
    assert [rig.last[i] for i in range(len(asks))] == pytest.approx(last, rel=1e-9)
    assert rig.gaps.sum_s == pytest.approx(gaps, rel=1e-9, abs=1e-9)
    assert rig.gaps.weight == sum(output - 1 for _, _, output in asks)


@settings(max_examples=60, deadline=None)
@given(asks=ASKS, kv=st.integers(1021, 3000))
def test_every_sequence_ends_once_and_all_memory_comes_back(
    asks: list[tuple[float, int, int]], kv: int
):
    rig = Rig(timing(kv, seqs=8, batched=128))
    for number, ask in enumerate(asks):
        rig.ask(number, *ask)
    rig.run()
    assert rig.first.keys() == rig.last.keys() == set(range(len(asks)))
    assert rig.engine.used == 0
    assert rig.gaps.weight == sum(output - 1 for _, _, output in asks)

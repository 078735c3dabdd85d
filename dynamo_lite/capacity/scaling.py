"""How many workers there should be: the seam for planners, and the simplest ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_lite.capacity.options import Slo, WorkerCounts
from dynamo_lite.capacity.request import TraceRequest
from dynamo_lite.capacity.timing import Timing


@dataclass(frozen=True, kw_only=True)
class RoleWorkers:
    """The workers of one role. Ages are seconds."""

    ready: int
    #: Since the orders of those that start, oldest first.
    starting_ages_s: tuple[float, ...] = ()
    #: Since the orders to drain, oldest first.
    draining_ages_s: tuple[float, ...] = ()
    #: Since the youngest one became ready; None: all were there from the start.
    youngest_s: float | None = None

    @property
    def count(self) -> int:
        """Number of workers that serve or will serve."""
        return self.ready + len(self.starting_ages_s)


@dataclass(frozen=True, kw_only=True)
class DecodeWorkerReport:
    """A decode worker's report of itself."""

    running: int
    #: Requests, also those that wait for a remote prefill.
    waiting: int
    #: Share of its KV tokens.
    kv_usage: float
    kv_tokens: int


@dataclass(frozen=True, kw_only=True)
class ScalerInputs:
    """What a scaler may know: the present state, and the events since its last tick."""

    prefill: RoleWorkers
    decode: RoleWorkers
    #: Seconds since the last tick.
    since_s: float
    #: Requests that have arrived, and their prompt tokens.
    requests: int
    prompt_tokens: int
    #: Uncached tokens of prompts that went to prefill workers, and of prompts that were computed
    #: locally because prefill workers were missing.
    asked_tokens: int
    refused_tokens: int
    #: Jobs and tokens at the prefill workers and on their queue, now.
    backlog_jobs: int
    backlog_tokens: int
    #: Tokens that one busy prefill worker computes in a second; None: not measured.
    prefill_tokens_per_s: float | None
    #: KV tokens of one decode worker; used in all; part of it: waiting for a remote prefill.
    kv_tokens: int
    kv_used_tokens: int
    kv_parked_tokens: int
    #: Requests that decode workers run; that wait for a decode engine, and their prompt tokens.
    running: int
    waiting: int
    waiting_tokens: int
    max_num_seqs: int
    #: Median time between two tokens in the last minute; None: there were none.
    itl_s: float | None
    #: In the last seconds: requests that got KV memory and output tokens, both per second; and the
    #: mean time between two tokens.
    admitted_per_s: float | None = None
    tokens_per_s: float | None = None
    token_s: float | None = None
    #: Of each decode worker that takes requests.
    decode_workers: tuple[DecodeWorkerReport, ...] = ()


@dataclass(frozen=True)
class ScalerProposal:
    """Wanted numbers of workers, and why."""

    wanted: WorkerCounts
    reason: str


class Scaler(Protocol):
    """A planner. Called every `tick_s` seconds of simulated time with what is seen.

    `capacity/planner.py` is the planner of a graph.
    """

    name: str
    #: inf: never called.
    tick_s: float

    def tick(self, seen: ScalerInputs, now: float) -> ScalerProposal: ...


class Static:
    """The numbers never change."""

    tick_s = math.inf

    def __init__(self, counts: WorkerCounts):
        self.name, self._counts = f"static:{counts}", counts

    def tick(self, seen: ScalerInputs, now: float) -> ScalerProposal:
        return ScalerProposal(self._counts, "static")


class Scripted:
    """Numbers by time. steps: seconds and numbers."""

    tick_s = 1.0

    def __init__(self, steps: Sequence[tuple[float, WorkerCounts]]):
        self.name = "script:" + "+".join(f"{at:g}={counts}" for at, counts in steps)
        self._steps = sorted(steps, key=lambda step: step[0])

    def tick(self, seen: ScalerInputs, now: float) -> ScalerProposal:
        due = [counts for at, counts in self._steps if at <= now]
        return ScalerProposal((due or [self._steps[0][1]])[-1], "script")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits on the numbers that a scaler may request."""

    least: WorkerCounts
    #: Of both roles together, starting and draining ones included.
    most: int

    def clipped(self, prefill: int, decode: int) -> WorkerCounts:
        """The numbers within the bounds. Both numbers are reduced in proportion if their sum is
        too large."""
        prefill, decode = max(prefill, self.least.prefill), max(decode, self.least.decode)
        if prefill + decode > self.most:
            prefill = max(self.least.prefill, round(prefill * self.most / (prefill + decode)))
            prefill = min(prefill, self.most - self.least.decode)
            decode = self.most - prefill
        return WorkerCounts(prefill, decode)


#: Share of a prefill and of a decode worker that the oracle plans to use.
ORACLE_SHARES = (0.8, 0.8)
_TICK_S = 5.0
#: The oracle plans for the mean load of this long, or of a start if that is longer.
_WINDOW_S = 30.0


class Oracle:
    """Knows all arrivals, and orders workers as long before them as a start takes.

    A rule with foresight for comparisons. The least cost is near that of the best `shares`, which
    the runs must find. Prefill workers: seconds of computing that arrive per second. Decode
    workers: sequences at a time by Little's law, at the largest batch whose steps meet the target
    and whose KV fits.
    """

    name, tick_s = "oracle", _TICK_S

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        timing: Timing,
        slo: Slo,
        bounds: Bounds,
        *,
        start_s: float,
        remote_from: int,
        shares: tuple[float, float] = ORACLE_SHARES,
    ):
        self._start_s, self._bounds, self._shares = start_s, bounds, shares
        self._window_s = max(_WINDOW_S, _TICK_S)
        width = _TICK_S
        buckets = int(requests[-1].arrival_s / width) + 1 if requests else 1
        self._prefill_s = [0.0] * buckets
        self._streams_s = [0.0] * buckets
        batch = _largest_batch(requests, timing, slo)
        itl_s = min(slo.itl_s, timing.step.one(streams=batch, kv=batch * _mean_context(requests)))
        self._batch = max(batch, 1)
        for request in requests:
            at = int(request.arrival_s / width)
            if request.prompt_tokens > remote_from:
                self._prefill_s[at] += prefill_s(timing, request.prompt_tokens)
            # A sequence occupies its place after it has arrived.
            length = request.output_tokens * itl_s
            for later in range(at, min(buckets, at + int(length / width) + 1)):
                part = min(width, length - (later - at) * width)
                self._streams_s[later] += max(part, 0.0)

    def at_start(self) -> WorkerCounts:
        """The numbers at the beginning."""
        return self._wanted(0.0, 0.0)

    def tick(self, seen: ScalerInputs, now: float) -> ScalerProposal:
        rate, behind = seen.prefill_tokens_per_s, 0.0
        if rate:
            behind = seen.backlog_tokens / rate / self._window_s / 2
        until_s = now + self._start_s + self._window_s
        return ScalerProposal(self._wanted(now, behind), f"arrivals until {until_s:.0f} s")

    def _wanted(self, now: float, behind: float) -> WorkerCounts:
        """behind: prefill workers that only compute what waits already."""
        first = int(now / _TICK_S)
        last = int((now + self._start_s + self._window_s) / _TICK_S) + 1
        prefill = self._peak(self._prefill_s, first, last) / self._shares[0] + behind
        decode = self._peak(self._streams_s, first, last) / self._batch / self._shares[1]
        return self._bounds.clipped(math.ceil(prefill), math.ceil(decode))

    def _peak(self, values: list[float], first: int, last: int) -> float:
        """The largest mean per second over the window, within these buckets."""
        width = max(int(self._window_s / _TICK_S), 1)
        seen = values[first:last]
        if not seen:
            return 0.0
        sums = [sum(seen[i : i + width]) for i in range(max(len(seen) - width, 0) + 1)]
        return max(sums) / (width * _TICK_S)


def prefill_s(timing: Timing, tokens: int) -> float:
    """Seconds of a prompt alone in an engine."""
    steps = math.ceil(tokens / timing.engine.max_num_batched_tokens)
    step = timing.step
    return steps * step.step_s + step.token_s * tokens + step.attention_s * tokens * tokens / 2


def _mean_context(requests: Sequence[TraceRequest]) -> float:
    """Of decoding sequences: long outputs count more."""
    weight = sum(one.output_tokens for one in requests)
    total = sum(one.output_tokens * (one.prompt_tokens + one.output_tokens / 2) for one in requests)
    return total / weight if weight else 1.0


def _largest_batch(requests: Sequence[TraceRequest], timing: Timing, slo: Slo) -> int:
    context = _mean_context(requests)
    step = timing.step
    each = step.stream_s + step.kv_token_s * context
    by_time = (slo.itl_s - step.step_s) / each if each else math.inf
    by_memory = timing.engine.kv_tokens / context
    return max(1, int(min(by_time, by_memory, timing.engine.max_num_seqs)))

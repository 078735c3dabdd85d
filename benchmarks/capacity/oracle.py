"""A scaler with foresight, for comparisons."""

import math
from collections.abc import Sequence

from benchmarks.capacity.fleet import WorkerCounts
from benchmarks.capacity.graph import GraphModel, Slo
from benchmarks.capacity.load import Request
from benchmarks.capacity.run import Setting
from benchmarks.capacity.timing import Timing

_TICK_S = 5.0
#: The oracle plans for the mean load of this long.
_WINDOW_S = 30.0


class Oracle:
    """Knows all arrivals, and orders workers as long before them as a start takes.

    shares: of a prefill and of a decode worker that it plans to use. Its least cost is near that
    of the best shares, which the runs must find. Prefill workers: seconds of computing that arrive
    per second. Decode workers: sequences at a time by Little's law, at the largest batch whose
    steps meet the target and whose KV fits.
    """

    tick_s = _TICK_S

    def __init__(self, setting: Setting, slo: Slo, shares: tuple[float, float] = (0.8, 0.8)):
        requests, timing = setting.requests, setting.timing
        self._start_s, self._most, self._shares = setting.start_s, setting.most_workers, shares
        buckets = int(requests[-1].arrival_s / _TICK_S) + 1 if requests else 1
        self._prefill_s = [0.0] * buckets
        self._streams_s = [0.0] * buckets
        self._batch = batch = _largest_batch(requests, timing, slo)
        itl_s = min(slo.itl_s, timing.step.one(streams=batch, kv=batch * _mean_context(requests)))
        for request in requests:
            at = int(request.arrival_s / _TICK_S)
            if request.prompt_tokens > setting.thresholds.max_local_prefill_length:
                self._prefill_s[at] += timing.prefill_s(request.prompt_tokens)
            # A sequence occupies its place after it has arrived.
            length = request.output_tokens * itl_s
            for later in range(at, min(buckets, at + int(length / _TICK_S) + 1)):
                part = min(_TICK_S, length - (later - at) * _TICK_S)
                self._streams_s[later] += max(part, 0.0)

    def at_start(self) -> WorkerCounts:
        """The numbers at the beginning."""
        return self._wanted(0.0, 0.0)

    def tick(self, graph: GraphModel, now: float) -> WorkerCounts:
        written, busy_s = graph.tally.written_tokens, graph.tally.busy_s
        late_s = graph.queue.tokens * busy_s / written if written else 0.0
        return self._wanted(now, late_s / _WINDOW_S / 2)

    def _wanted(self, now: float, behind: float) -> WorkerCounts:
        """behind: prefill workers that only compute what waits already. Both numbers are reduced
        in proportion if their sum is too large."""
        first = int(now / _TICK_S)
        last = int((now + self._start_s + _WINDOW_S) / _TICK_S) + 1
        share = _peak(self._prefill_s[first:last]) / self._shares[0]
        prefill = max(math.ceil(share + behind), 1)
        share = _peak(self._streams_s[first:last]) / self._batch / self._shares[1]
        decode = max(math.ceil(share), 1)
        if prefill + decode > self._most:
            prefill = max(1, round(prefill * self._most / (prefill + decode)))
            prefill = min(prefill, self._most - 1)
            decode = self._most - prefill
        return WorkerCounts(prefill, decode)


def _peak(values: Sequence[float]) -> float:
    """The largest mean per second over the window, of values per tick."""
    if not values:
        return 0.0
    width = int(_WINDOW_S / _TICK_S)
    sums = [sum(values[i : i + width]) for i in range(max(len(values) - width, 0) + 1)]
    return max(sums) / _WINDOW_S


def _mean_context(requests: Sequence[Request]) -> float:
    """Of decoding sequences: long outputs count more."""
    weight = sum(one.output_tokens for one in requests)
    total = sum(one.output_tokens * (one.prompt_tokens + one.output_tokens / 2) for one in requests)
    return total / weight if weight else 1.0


def _largest_batch(requests: Sequence[Request], timing: Timing, slo: Slo) -> int:
    context = _mean_context(requests)
    step = timing.step
    each = step.stream_s + step.kv_token_s * context
    by_time = (slo.itl_s - step.step_s) / each if each else math.inf
    by_memory = timing.kv_tokens / context
    return max(1, int(min(by_time, by_memory, timing.max_num_seqs)))

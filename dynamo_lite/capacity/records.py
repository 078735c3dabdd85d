"""What happened to each request, and the state over time."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_lite.capacity.options import Slo
from dynamo_lite.capacity.request import TraceRequest

#: Of requests that have no such time.
NEVER = math.nan


class Records:
    """One entry per request of the trace, by its number. Times are seconds. on_all: called when
    every request has ended."""

    def __init__(self, count: int, on_all: Callable[[], None]):
        self._count, self._on_all = count, on_all
        self.ttft_s = array("d", [NEVER]) * count
        #: From the arrival to the last token.
        self.total_s = array("d", [NEVER]) * count
        #: Mean time between the tokens of a request.
        self.itl_s = array("d", [NEVER]) * count
        self.refused = self.completed = self.arrived = 0
        #: Output tokens of completed requests.
        self.output_tokens = 0

    @property
    def unfinished(self) -> int:
        return self.arrived - self.refused - self.completed

    def refuse(self) -> None:
        """A request is not taken."""
        self.refused += 1
        self._check()

    def answered(self, number: int, request: TraceRequest, at: float) -> None:
        assert math.isnan(self.ttft_s[number]), f"request {number} has two first tokens"
        self.ttft_s[number] = at - request.arrival_s

    def ended(self, number: int, request: TraceRequest, at: float, frontend_s: float) -> None:
        assert math.isnan(self.total_s[number]), f"request {number} has ended twice"
        self.completed += 1
        self.output_tokens += request.output_tokens
        self.total_s[number] = total_s = at - request.arrival_s + frontend_s
        if request.output_tokens > 1:
            since = max(total_s - self.ttft_s[number], 0.0)
            self.itl_s[number] = since / (request.output_tokens - 1)
        self._check()

    def meets(self, number: int, slo: Slo) -> tuple[bool, bool]:
        """Whether its first token, and the others, came in time. A request that has not completed
        misses both; a single token has no time between tokens."""
        if math.isnan(self.total_s[number]):
            return False, False
        itl_s = self.itl_s[number]
        return self.ttft_s[number] <= slo.ttft_s, math.isnan(itl_s) or itl_s <= slo.itl_s

    def _check(self) -> None:
        if self.completed + self.refused == self._count:
            self._on_all()


@dataclass(frozen=True, slots=True)
class Sample:
    """The state at one time."""

    at_s: float
    prefill: int
    decode: int
    #: Ordered and not ready, and draining, of both roles.
    starting: int
    draining: int
    jobs: int
    in_flight: int
    kv_usage: float

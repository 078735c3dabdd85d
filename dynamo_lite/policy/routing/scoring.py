"""Filter, score and lot: which of several candidates takes a request. Amounts are prompt tokens.

A filter leaves out candidates whose KV cache is full; a score weighs what each of the others would
save against what is queued there; the best one is taken, or one is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dynamo_lite.protocol.options import KvRoutingOptions
from dynamo_lite.protocol.records import EndpointRecord


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member that may take the request."""

    member: EndpointRecord
    #: Prompt tokens that the member holds, or will hold.
    matched: int
    #: Tokens that it computes before this prompt.
    load: int
    kv_usage: float = 0.0
    #: Prompt tokens that it is assumed to hold at least, because it had the session's last request.
    credit: int = 0


class Rated(Protocol):
    """What a filter and a score read of a candidate; the fields are those of `Candidate`."""

    @property
    def matched(self) -> int: ...
    @property
    def load(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def credit(self) -> int: ...


R = TypeVar("R", bound=Rated)

#: From this share of its KV cache in use on, a worker gets nothing while another one has room.
MAX_KV_USAGE = 0.95
#: Tokens that a request in the engine counts as, in addition to its prompt.
REQUEST_LOAD_TOKENS = 32


def with_room(candidates: Sequence[R]) -> Sequence[R]:
    """The candidates whose KV cache is not full; all, if all are full."""
    return [c for c in candidates if c.kv_usage < MAX_KV_USAGE] or candidates


def score(candidate: Rated, options: KvRoutingOptions) -> float:
    """Higher is better."""
    held = max(candidate.matched, candidate.credit)
    return options.kv_weight * held - candidate.load


def draw(scores: Sequence[float], scale: float, chance: float) -> int:
    """A position, with probability proportional to exp(score / scale). chance: in [0, 1)."""
    highest = max(scores)
    weights = [math.exp((value - highest) / scale) for value in scores]
    left = chance * sum(weights)
    for position, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return position
    return len(scores) - 1

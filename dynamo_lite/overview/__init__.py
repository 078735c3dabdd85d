"""What a running graph looks like from outside, for `dynamo-lite top` and the Frontend's page."""

from dynamo_lite.overview.model import (
    Decisions,
    Latency,
    LinkStatus,
    Overview,
    Queue,
    Transfers,
    Worker,
)
from dynamo_lite.overview.observer import Observer, state_of

__all__ = [
    "Decisions",
    "Latency",
    "LinkStatus",
    "Observer",
    "Overview",
    "Queue",
    "Transfers",
    "Worker",
    "state_of",
]
